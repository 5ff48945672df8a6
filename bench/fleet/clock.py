"""Virtual time, and ways on which messages come late but in order."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

Happening = Callable[[], object]


@dataclass(slots=True)
class VirtualClock:
    """Lets things happen when they are due, those of the same instant in the order in which they were planned."""

    now_s: float = 0.0
    _due: list[tuple[float, int, Happening]] = field(default_factory=list)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def at(self, when_s: float, happen: Happening) -> None:
        heapq.heappush(self._due, (max(when_s, self.now_s), next(self._numbers), happen))

    def after(self, delay_s: float, happen: Happening) -> None:
        self.at(self.now_s + delay_s, happen)

    def step(self) -> bool:
        """Lets the next thing happen; returns whether there was one."""
        if not self._due:
            return False
        self.now_s, _, happen = heapq.heappop(self._due)
        happen()
        return True


@dataclass(slots=True)
class LateWay:
    """One direction of a link."""

    clock: VirtualClock
    delay_s: Callable[[], float]
    is_cut: bool = False
    """What is on its way then never comes."""
    _last_s: float = 0.0

    def send(self, happen: Happening) -> None:
        self._last_s = max(self._last_s, self.clock.now_s + self.delay_s())
        self.clock.at(self._last_s, lambda: self.is_cut or happen())
