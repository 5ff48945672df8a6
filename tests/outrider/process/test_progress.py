"""What a service tells of its files while it loads: the lines of the engine, as a supervisor reads them."""

import json
import threading

import pytest
import structlog
from structlog.testing import capture_logs

from outrider.engine.models import progress
from outrider.engine.models.progress import Progress
from outrider.process.progress import ACTIONS, FITTING, FileProgress, log_line


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set with the first line, which comes at once."""
    happened, log = threading.Event(), structlog.get_logger()

    class Listening:
        """The log, which says when it has a line."""

        def info(self, action: str, **values: object) -> None:
            """Logs it."""
            log.info(action, **values)
            happened.set()

    monkeypatch.setattr(progress, "log", Listening())
    monkeypatch.setattr(progress, "TELL_S", 0.001)
    return happened


@pytest.mark.parametrize("action", ACTIONS)
def test_a_line_of_the_engine_is_read_as_it_was_meant(action: str, told: threading.Event) -> None:
    """The file, and how far it is."""
    with capture_logs() as lines, Progress(action, "model.safetensors", 4 << 30) as step:
        step.done_bytes = 1 << 30
        for _ in range(2):  # The first may have been begun before.
            told.clear()
            assert told.wait(10)
    found = FileProgress.of(log_line(json.dumps(lines[-1])))
    assert found is not None
    assert found.sentence == f"{action}: model.safetensors, 1.0 of 4.0 GiB (25%)"


def test_what_remains_counts_too_and_what_nobody_knows_is_left_out(told: threading.Event) -> None:
    """Of what is taken out of a store bit by bit, and of a library's own loading."""
    with capture_logs() as lines:
        with Progress("arranging weights", "big", 2 << 20, lambda: 1 << 20):
            assert told.wait(10)
        told.clear()
        with Progress("reading weights", "big"):
            assert told.wait(10)
    first, last = FileProgress.of(lines[0]), FileProgress.of(lines[-1])
    assert first is not None
    assert last is not None
    assert (first.sentence, first.share) == ("arranging weights: big, 1.0 of 2.0 MiB (50%)", "50%")
    assert (last.sentence, last.share) == ("reading weights: big", "")


def test_a_cache_that_was_fitted_is_said_with_its_reason() -> None:
    """Once, by the line that the engine writes."""
    line = {"event": FITTING, "reason": "2,048 tokens in 512 MiB", "model": "big", "context_len": 2048}
    found = FileProgress.of(line)
    assert found is not None
    assert (found.sentence, found.share) == ("fitting the cache: 2,048 tokens in 512 MiB", "")


def test_a_step_that_is_soon_over_says_nothing() -> None:
    """So the log of a small model stays short."""
    with capture_logs() as lines, Progress("hashing weights", "small", 1):
        pass
    assert lines == []


@pytest.mark.parametrize("text", ["", "{", "[1]", "a sentence", '{"event": "listening"}', "{}"])
def test_other_lines_are_no_progress(text: str) -> None:
    """Whatever a service or a library of its writes."""
    assert FileProgress.of(log_line(text)) is None
