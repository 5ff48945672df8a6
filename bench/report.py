"""The report as Markdown: tables of a summary, and the verdicts. Computes nothing that a summary does not know."""

from collections.abc import Iterator, Sequence

from bench.formulas import acceptance_by_position, acceptance_rate, is_divided, parts, tokens_per_round
from bench.samples import BARE, DRAFT, ONE_BY_ONE, PLAIN, TARGET, RoundSample
from bench.spread import markdown, spread
from bench.summary import CONTEXT_LEN, MEMORY, Summary, speculative
from bench.verdicts import OVERHEAD_MS, hop_bytes, verdicts

ROLES = (TARGET, DRAFT)
BUSY = " THE MACHINE WAS BUSY: times in this report mean little, ratios of neighbours a little more."
PARTS = ("draft queue", "draft compute", "draft way", "verify queue", "verify compute", "verify way", "gateway")
SYMBOLS = f"""\
Everything is in units of one target step: the bare engine's forward over one row, with its draw, at a context of
{CONTEXT_LEN} tokens. c is a draft step, v what each further row adds to a target step, R_t and R_d are empty round
trips on the streams of the two services, tau the tokens that a round commits.
S = tau (1 + R_t) / (1 + vK + cK + R_t + R_d) is the speedup over plain decoding that pays R_t for every token
("{ONE_BY_ONE}" is that, without a gateway). Plain decoding through the gateway lets the target go on unasked and pays
none, so of it only S / (1 + R_t) can be had. The target is measured over plain / S, the stricter pair. The last column
needs no plain decoding: tokens a second over tau / (what the bare parts of a round take)."""


def render(summary: Summary) -> str:
    """The whole report below its heading."""
    sections = [
        ("Floors and the bare engine", _floors(summary)),
        ("Bare engine steps, ms by rows", _steps(summary)),
        ("Empty pings on the sessions' streams", _pings(summary)),
    ]
    for heat in summary.temperatures:
        sections.append((f"Through the gateway, temperature {heat:g}", _speeds(summary, heat)))
        sections.append((f"A round by part, median ms, temperature {heat:g}", _parts(summary, heat)))
        sections.append((f"Bytes and acceptance, temperature {heat:g}", _bytes(summary, heat)))
        sections.append((f"Against the formula, temperature {heat:g}", _formula(summary, heat)))
    sections.append(("The formula", SYMBOLS))
    sections.append(
        (f"Targets{'.' + BUSY if summary.busy else ''}", "\n".join(f"- {each.line()}" for each in verdicts(summary)))
    )
    return "\n\n".join(f"### {title}\n\n{text}" for title, text in sections)


def _floors(summary: Summary) -> str:
    return f"Memory, past all caches: {_bandwidth(summary, MEMORY)} GB/s.{BUSY if summary.busy else ''}\n\n" + markdown(
        ("", *(f"{role} {summary.shapes[role].name}" for role in ROLES)),
        [
            ("weights a step, MB", *(f"{summary.shapes[role].step_bytes / 1e6:.1f}" for role in ROLES)),
            ("keys and values, MB", *(f"{summary.shapes[role].key_value_bytes / 1e6:.2f}" for role in ROLES)),
            ("GB/s over as many bytes", *(_bandwidth(summary, role) for role in ROLES)),
            ("floor: bytes / best bandwidth, ms", *(f"{summary.floor_ms(role):.3f}" for role in ROLES)),
            ("PyTorch operators, 1 row, ms", *(summary.operators_ms(role, 1).show(".2f") for role in ROLES)),
            ("PyTorch operators, 5 rows, ms", *(summary.operators_ms(role, 5).show(".2f") for role in ROLES)),
            ("engine, 1 row, ms", *(summary.step_ms(role, 1).show(".3f") for role in ROLES)),
            ("engine, 5 rows, ms", *(summary.step_ms(role, 5).show(".3f") for role in ROLES)),
            ("engine, 1 row, over floor", *(_over_floor(summary, role) for role in ROLES)),
        ],
    )


def _bandwidth(summary: Summary, buffer: str) -> str:
    found = summary.bandwidth(buffer)
    return f"{found.fastest / 1e9:.1f} at best ({found.reader}), {found.median / 1e9:.1f} median"


def _over_floor(summary: Summary, role: str) -> str:
    return f"{summary.step_ms(role, 1).median / summary.floor_ms(role):.2f}"


def _steps(summary: Summary) -> str:
    steps = summary.steps()
    places = dict.fromkeys((point.role, point.context_len, point.temperature) for point in steps)
    rows = sorted({point.rows for point in steps})
    cells = {(point.role, point.context_len, point.temperature, point.rows): found for point, found in steps.items()}
    return markdown(
        ("model", "context", "temperature", *(str(count) for count in rows)),
        [
            (place[0], str(place[1]), f"{place[2]:g}", *(cells[*place, count].show(".3f") for count in rows))
            for place in places
        ],
    )


