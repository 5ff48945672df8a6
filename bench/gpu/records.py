"""Lines of JSON that sections write while they run, so that whatever ends one loses nothing that it had measured."""

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RECORDS = "records.jsonl"

Value = float | int | bool | str


@dataclass(frozen=True, slots=True)
class Record:
    """One answer, or one failure; `what` is a path, as in "linear/8b/qkv/rows=1/eager"."""

    section: str
    what: str
    value: Value | None = None
    """None where it failed."""
    unit: str = ""
    error: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The name that predictions match."""
        return f"{self.section}/{self.what}"


class Recorder:
    """Appends the records of one section to the file of all."""

    def __init__(self, folder: Path, section: str) -> None:
        self.folder, self.section = folder, section

    def add(self, what: str, value: Value, unit: str = "", **more: object) -> None:
        """Writes an answer at once."""
        self._write(Record(self.section, what, value, unit, more=more))

    def fail(self, what: str, error: str) -> None:
        """Writes a failure at once."""
        self._write(Record(self.section, what, error=error))

    @contextmanager
    def case(self, what: str) -> Iterator[None]:
        """Records what is raised inside, and goes on; but not when the device itself has failed, which is for good."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a failure is a result here, and stands in the report
            self.fail(what, traceback.format_exc())
            if "CUDA error" in str(error):
                sys.exit(f"{self.section}: the device failed in {what}")

    def _write(self, record: Record) -> None:
        with (self.folder / RECORDS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")


def read_records(folder: Path) -> list[Record]:
    """All records in order; a line that was cut off is left out."""
    path = folder / RECORDS
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [Record(**json.loads(line)) for line in lines if line.endswith("\n")]


def measured(folder: Path, key: str) -> float | None:
    """The number of an earlier section; None where it has not been measured."""
    found = [each.value for each in read_records(folder) if each.key == key]
    return float(found[-1]) if found and isinstance(found[-1], int | float) else None
