"""What a service that starts says of its model's files, read from its log."""

import json
from dataclasses import dataclass
from typing import Any, Self

# What is said once, with its reason; the others say a file and how far they are.
FITTING = "fitting the cache"
ACTIONS = ("reading weights", "arranging weights", "making weights", "hashing weights", "measuring forwards", FITTING)
GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True, slots=True)
class FileProgress:
    """One step of a start: which file it is at, and how far, in bytes of all its files; None where it is not known."""

    action: str
    file: str
    done_bytes: int | None = None
    total_bytes: int | None = None

    @classmethod
    def of(cls, line: dict[str, Any]) -> Self | None:
        """The progress that a line of the log has; None for any other line."""
        if line.get("event") not in ACTIONS:
            return None
        return cls(
            line["event"],
            str(line.get("reason", line.get("file", ""))),
            line.get("done_bytes"),
            line.get("total_bytes"),
        )

    @property
    def share(self) -> str:
        """How far it is, as "12%"; empty where it is not known."""
        return f"{(self.done_bytes or 0) / self.total_bytes:.0%}" if self.total_bytes else ""

    @property
    def sentence(self) -> str:
        """For instance "hashing weights: model.safetensors, 1.2 of 14.9 GiB (8%)"."""
        if not self.total_bytes:
            return f"{self.action}: {self.file}"
        unit, name = (GIB, "GiB") if self.total_bytes >= GIB else (MIB, "MiB")
        done, total = ((each or 0) / unit for each in (self.done_bytes, self.total_bytes))
        return f"{self.action}: {self.file}, {done:.1f} of {total:.1f} {name} ({self.share})"


def log_line(text: str) -> dict[str, Any]:
    """The values of a line of a service's log; none where it is no such line."""
    if not text.startswith("{"):
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