def _pings(summary: Summary) -> str:
    unit_ms = summary.step_ms(TARGET, 1).median
    return markdown(
        ("stream", "ms, median (quartiles)", "R, in target steps"),
        [
            (f"{role}{', after a pause' if rested else ''}", found.show(".3f"), f"{found.median / unit_ms:.3f}")
            for rested in (False, True)
            for role in ROLES
            for found in [summary.ping_ms(role, rested=rested)]
        ],
    )


def _speeds(summary: Summary, heat: float) -> str:
    return markdown(
        ("setting", "tokens/s, median (quartiles)", f"over {BARE}", f"over {PLAIN}", "tau", "acceptance rate"),
        [
            (
                name,
                summary.speed(name, heat).show(".0f"),
                summary.over(name, BARE, heat).show(".2f"),
                summary.over(name, PLAIN, heat).show(".2f"),
                *_counts(summary.rounds(name, heat)),
            )
            for name in summary.settings
        ],
    )


def _counts(rounds: Sequence[RoundSample]) -> tuple[str, str]:
    rate = acceptance_rate(rounds)
    return f"{tokens_per_round(rounds):.2f}" if rounds else "-", "-" if rate is None else f"{rate:.3f}"


def _speculative(summary: Summary, heat: float) -> Iterator[tuple[str, list[RoundSample]]]:
    """The settings with proposals, and their rounds that have one, but for the first of each request."""
    for name in summary.settings:
        rounds = summary.steady(name, heat)
        if rounds:
            yield name, rounds


def _parts(summary: Summary, heat: float) -> str:
    table = markdown(
        ("setting", *PARTS, "outside rounds", "overhead", f"two pings + {OVERHEAD_MS}"),
        [_parts_row(summary, heat, name, rounds) for name, rounds in _speculative(summary, heat)],
    )
    return table + (
        "\n\nOverhead is the round without both computes. Outside rounds is what the client sees between them: "
        "text and the way to it, for each round."
    )


def _parts_row(summary: Summary, heat: float, name: str, rounds: Sequence[RoundSample]) -> tuple[str, ...]:
    outside = summary.outside_ms(name, heat).show(".3f")
    limit = f"{summary.ping_ms(TARGET).median + summary.ping_ms(DRAFT).median + OVERHEAD_MS:.3f}"
    divided = [parts(each) for each in rounds if is_divided(each)]
    overhead = spread(parts(each).overhead for each in rounds).show(".3f")
    shares = [
        f"{spread(getattr(each, part.replace(' ', '_')) for each in divided).median:.3f}" if divided else "-"
        for part in PARTS
    ]
    return name, *shares, outside, overhead, limit


def _bytes(summary: Summary, heat: float) -> str:
    return markdown(
        ("setting", "draft hop", "target hop", "most of a hop", "most, opening", "acceptance at position 1, 2, ..."),
        [
            (
                name,
                f"{spread(each.draft_bytes for each in rounds).median:.0f}",
                f"{spread(each.verify_bytes for each in rounds).median:.0f}",
                str(max(map(hop_bytes, rounds))),
                str(max(map(hop_bytes, summary.opening(name, heat)))),
                _shares(speculative(summary.rounds(name, heat))),
            )
            for name, rounds in _speculative(summary, heat)
        ],
    )


def _shares(rounds: Sequence[RoundSample]) -> str:
    return " ".join(f"{share:.2f}" for share in acceptance_by_position(rounds))


def _formula(summary: Summary, heat: float) -> str:
    costs = summary.costs(heat)
    symbols = f"c = {costs.c:.3f}, R_t = {costs.target_way:.3f}, R_d = {costs.draft_way:.3f}.\n\n"
    return symbols + markdown(
        (
            "setting",
            "v",
            "tau",
            "S",
            "measured over one by one",
            "S / (1 + R_t)",
            "over plain",
            "over plain / S",
            "rate",
        ),
        [_formula_row(summary, heat, name, rounds) for name, rounds in _speculative(summary, heat)],
    )


def _formula_row(summary: Summary, heat: float, name: str, rounds: Sequence[RoundSample]) -> tuple[str, ...]:
    predicted = summary.prediction(name, heat)
    over_plain = summary.over(name, PLAIN, heat).median
    draft_count = max(each.draft_count for each in rounds)
    return (
        name,
        f"{summary.costs(heat).v(draft_count):.3f}",
        f"{tokens_per_round(summary.rounds(name, heat)):.2f}",
        f"{predicted.over_synchronous:.2f}",
        f"{summary.over(name, ONE_BY_ONE, heat).median:.2f}",
        f"{predicted.over_plain:.2f}",
        f"{over_plain:.2f}",
        f"{over_plain / predicted.over_synchronous:.2f}",
        f"{summary.speed(name, heat).median / predicted.tokens_per_s:.2f}",
    )
