"""What a check found: one sentence, and what to do about it. Looks at nothing itself."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

# Of sysexits.h: nobody answers, a fault of ours, and what only the operator can change.
UNAVAILABLE, SOFTWARE, CONFIG = 69, 70, 78


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result. `fix` is empty where there is nothing to change, `exit_code` is 0 unless it failed."""

    check: str
    status: Status
    sentence: str
    fix: str = ""
    exit_code: int = 0


def ok(check: str, sentence: str) -> Finding:
    """Nothing to do."""
    return Finding(check, Status.OK, sentence)


def warning(check: str, sentence: str, fix: str) -> Finding:
    """It works, but not as it could."""
    return Finding(check, Status.WARNING, sentence, fix)


def failed(check: str, sentence: str, fix: str, exit_code: int = CONFIG) -> Finding:
    """It does not work until somebody acts."""
    return Finding(check, Status.FAILED, sentence, fix, exit_code)


def skipped(check: str, sentence: str, fix: str = "") -> Finding:
    """Nothing was found out, and why."""
    return Finding(check, Status.SKIPPED, sentence, fix)


def exit_code(findings: Iterable[Finding]) -> int:
    """That of the first check that failed, 0 when none did: later ones often fail because of it."""
    return next((each.exit_code for each in findings if each.status is Status.FAILED), 0)


def told(count: int, noun: str) -> str:
    """A number with its noun, which gets an s unless it is one."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def gibibytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
