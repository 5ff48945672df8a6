"""Standard output and error of a process that serves: a writer never waits and never hears of a fault.

A full disk, a pipe whose reader is gone, or one that is never read, is no reason to fail a request or to hold up the
loop. So a thread writes. What it cannot write is lost and counted, and how much that was is said as soon as writing
works again.
"""

import io
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

# A thousand lines or so, for readers that come back in a moment.
MAX_WAITING_BYTES = 1 << 18
# How often it is looked whether what was lost can be said.
RETRY_S = 1.0
# What the end of a process may wait for its last lines.
FINISH_S = 1.0
UNREAD = "nobody read what was written before"
OUTPUT, ERRORS = 1, 2

Notice = Callable[[int, str], str]
"""The line that says how many lines were lost, and why."""


class LossyFile(io.RawIOBase):
    """Writes to a descriptor that others own, in a thread of its own; `lost_lines` counts what could not be written."""

    def __init__(self, fd: int, notice: Notice) -> None:
        super().__init__()
        self.lost_lines = 0
        self._fd = fd
        self._notice = notice
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        # Number of the lost lines that no line has reported yet.
        self._untold, self._reason = 0, ""
        self._is_torn = self._is_over = False
        # Of a lock that its owner may take again: what a finalizer says comes in the middle of anything.
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="lines", daemon=True)
        self._thread.start()

    def writable(self) -> bool:
        """Always true, as for any stream that is written to."""
        return True

    def fileno(self) -> int:
        """Descriptor that the lines are written to."""
        return self._fd

    def isatty(self) -> bool:
        """Whether people read it."""
        return os.isatty(self._fd)

    def write(self, data: Any, /) -> int:  # noqa: ANN401 - any buffer, as the library has it
        """Takes whole lines at once, from any thread; those for which there is no room are lost."""
        piece = bytes(data)
        with self._changed:
            if self._num_bytes + len(piece) > MAX_WAITING_BYTES:
                self._lose(piece, UNREAD)
            elif piece:
                # Nothing is written too, by who wants to know whether it can be.
                self._waiting.append(piece)
                self._num_bytes += len(piece)
                self._changed.notify_all()
        return len(piece)

    def finish(self) -> None:
        """Waits for what has been written, FINISH_S at most; what comes later is written as before."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_bytes, FINISH_S)

    def end(self) -> None:
        """Lets the thread end after what has been written."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _lose(self, piece: bytes, reason: str) -> None:
        num_lines = max(1, piece.count(b"\n"))
        self.lost_lines += num_lines
        self._untold += num_lines
        self._reason = reason

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_over, RETRY_S if self._untold else None)
                if self._is_over and not self._waiting:
                    return
                piece, untold, reason = self._waiting[0] if self._waiting else b"", self._untold, self._reason
            fault = ""
            if untold:
                # What was torn has no end.
                fault = self._put(b"\n" * self._is_torn + self._notice(untold, reason).encode() + b"\n")
                if not fault:
                    self._is_torn = False
                    with self._changed:
                        self._untold -= untold
            fault = fault or self._put(piece)
            with self._changed:
                if fault and piece:
                    self._lose(piece, fault)
                if piece:
                    self._waiting.popleft()
                    self._num_bytes -= len(piece)
                self._changed.notify_all()

    def _put(self, data: bytes) -> str:
        """Writes all of it; returns what went wrong, if anything."""
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:
                # The process that made the pipe has made it so, for all who have it.
                ready = select.poll()
                ready.register(self._fd, select.POLLOUT)
                ready.poll()
            except OSError as error:
                self._is_torn = self._is_torn or len(left) < len(data)
                return error.strerror or type(error).__name__
        return ""


class LossyText(io.TextIOWrapper):
    """A text stream over a LossyFile, as the interpreter has them; no character is a fault either."""

    def __init__(self, fd: int, notice: Notice) -> None:
        self.file = LossyFile(fd, notice)
        super().__init__(self.file, "utf-8", "backslashreplace", line_buffering=True)  # type: ignore[arg-type]


@contextmanager
def unfailing(notice: Notice) -> Iterator[None]:
    """Puts such streams in the places of sys.stdout and sys.stderr until it is left, which waits for FINISH_S at most.

    `notice` makes the line that says what was lost.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = streams = LossyText(OUTPUT, notice), LossyText(ERRORS, notice)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in streams:
            stream.flush()
            stream.file.finish()
            stream.file.end()


def finish_streams() -> None:
    """Waits a moment until what was said is written, for who ends the process without the interpreter's help."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        if isinstance(stream, LossyText):
            stream.file.finish()


def hold_descriptors() -> None:
    """Opens /dev/null in the place of standard streams that are closed: nothing else may get their numbers.

    A socket that is descriptor 2 is sent what a library has to complain about.
    """
    for fd in range(ERRORS + 1):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


class LostLines(Collector):
    """Metrics of the lines that the standard streams of this process have lost."""

    def collect(self) -> Iterable[Metric]:
        """Number of lost lines, as one family."""
        lost = sum(each.file.lost_lines for each in (sys.stdout, sys.stderr) if isinstance(each, LossyText))
        yield CounterMetricFamily("outrider_lost_lines", "Lines of the log that could not be written.", lost)
