"""Tasks that count their steps, a machine that advances them, and a clock that stands still: for tests of a device."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.errors import OutriderError


@dataclass(eq=False)
class Counting:
    """A task of a number of steps."""

    steps: int
    name: str = ""
    done: bool = False
    stopped: bool = False
    made: int = 0
    error: OutriderError | None = None

    def fail(self, error: OutriderError) -> None:
        """Remembers."""
        self.done, self.error = True, error


@dataclass
class Machine:
    """Advances tasks and keeps a diary; `before_step` runs on the device thread before each step."""

    diary: list[list[str]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    before_step: Callable[[], None] | None = None

    def advance(self, tasks: Sequence[Counting]) -> bool:
        """One step of every task."""
        self.threads.add(threading.get_ident())
        if self.before_step is not None:
            self.before_step()
        self.diary.append([task.name for task in tasks])
        for task in tasks:
            task.made += 1
            task.done = task.made == task.steps
        return True


@dataclass
class Clock:
    """A clock of nanoseconds that stands still until it is told to go on."""

    now_ns: int = 1_000

    def __call__(self) -> int:
        return self.now_ns
