"""Places for samples, and a bounded queue in front of them: first come, first served.

Whoever waits holds nothing but a line in a list, so waiting costs no service anything; a full queue says so at once.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

from outrider.errors import InvalidRequest, NotReady, Overloaded

# What a client is told to wait: between a moment and a minute, by how fast places came free lately.
RETRY_AFTER_S = (1.0, 60.0)
SMOOTHING = 0.2


@dataclass(slots=True, eq=False)
class _Waiter:
    """Someone in the queue."""

    num_samples: int
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    has_places: bool = False


class Admission:
    """At most `places` samples run at a time, and at most queue_len requests wait for places."""

    def __init__(self, places: int, queue_len: int) -> None:
        self.places = places
        self.queue_len = queue_len
        self.running = 0
        """Samples that run."""
        self._queue: deque[_Waiter] = deque()
        self._place_s = RETRY_AFTER_S[0]
        self._num_arriving = 0
        self._is_closed = False

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def check(self, sample_count: int) -> None:
        """Raises Overloaded when a request for so many places would not even be queued, so that it costs nothing more.

        Raises InvalidRequest when it would never get them, NotReady after `close`.
        """
        self._check_open()
        if sample_count > self.places:
            limit = f"at most {self.places}, the samples that this gateway takes at a time"
            raise InvalidRequest("sample_count", sample_count, limit)
        if not self._has_room(sample_count) and self.waiting >= self.queue_len:
            raise Overloaded(
                f"{self.running} of {self.places} places are taken and {self.waiting} requests wait already, "
                f"of at most {self.queue_len}",
                retry_after_s=self.retry_after_s,
            )

    def close(self) -> None:
        """Sends whoever waits and whoever comes elsewhere; those who run keep their places."""
        self._is_closed = True
        for waiter in self._queue:
            waiter.turn.set()
        self._queue.clear()

    def _check_open(self) -> None:
        if self._is_closed:
            raise NotReady("The gateway is stopping and takes no more requests")

    @contextmanager
    def arrival(self, sample_count: int) -> Iterator[None]:
        """Bounds how many requests are looked at, which takes long while the target is away. Raises as `check` does."""
        self.check(sample_count)
        if self._num_arriving >= self.places + self.queue_len:
            message = f"{self._num_arriving} requests are looked at already, which takes long while the target is away"
            raise Overloaded(message, retry_after_s=self.retry_after_s)
        self._num_arriving += 1
        try:
            yield
        finally:
            self._num_arriving -= 1

    @property
    def retry_after_s(self) -> int:
        """Whole seconds after which a request that is turned away may find a place."""
        min_s, max_s = RETRY_AFTER_S
        return math.ceil(min(max(min_s, (self.waiting + 1) * self._place_s), max_s))

    @asynccontextmanager
    async def place(self, sample_count: int) -> AsyncIterator[float]:
        """Waits for places and holds them; gives the seconds that it waited. Raises as `check` does."""
        self.check(sample_count)
        arrived_s = time.monotonic()
        await self._enter(sample_count)
        entered_s = time.monotonic()
        try:
            yield entered_s - arrived_s
        finally:
            held_s = (time.monotonic() - entered_s) / self.places
            self._place_s += SMOOTHING * (held_s - self._place_s)
            self.running -= sample_count
            self._call()

    async def _enter(self, sample_count: int) -> None:
        """Takes places at once when there are some and nobody waits, else in turn."""
        if self._has_room(sample_count):
            self.running += sample_count
            return
        waiter = _Waiter(sample_count)
        self._queue.append(waiter)
        try:
            await waiter.turn.wait()
            if not waiter.has_places:
                self._check_open()
        except BaseException:
            # Its turn may have come in the same moment in which it left.
            if waiter.has_places:
                self.running -= sample_count
            with suppress(ValueError):
                self._queue.remove(waiter)
            self._call()
            raise

    def _has_room(self, sample_count: int) -> bool:
        return not self._queue and self.running + sample_count <= self.places

    def _call(self) -> None:
        """Gives places to those who have waited longest. A large request is not overtaken by small ones."""
        while self._queue and self.running + self._queue[0].num_samples <= self.places:
            waiter = self._queue.popleft()
            self.running += waiter.num_samples
            waiter.has_places = True
            waiter.turn.set()
