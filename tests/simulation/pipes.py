"""One direction of one call: items arrive after a while, in order unless they are to overtake. Knows no messages."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simulation.loop import VirtualLoop, context_of


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message on its way. One that is not in order neither waits for earlier ones nor holds up later ones."""

    delay_s: float
    data: bytes
    in_order: bool = True


class Pipe:
    """One direction of one call."""

    def __init__(self, loop: VirtualLoop, host: str, receive: Callable[[Any], None]) -> None:
        self._loop = loop
        self._context = context_of(host)
        self._receive = receive
        self._queue: deque[Any] = deque()
        self._free_s = 0.0
        self._early: list[Any] | None = []
        """What would have come before the first item, without which there is no call; None from then on."""

    def put(self, delay_s: float, item: object, *, in_order: bool = True) -> None:
        """Lets an item arrive after a while; in order it arrives after what was put before in order."""
        if not in_order:
            self._loop.call_later(delay_s, self._overtake, item, context=self._context)
            return
        self._free_s = max(self._free_s, self._loop.time() + delay_s)
        self._queue.append(item)
        self._loop.call_at(self._free_s, self._next, context=self._context)

    def _next(self) -> None:
        # Timers of one moment come in any order, items do not.
        self._receive(self._queue.popleft())
        early, self._early = self._early or [], None
        for item in early:
            self._receive(item)

    def _overtake(self, item: object) -> None:
        if self._early is None:
            self._receive(item)
        else:
            self._early.append(item)
