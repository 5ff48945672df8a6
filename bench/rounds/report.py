"""The report as Markdown: tables of a summary, and what the targets say."""

from bench.common import markdown, spread
from bench.rounds.formulas import acceptance_by_position, acceptance_rate, is_divided, parts, tokens_per_round
from bench.rounds.samples import BARE, CONTEXT_LEN, MEMORY, ONE_BY_ONE, PLAIN, ROLES, TARGET, RoundSample
from bench.rounds.summary import OVERHEAD_MS, RoundsSummary, criteria, speculative

BUSY = " THE MACHINE WAS BUSY: times in this report mean little, ratios of neighbours a little more."
PARTS = ("draft queue", "draft compute", "draft way", "verify queue", "verify compute", "verify way", "gateway")
PARTS_NOTE = (
    "Overhead is the round without both computes. Outside rounds is what the client sees between them: "
    "text and the way to it, for each round."
)
SYMBOLS = f"""\
Everything is in units of one target step: the bare engine's forward over one row, with its draw, at a context of
{CONTEXT_LEN} tokens. c is a draft step, v what each further row adds to a target step, R_t and R_d are empty round
trips on the streams of the two services, tau the tokens that a round commits.
S = tau (1 + R_t) / (1 + vK + cK + R_t + R_d) is the speedup over plain decoding that pays R_t for every token
("{ONE_BY_ONE}" is that, without a gateway). Plain decoding through the gateway lets the target go on unasked and pays
none, so of it only S / (1 + R_t) can be had. The target is measured over plain / S, the stricter pair. The last column
needs no plain decoding: tokens a second over tau / (what the bare parts of a round take)."""


def render(summary: RoundsSummary) -> str:
    """The whole report below its heading."""
    busy = BUSY if summary.busy else ""
    memory = f"Memory, past all caches: {_bandwidth(summary, MEMORY)} GB/s.{busy}"
    sections = {
        "Floors and the bare engine": f"{memory}\n\n{_floors(summary)}",
        "Bare engine steps, ms by rows": _steps(summary),
        "Empty pings on the sessions' streams": _pings(summary),
    }
    for temperature in summary.temperatures:
        at = f"temperature {temperature:g}"
        # Settings with proposals, and their rounds that have one, but for the first of each request.
        steady = {name: rounds for name in summary.settings if (rounds := summary.steady(name, temperature))}
        sections[f"Through the gateway, {at}"] = _speeds(summary, temperature)
        sections[f"A round by part, median ms, {at}"] = _parts(summary, temperature, steady)
        sections[f"Bytes and acceptance, {at}"] = _bytes(summary, temperature, steady)
        sections[f"Against the formula, {at}"] = _formula(summary, temperature, steady)
    sections["The formula"] = SYMBOLS
    sections[f"Targets{'.' + busy if busy else ''}"] = "\n".join(f"- {each.line()}" for each in criteria(summary))
    return "\n\n".join(f"### {title}\n\n{text}" for title, text in sections.items())


Steady = dict[str, list[RoundSample]]


def _floors(summary: RoundsSummary) -> str:
    columns = []
    for role in ROLES:
        shape, step, floor_ms = summary.shapes[role], summary.step_ms(role, 1), summary.floor_ms(role)
        columns.append(
            {
                "": f"{role} {shape.name}",
                "weights a step, MB": f"{shape.step_bytes / 1e6:.1f}",
                "keys and values, MB": f"{shape.key_value_bytes / 1e6:.2f}",
                "GB/s over as many bytes": _bandwidth(summary, role),
                "floor: bytes / best bandwidth, ms": f"{floor_ms:.3f}",
                "PyTorch operators, 1 row, ms": summary.operators_ms(role, 1).show(".2f"),
                "PyTorch operators, 5 rows, ms": summary.operators_ms(role, 5).show(".2f"),
                "engine, 1 row, ms": step.show(".3f"),
                "engine, 5 rows, ms": summary.step_ms(role, 5).show(".3f"),
                "engine, 1 row, over floor": f"{step.median / floor_ms:.2f}",
            }
        )
    header, *rows = [(title, *(column[title] for column in columns)) for title in columns[0]]
    return markdown(header, rows)


def _bandwidth(summary: RoundsSummary, buffer: str) -> str:
    found = summary.bandwidth(buffer)
    return f"{found.fastest / 1e9:.1f} at best ({found.reader}), {found.median / 1e9:.1f} median"


