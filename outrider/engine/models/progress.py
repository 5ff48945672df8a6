"""How far long steps with a model's files are, in the log at least once a second while they last.

`outrider.process.progress` reads these lines again, for the program that started the process.
"""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import structlog

log = structlog.get_logger()

# Steps that are over sooner say nothing. Half of what is promised, because one step may follow another.
TELL_S = 0.45


class Progress:
    """Context manager around one step: `action` is its word, `total_bytes` what there is to do, None where unknown.

    The step itself writes `file` and `done_bytes`, or says what remains; a thread of its own logs them, however long a
    single file takes.
    """

    def __init__(
        self, action: str, file: str, total_bytes: int | None = None, remaining: Callable[[], int] | None = None
    ) -> None:
        self.action = action
        self.file = file
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self._remaining = remaining
        self._over = threading.Event()
        self._teller = threading.Thread(target=self._tell, name=f"{action} progress", daemon=True)

    def __enter__(self) -> Self:
        self._teller.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._over.set()
        self._teller.join()

    def _tell(self) -> None:
        while not self._over.wait(TELL_S):
            if self.total_bytes is None:
                log.info(self.action, file=self.file)
                continue
            done = self.done_bytes if self._remaining is None else self.total_bytes - self._remaining()
            log.info(self.action, file=self.file, done_bytes=done, total_bytes=self.total_bytes)
