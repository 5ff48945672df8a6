"""Findings of checks, and their report: plain lines as they come, or one JSON object."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TextIO

from outrider.cli.output import write

# Exit codes of sysexits.h: no answer, a fault of ours, and what only the operator can change.
UNAVAILABLE, SOFTWARE, CONFIG = 69, 70, 78
SELF_TEST = "self test"


class Status(StrEnum):
    """Result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check in a sentence. `fix` is empty where nothing is to do, `exit_code` 0 unless it failed."""

    check: str
    status: Status
    sentence: str
    fix: str = ""
    exit_code: int = 0


def ok(check: str, sentence: str) -> Finding:
    """A finding that asks for nothing."""
    return Finding(check, Status.OK, sentence)


def warning(check: str, sentence: str, fix: str) -> Finding:
    """A finding that something works, but not as it could."""
    return Finding(check, Status.WARNING, sentence, fix)


def failed(check: str, sentence: str, fix: str, exit_code: int = CONFIG) -> Finding:
    """A finding that something does not work until somebody acts. A message without a full stop gets one."""
    return Finding(check, Status.FAILED, sentence if sentence.endswith(".") else f"{sentence}.", fix, exit_code)


def skipped(check: str, sentence: str, fix: str = "") -> Finding:
    """A finding that nothing was found out, and why."""
    return Finding(check, Status.SKIPPED, sentence, fix)


def exit_code(findings: Iterable[Finding]) -> int:
    """Exit code of the first check that failed, 0 when none did: later ones often fail because of it."""
    return next((each.exit_code for each in findings if each.status is Status.FAILED), 0)


def summary(findings: Sequence[Finding]) -> str:
    """The last line: how many findings of each kind, and what that means."""
    counts = {status: sum(each.status is status for each in findings) for status in Status}
    tally = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    if counts[Status.FAILED]:
        return f"{tally}. What failed keeps Outrider from working; follow its fix."
    # Only an answer shows that it works; without one there is only nothing that speaks against it.
    has_answered = any(each.check == SELF_TEST and each.status is not Status.SKIPPED for each in findings)
    verdict = "Outrider works here" if has_answered else "Nothing was found that keeps Outrider from working"
    return f"{tally}. {verdict}{'; warnings cost time or surprise' if counts[Status.WARNING] else ''}."


class Report:
    """Takes findings as they come. Each is a line with its fix below, or all are one JSON object at the end."""

    def __init__(self, output: TextIO, *, as_json: bool) -> None:
        self._output = output
        self._as_json = as_json
        self.findings: list[Finding] = []

    def add(self, *findings: Finding) -> None:
        """Takes findings, and prints them unless they go into an object."""
        self.findings += findings
        if not self._as_json:
            for each in findings:
                fix = f"{' ' * 9}fix: {each.fix}\n" if each.fix else ""
                write(self._output, f"{each.status:<8} {each.check}: {each.sentence}\n{fix}")

    def end(self, version: str) -> None:
        """Prints the summary, or the object with this version of Outrider."""
        report = {"version": version, "exit_code": exit_code(self.findings), "findings": [*map(asdict, self.findings)]}
        ending = json.dumps(report, ensure_ascii=False) if self._as_json else summary(self.findings)
        write(self._output, f"{ending}\n")