def _steps(summary: RoundsSummary) -> str:
    steps = summary.steps()
    counts = sorted({point.rows for point in steps})
    rows: dict[tuple[str, ...], dict[int, str]] = {}
    for point, found in steps.items():
        place = point.role, str(point.context_len), f"{point.temperature:g}"
        rows.setdefault(place, {})[point.rows] = found.show(".3f")
    header = ("model", "context", "temperature", *map(str, counts))
    return markdown(header, [(*place, *(cells[count] for count in counts)) for place, cells in rows.items()])


def _pings(summary: RoundsSummary) -> str:
    unit_ms = summary.step_ms(TARGET, 1).median
    rows = []
    for rested in (False, True):
        for role in ROLES:
            found = summary.ping_ms(role, rested=rested)
            name = f"{role}{', after a pause' if rested else ''}"
            rows.append((name, found.show(".3f"), f"{found.median / unit_ms:.3f}"))
    return markdown(("stream", "ms, median (quartiles)", "R, in target steps"), rows)


def _speeds(summary: RoundsSummary, temperature: float) -> str:
    rows = []
    for name in summary.settings:
        rounds = summary.rounds(name, temperature)
        rate = acceptance_rate(rounds)
        rows.append(
            (
                name,
                summary.speed(name, temperature).show(".0f"),
                summary.over(name, BARE, temperature).show(".2f"),
                summary.over(name, PLAIN, temperature).show(".2f"),
                f"{tokens_per_round(rounds):.2f}" if rounds else "-",
                "-" if rate is None else f"{rate:.3f}",
            )
        )
    header = ("setting", "tokens/s, median (quartiles)", f"over {BARE}", f"over {PLAIN}", "tau", "acceptance rate")
    return markdown(header, rows)


def _parts(summary: RoundsSummary, temperature: float, steady: Steady) -> str:
    rows = []
    for name, rounds in steady.items():
        divided = [parts(each) for each in rounds if is_divided(each)]
        shares = [spread(each[part] for each in divided) for part in PARTS if divided]
        rows.append(
            (
                name,
                *([f"{share.median:.3f}" for share in shares] or ["-"] * len(PARTS)),
                summary.outside_ms(name, temperature).show(".3f"),
                spread(parts(each)["overhead"] for each in rounds).show(".3f"),
                f"{summary.two_pings_ms():.3f}",
            )
        )
    header = ("setting", *PARTS, "outside rounds", "overhead", f"two pings + {OVERHEAD_MS}")
    return f"{markdown(header, rows)}\n\n{PARTS_NOTE}"


def _bytes(summary: RoundsSummary, temperature: float, steady: Steady) -> str:
    rows = []
    for name, rounds in steady.items():
        by_position = acceptance_by_position(speculative(summary.rounds(name, temperature)))
        rows.append(
            (
                name,
                f"{spread(each.draft_bytes for each in rounds).median:.0f}",
                f"{spread(each.verify_bytes for each in rounds).median:.0f}",
                str(max(each.hop_bytes for each in rounds)),
                str(max(each.hop_bytes for each in summary.opening(name, temperature))),
                " ".join(f"{share:.2f}" for share in by_position),
            )
        )
    header = (
        "setting",
        "draft hop",
        "target hop",
        "most of a hop",
        "most, opening",
        "acceptance at position 1, 2, ...",
    )
    return markdown(header, rows)


def _formula(summary: RoundsSummary, temperature: float, steady: Steady) -> str:
    costs, rows = summary.costs(temperature), []
    for name, rounds in steady.items():
        predicted = summary.prediction(name, temperature)
        over_plain = summary.over(name, PLAIN, temperature).median
        figures = (
            tokens_per_round(summary.rounds(name, temperature)),
            predicted.over_synchronous,
            summary.over(name, ONE_BY_ONE, temperature).median,
            predicted.over_plain,
            over_plain,
            over_plain / predicted.over_synchronous,
            summary.speed(name, temperature).median / predicted.tokens_per_s,
        )
        v = costs.v(max(each.draft_count for each in rounds))
        rows.append((name, f"{v:.3f}", *(f"{figure:.2f}" for figure in figures)))
    over = ("S", "measured over one by one", "S / (1 + R_t)", "over plain", "over plain / S", "rate")
    symbols = f"c = {costs.c:.3f}, R_t = {costs.target_way:.3f}, R_d = {costs.draft_way:.3f}."
    return f"{symbols}\n\n{markdown(('setting', 'v', 'tau', *over), rows)}"
