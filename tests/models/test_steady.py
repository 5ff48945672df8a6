"""A run is never quiet, and what it has made is kept soon."""

import io
import threading
from pathlib import Path

import pytest

from training import steady, storage
from training.steady import SteadyConsole
from training.storage import Storage


class Heard(io.StringIO):
    """An output that says when it was written to."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        self.came.set()
        return written


def test_what_takes_long_is_told_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, with what is being done; a line of the run's own puts it off."""
    assert steady.QUIET_S + steady.LOOK_S < 5
    console = SteadyConsole()
    console.file = heard = Heard()
    console.doing = "head: step 7 of 900"
    with console.steadily():
        console.print("Making a head")
        heard.came.clear()
        monkeypatch.setattr(steady, "QUIET_S", 0.0)
        assert heard.came.wait(60)
    assert heard.getvalue().startswith("Making a head\nhead: step 7 of 900 (0 s since the start)\n")


def test_a_checkpoint_is_due_by_steps_or_by_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Slow steps are not lost by dozens."""
    kept = Storage(tmp_path, 50)
    assert [kept.is_due(step) for step in (1, 50, 51)] == [False, True, False]
    monkeypatch.setattr(storage, "SAVE_S", 0.0)
    assert kept.is_due(51)
