"""The report as Markdown: tables of a summary."""

from outrider.cli.bench.common import PLAIN, markdown, spread
from outrider.cli.bench.rounds.samples import BARE, CONTEXT_LEN, MEMORY, OPERATORS, PING, ROLES
from outrider.cli.bench.rounds.summary import RoundsSummary, acceptance_rate, parts, tokens_per_round

OVERHEAD_MS = 0.25  # what a round may cost beside two pings
BUSY = " THE MACHINE WAS BUSY: times in this report mean little, ratios of neighbours a little more."
PARTS = ("draft queue", "draft compute", "draft way", "verify queue", "verify compute", "verify way", "gateway")
SYMBOLS = f"""\
Everything is in units of one target step: the bare engine's forward over one row, with its draw, at a context of
{CONTEXT_LEN} tokens. c is a draft step, v what each further row adds to a target step, R_t and R_d are empty round
trips on the streams of the two services, tau the tokens that a round commits.
S = tau (1 + R_t) / (1 + vK + cK + R_t + R_d) is the speedup over plain decoding that pays R_t for every token. Plain
decoding through the gateway lets the target go on unasked and pays none, so over plain / S is at most 1 / (1 + R_t).
Overhead is the round without both computes. Bytes are those of request and answer together."""


def render(summary: RoundsSummary) -> str:
    """The whole report below its heading."""
    memory = f"Memory, past all caches: {_bandwidth(summary, MEMORY)} GB/s.{BUSY if summary.busy else ''}"
    sections = {"Floors, the bare engine, and empty pings": f"{memory}\n\n{_floors(summary)}"}
    for temperature in summary.temperatures:
        sections[f"Through the gateway, temperature {temperature:g}"] = _speeds(summary, temperature)
        sections[f"A round by part, median ms and bytes, temperature {temperature:g}"] = _parts(summary, temperature)
    sections["The formula, and what the figures are"] = SYMBOLS
    return "\n\n".join(f"### {title}\n\n{text}" for title, text in sections.items())


def _bandwidth(summary: RoundsSummary, buffer: str) -> str:
    fastest, usual = summary.bandwidth(buffer)
    return f"{fastest / 1e9:.1f} at best, {usual / 1e9:.1f} median"


def _floors(summary: RoundsSummary) -> str:
    columns = []
    for role in ROLES:
        size, step, floor_ms = summary.sizes[role], summary.step_ms(role, 1), summary.floor_ms(role)
        columns.append(
            {
                "": role if size.name == role else f"{role} {size.name}",
                "weights a step, MB": f"{size.step_bytes / 1e6:.1f}",
                "GB/s over as many bytes": _bandwidth(summary, role),
                "floor: bytes / best bandwidth, ms": f"{floor_ms:.3f}",
                "PyTorch operators, 1 row, ms": summary.time_ms(OPERATORS, role, 1).show(".2f"),
                "PyTorch operators, 5 rows, ms": summary.time_ms(OPERATORS, role, 5).show(".2f"),
                "engine, 1 row, ms": step.show(".3f"),
                "engine, 5 rows, ms": summary.step_ms(role, 5).show(".3f"),
                "engine, 1 row, over floor": f"{step.median / floor_ms:.2f}",
                "empty ping on a link, ms": summary.time_ms(PING, role).show(".3f"),
            }
        )
    header, *rows = [(title, *(column[title] for column in columns)) for title in columns[0]]
    return markdown(header, rows)


def _speeds(summary: RoundsSummary, temperature: float) -> str:
    costs, rows = summary.costs(temperature), []
    for name in summary.settings:
        rounds, over_plain = summary.rounds(name, temperature), summary.over(name, PLAIN, temperature)
        steady, rate = summary.steady(name, temperature), acceptance_rate(rounds)
        row = [
            name,
            summary.speed(name, temperature).show(".0f"),
            summary.over(name, BARE, temperature).show(".2f"),
            over_plain.show(".2f"),
            f"{tokens_per_round(rounds):.2f}" if rounds else "-",
            "-" if rate is None else f"{rate:.3f}",
        ]
        if steady:
            v, speedup = costs.v(max(each.draft_count for each in steady)), summary.formula(name, temperature)
            row += [f"{v:.3f}", f"{speedup:.2f}", f"{over_plain.median / speedup:.2f}"]
        rows.append(row + ["-"] * (9 - len(row)))
    over = (f"over {BARE}", f"over {PLAIN}", "tau", "acceptance rate", "v", "S", f"over {PLAIN} / S")
    symbols = f"c = {costs.c:.3f}, R_t = {costs.target_ping:.3f}, R_d = {costs.draft_ping:.3f}."
    return f"{markdown(('setting', 'tokens/s, median (quartiles)', *over), rows)}\n\n{symbols}"


def _parts(summary: RoundsSummary, temperature: float) -> str:
    rows, wanted_ms = [], sum(summary.time_ms(PING, role).median for role in ROLES) + OVERHEAD_MS
    for name in summary.settings:
        if rounds := summary.steady(name, temperature):
            divided = [parts(each) for each in rounds]
            rows.append(
                (
                    name,
                    *(f"{spread(each[part] for each in divided).median:.3f}" for part in PARTS),
                    spread(each["overhead"] for each in divided).show(".3f"),
                    f"{wanted_ms:.3f}",
                    f"{spread(each.draft_bytes for each in rounds).median:.0f}",
                    f"{spread(each.verify_bytes for each in rounds).median:.0f}",
                    str(max(each.hop_bytes for each in rounds)),
                )
            )
    over = ("overhead", f"two pings + {OVERHEAD_MS}", "bytes, draft hop", "bytes, target hop", "most of a hop")
    return markdown(("setting", *PARTS, *over), rows)
