"""The report: a table in a terminal, plain lines elsewhere, or one JSON object; copyable as it stands. No judge."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Protocol, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.cli.doctor.findings import Finding, Status, exit_code
from outrider.cli.doctor.selftest import CHECK as SELF_TEST

# The word tells it, the colour only helps.
STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "bold red", Status.SKIPPED: "dim"}


class Report(Protocol):
    """Takes findings as they come."""

    def begin(self, step: str) -> None:
        """A step begins that may take seconds."""

    def add(self, finding: Finding) -> None:
        """Takes a finding."""

    def end(self) -> None:
        """Comes behind the last one; not when the work was cancelled."""

    def close(self) -> None:
        """Comes at the very end, whatever happened."""


class TerminalReport:
    """One table at the end; until then a line that says what is being looked at."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._findings: list[Finding] = []
        self._status = console.status("")

    def begin(self, step: str) -> None:
        """Shows the step."""
        self._status.update(step)
        self._status.start()

    def add(self, finding: Finding) -> None:
        """Keeps it."""
        self._findings.append(finding)

    def end(self) -> None:
        """Prints everything."""
        self._status.stop()
        self._console.print(table(self._findings))
        self._console.print(Text(summary(self._findings)))

    def close(self) -> None:
        """Gives the line back."""
        self._status.stop()


class PlainReport:
    """A line for each finding as it comes, and one for what to do about it."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._findings: list[Finding] = []

    def begin(self, step: str) -> None:
        """Says nothing: lines come soon enough."""

    def add(self, finding: Finding) -> None:
        """Writes it."""
        self._findings.append(finding)
        fix = f"{' ' * 9}fix: {finding.fix}\n" if finding.fix else ""
        self._output.write(f"{finding.status:<8} {finding.check}: {finding.sentence}\n{fix}")
        self._output.flush()

    def end(self) -> None:
        """Writes how many there were of each kind."""
        self._output.write(f"{summary(self._findings)}\n")

    def close(self) -> None:
        """Everything is written already."""


class JsonReport:
    """One object at the end."""

    def __init__(self, output: TextIO, version: str) -> None:
        self._output = output
        self._version = version
        self._findings: list[Finding] = []

    def begin(self, step: str) -> None:
        """Says nothing."""

    def add(self, finding: Finding) -> None:
        """Keeps it."""
        self._findings.append(finding)

    def end(self) -> None:
        """Writes the object."""
        document = {
            "version": self._version,
            "exit_code": exit_code(self._findings),
            "findings": [asdict(each) for each in self._findings],
        }
        self._output.write(json.dumps(document, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Writes nothing: half an object is none."""


def table(findings: Sequence[Finding]) -> Table:
    """One row a finding, its way out below the sentence."""
    drawn = Table("check", "result", "what was found", box=box.SIMPLE_HEAD, pad_edge=False)
    for each in findings:
        told = Text(each.sentence)
        if each.fix:
            told.append(f"\nfix: {each.fix}", "italic")
        drawn.add_row(Text(each.check), Text(each.status, STYLES[each.status]), told)
    return drawn


def summary(findings: Sequence[Finding]) -> str:
    """How many findings of each kind, and what that means."""
    counts = {status: sum(each.status is status for each in findings) for status in Status}
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    if counts[Status.FAILED]:
        return f"{told}. What failed keeps Outrider from working; follow its fix."
    # Only an answer shows that it works; without one there is only nothing that speaks against it.
    has_answered = any(each.check == SELF_TEST and each.status is not Status.SKIPPED for each in findings)
    verdict = "Outrider works here" if has_answered else "Nothing was found that keeps Outrider from working"
    if counts[Status.WARNING]:
        return f"{told}. {verdict}; warnings cost time or surprise."
    return f"{told}. {verdict}."
