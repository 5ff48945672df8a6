"""The table of a load run. Computes nothing but one ratio."""

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich import box
from rich.table import Table
from rich.text import Text

from outrider.cli.output import console_for

SPECULATIVE, PLAIN = "speculative", "plain"
# Name for people, name in the result, form.
ROWS = (
    ("requests answered", "completed", "d"),
    ("requests failed", "failed", "d"),
    ("requests/s", "request_throughput", ".2f"),
    ("output tokens/s", "output_throughput", ".1f"),
)
TIMES = (
    ("time to first token", "ttft"),
    ("time per output token", "tpot"),
    ("between two bursts", "itl"),
    ("whole request", "e2el"),
)
SPECULATION = (
    ("drafts", "num_drafts", "d"),
    ("draft tokens", "num_draft_tokens", "d"),
    ("accepted tokens", "num_accepted_tokens", "d"),
    ("acceptance rate", "acceptance_rate", ".3f"),
    ("mean acceptance length", "mean_acceptance_length", ".2f"),
)


def tell(document: Mapping[str, Any], output: TextIO) -> None:
    """Prints the table and what follows from it."""
    console = console_for(output)
    results = {name: document[name] for name in (SPECULATIVE, PLAIN) if name in document}
    console.print(table(results))
    for line in lines(document, results):
        console.print(Text(line), soft_wrap=True)


def table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """One column a setting."""
    drawn = Table("", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in results:
        drawn.add_column(name, justify="right")
    for title, key, form in ROWS:
        drawn.add_row(title, *(cell(each[key], form) for each in results.values()))
    for title, kind in TIMES:
        drawn.add_row(f"{title}, ms: median", *(cell(each[f"median_{kind}_ms"], ".1f") for each in results.values()))
        drawn.add_row("  mean", *(_mean(each, kind) for each in results.values()))
        drawn.add_row("  99 %", *(cell(each[f"p99_{kind}_ms"], ".1f") for each in results.values()))
    for title, key, form in SPECULATION:
        drawn.add_row(title, *(cell(each[key] or None, form) for each in results.values()))
    drawn.add_row("accepted by position", *(_shares(each) for each in results.values()))
    return drawn


def lines(document: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What the two settings say about each other."""
    if len(results) < 2:
        return []
    fast, slow = (results[name]["output_throughput"] for name in (SPECULATIVE, PLAIN))
    equal, compared = document["equal_answers"], document["compared_answers"]
    told = [f"Speculation gives {fast / slow:.2f} times the tokens/s of plain decoding."] if fast and slow else []
    sameness = "token for token" if equal == compared else "which must be all under match on a CPU"
    return [*told, f"{equal} of {compared} answers are the same with and without it, {sameness}."]


def cell(value: float | None, form: str) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:{form}}"


def _mean(result: Mapping[str, Any], kind: str) -> str:
    mean, deviation = result[f"mean_{kind}_ms"], result[f"std_{kind}_ms"]
    return "-" if mean is None else f"{mean:.1f} ± {deviation:.1f}"


def _shares(result: Mapping[str, Any]) -> str:
    counts: Sequence[int] = result["accepted_per_pos"]
    return " ".join(f"{count / result['num_drafts']:.2f}" for count in counts) if counts else "-"
