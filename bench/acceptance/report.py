"""The tables of a measurement of acceptance, for a terminal and as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from bench.acceptance.runs import WHOLE, name_of
from bench.acceptance.summary import AcceptanceSummary
from bench.common import markdown

# Points lost by a simulated pair of acceptance 0.68 at temperature 1, by top-N; as peaked as those of large models.
SIMULATED = {8: 0.60, 16: 0.48, 32: 0.39, 64: 0.30, 128: 0.24, 256: 0.18}
SYMBOLS = """\
Every rule guesses and decides behind the same prefixes of texts that the target wrote at that temperature; nothing is
committed, so the rules' places are equal. Acceptance rate: accepted of all draft tokens that were evaluated. Tokens a
round: accepted and the target's own one. ±: one standard error, over texts. Loss: what a law of N tokens and 16-bit
weights costs of the chance that `ratio` keeps the next draft token, sum of min(target, draft), in points of a hundred.
Bytes: of the larger hop of a round, request and answer together."""


@dataclass(frozen=True, slots=True)
class ReportTable:
    """One table."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(summary: AcceptanceSummary) -> list[ReportTable]:
    """All tables of a run."""
    hot = [temperature for temperature in summary.plan.temperatures if temperature]
    found = [_rules(summary)]
    if hot:
        found += [_gains(summary, hot), _losses(summary, hot), _hops(summary, hot)]
    return found


def show(found: Sequence[ReportTable], console: Console) -> None:
    """Prints the tables."""
    for each in found:
        table = Table(*each.header, title=each.title, title_justify="left")
        for row in each.rows:
            table.add_row(*row)
        console.print(table)


def render(found: Sequence[ReportTable]) -> str:
    """The tables as Markdown, and what their figures mean."""
    sections = [f"### {each.title}\n\n{markdown(each.header, each.rows)}" for each in found]
    return "\n\n".join([*sections, f"### What the figures are\n\n{SYMBOLS}"])


def _rules(summary: AcceptanceSummary) -> ReportTable:
    plan = summary.plan
    header = ["rule"]
    for temperature in plan.temperatures:
        header += [f"acceptance rate, temperature {temperature:g}", "tokens a round"]
    rows = []
    for name in map(name_of, plan.rules):
        row = [name]
        for temperature in plan.temperatures:
            row.append(summary.rate(temperature, name, plan.top_n).show(".3f"))
            row.append(summary.length(temperature, name, plan.top_n).show(".3f"))
        rows.append(row)
    return ReportTable(f"Rules, K = {plan.draft_count}, laws of {plan.top_n} tokens", header, rows)


def _gains(summary: AcceptanceSummary, temperatures: Sequence[float]) -> ReportTable:
    names = [name_of(each) for each in summary.plan.rules]
    pairs = [("block", "ratio"), ("ratio", "match"), ("block", "match")]
    rows = [
        (f"{one} over {two}", *(summary.gain(each, one, two).show(".3f") for each in temperatures))
        for one, two in pairs
        if {one, two} <= set(names)
    ]
    return ReportTable("Tokens a round, paired differences", _header("", temperatures), rows)


def _losses(summary: AcceptanceSummary, temperatures: Sequence[float]) -> ReportTable:
    rows = [
        (
            str(top_n),
            *(summary.loss(each, top_n).show(".2f", 100) for each in temperatures),
            f"{SIMULATED[top_n]:.2f}" if top_n in SIMULATED else "-",
        )
        for top_n in summary.plan.top_ns
    ]
    rows.append(("whole law: kept", *(summary.overlap(each, WHOLE).show(".2f", 100) for each in temperatures), "68"))
    header = (*_header("top-N", temperatures), "simulated, temperature 1")
    return ReportTable("Loss of acceptance by top-N, points", header, rows)


def _hops(summary: AcceptanceSummary, temperatures: Sequence[float]) -> ReportTable:
    header, rows = ["top-N"], []
    for temperature in temperatures:
        header += [f"tokens a round, temperature {temperature:g}", "bytes a hop", "at most"]
    for top_n in summary.plan.top_ns:
        row = [str(top_n)]
        for temperature in temperatures:
            average, most = summary.hop_bytes(temperature, top_n)
            row += [summary.length(temperature, "ratio", top_n).show(".3f"), f"{average:.0f}", str(most)]
        rows.append(row)
    return ReportTable(f"The rule ratio by top-N, K = {summary.plan.draft_count}", header, rows)


def _header(first: str, temperatures: Sequence[float]) -> list[str]:
    return [first, *(f"temperature {each:g}" for each in temperatures)]
