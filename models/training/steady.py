"""A console on which something is said every few seconds, however long a step takes."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

QUIET_S, LOOK_S = 4.0, 0.25


class SteadyConsole(Console):
    """Prints lines as they come, and after QUIET_S seconds without one what is being done."""

    def __init__(self) -> None:
        super().__init__(highlight=False)
        self.doing = "reading"
        self._said_s = self._began_s = time.monotonic()

    def print(self, *objects: Any, **options: Any) -> None:  # noqa: ANN401 - as the library has it
        """Prints a line, after which it is quiet."""
        self._said_s = time.monotonic()
        super().print(*objects, **options)

    @contextmanager
    def steadily(self) -> Iterator[None]:
        """Within it no time is quiet; products of torch let other threads go on."""
        ended = threading.Event()
        thread = threading.Thread(target=self._speak, args=(ended,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _speak(self, ended: threading.Event) -> None:
        while not ended.wait(LOOK_S):
            now = time.monotonic()
            if now - self._said_s >= QUIET_S:
                self.print(f"{self.doing} ({now - self._began_s:,.0f} s since the start)")
