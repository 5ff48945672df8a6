"""The report: every number beside what was predicted of it and what it has to reach, in Markdown."""

import fnmatch
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.records import Record, Value, measured, read_records

SHOWN_ERROR, SHOWN_MORE = 600, 260


@dataclass(frozen=True, slots=True)
class Expectation:
    """What stood in gpu_expected.json before the first run, of all records whose key the pattern matches."""

    pattern: str
    predicted: Value | None = None
    at_least: float | None = None
    at_most: float | None = None
    equals: Value | None = None
    share_of: str = ""
    """Key of a measured number; `predicted` and the bounds are then parts of it."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A record with what was expected of it."""

    record: Record
    predicted: str = ""
    gate: str = ""
    passed: bool | None = None
    """None where nothing was demanded."""
    facts: dict[str, Any] = field(default_factory=dict)


def read_expectations(path: Path) -> list[Expectation]:
    """Expectations in order: the first whose pattern matches a record is its."""
    return [Expectation(**each) for each in json.loads(path.read_text(encoding="utf-8"))["expected"]]


def judge(record: Record, expectations: Sequence[Expectation], folder: Path) -> Row:
    """The record beside what was expected. A failure passes no gate; nor does a number whose measure is missing."""
    found = next((each for each in expectations if fnmatch.fnmatchcase(record.key, each.pattern)), None)
    if found is None:
        return Row(record, passed=False if record.error else None)
    unit = measured(folder, found.share_of) if found.share_of else 1.0
    bounds = {"≥": found.at_least, "≤": found.at_most, "=": found.equals}
    demanded = {sign: bound for sign, bound in bounds.items() if bound is not None}
    note = f" of {found.share_of}" if found.share_of else ""
    gate = ", ".join(f"{sign} {shown(bound)}{note}" for sign, bound in demanded.items())
    predicted = "" if found.predicted is None else f"{shown(found.predicted)}{note}"
    if not demanded and not record.error:
        return Row(record, predicted)
    passed = not record.error and unit is not None and _holds(record.value, demanded, unit)
    facts = {"share": record.value / unit} if found.share_of and unit and isinstance(record.value, float) else {}
    return Row(record, predicted, gate, passed, facts)


def _holds(value: Value | None, demanded: dict[str, Any], unit: float) -> bool:
    if "=" in demanded and value != demanded["="]:
        return False
    if isinstance(value, bool | str | None):
        return set(demanded) == {"="}
    least, most = demanded.get("≥", float("-inf")), demanded.get("≤", float("inf"))
    return bool(least * unit <= value <= most * unit)


def write_report(folder: Path, expected: Path) -> str:
    """Writes report.md from what the records hold; returns a short table of the gates and the failures."""
    expectations = read_expectations(expected)
    rows = [judge(record, expectations, folder) for record in read_records(folder)]
    sections = list(dict.fromkeys(row.record.section for row in rows))
    parts = ["# What this GPU does\n"]
    for section in sections:
        parts.append(f"## {section}\n\n| what | measured | predicted | gate | | more |\n|---|---|---|---|---|---|")
        parts += [_line(row) for row in rows if row.record.section == section and not row.record.error]
        failed = [row.record for row in rows if row.record.section == section and row.record.error]
        parts += [
            "",
            *(f"**{each.what}** failed:\n\n```\n{each.error.strip()[-SHOWN_ERROR:]}\n```\n" for each in failed),
        ]
    (folder / "report.md").write_text("\n".join(parts) + "\n", encoding="utf-8")
    return summary(rows, sections)


def summary(rows: Sequence[Row], sections: Sequence[str]) -> str:
    """A line for each section, then for each gate that is missed, then the first line of each failure."""
    lines = ["", "section       records  failed  gates passed"]
    for section in sections:
        those = [row for row in rows if row.record.section == section]
        gated = [row for row in those if row.gate and not row.record.error]
        failed = sum(bool(row.record.error) for row in those)
        lines.append(
            f"{section:<12} {len(those):>8} {failed:>7}  {sum(bool(row.passed) for row in gated)}/{len(gated)}"
        )
    missed = [row for row in rows if row.passed is False and not row.record.error]
    lines += ["", *(f"MISSED {row.record.key}: {_value(row.record)}, wanted {row.gate}" for row in missed)]
    failures = [row.record for row in rows if row.record.error]
    lines += [f"FAILED {each.key}: {each.error.strip().splitlines()[-1][:200]}" for each in failures]
    return "\n".join(lines)


def shown(value: Value | None) -> str:
    """A value as a table has it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _value(record: Record) -> str:
    return f"{shown(record.value)} {record.unit}".strip()


def _line(row: Row) -> str:
    verdict = "" if row.passed is None else "ok" if row.passed else "**missed**"
    more = "; ".join(f"{key} {shown(each)}" for key, each in (row.facts | row.record.more).items())
    cells = row.record.what, _value(row.record), row.predicted, row.gate, verdict, more[:SHOWN_MORE].replace("|", "/")
    return f"| {' | '.join(cells)} |"
