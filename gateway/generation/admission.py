"""Places for samples, and the queue before them.

A request that waits holds nothing but a line in a list, so waiting costs no service anything; a full queue says so at
once.
"""

import asyncio
import math
import time
from bisect import insort
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from gateway.sessions.wait import Wait
from outrider.errors import NotReady, Overloaded

# Seconds that a client is asked to wait: between a moment and a minute, by how fast places came free lately.
RETRY_AFTER_S = (1.0, 60.0)
SMOOTHING = 0.2

EventT = TypeVar("EventT")


@dataclass(slots=True, eq=False)
class Reservation:
    """Places of one request: it has one for each of its samples that runs, and waits for one at a time."""

    arrived_s: float
    priority: int
    watched: Wait | None = None
    """Gets its place in the queue."""
    taken: deque[tuple[float, int]] = field(default_factory=deque)
    """Times when its places were taken, and how many samples ran then."""
    waited_s: float = 0.0
    """Seconds from its arrival until it got the latest one."""
    has_begun: bool = False
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    patience: asyncio.Timeout | None = None
    """Within which it waits for its next event."""


class Admission:
    """Admission of requests: at most `places` samples run at a time, and queue_len requests wait that have none.

    The smallest priority comes first, and within one who came first, one place at a time: a request that wants more
    than one goes to the end of its priority's queue for each. So the samples of large requests take turns with
    everybody else's. A request's priority never changes while it waits, and its place is never taken away.
    """

    def __init__(self, places: int, queue_len: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.places = places
        self.queue_len = queue_len
        self.running = 0  # samples
        self.is_leaving = False
        """Whether the gateway begins to stop, which its readiness says before anybody is turned away."""
        self._clock_s = clock_s
        self._queue: deque[Reservation] = deque()  # in the order in which they get places
        self._entered: set[Reservation] = set()
        self._left = asyncio.Event()
        # From one place that comes free to the next, as it was lately.
        self._free_s = RETRY_AFTER_S[0]
        self._num_arriving = 0
        self._is_closed = False
        self._is_over = False

    @property
    def waiting(self) -> int:
        """Requests that wait and have no sample running."""
        return sum(not places.taken for places in self._queue)

    def retry_after_s(self, priority: int = 0) -> int:
        """Whole seconds after which a request of that priority may find a place, after those that wait and go before.

        It follows from how fast places came free lately. Requests that run and have not ended count too: in a burst of
        long ones nothing else shows that they are long. A request that comes meanwhile, and goes before, is not
        foreseen.
        """
        now_s, (min_s, max_s) = self._clock_s(), RETRY_AFTER_S
        ages_s = [now_s - taken_s for places in self._entered for taken_s, _ in places.taken]
        free_s = max(self._free_s, sum(ages_s) / max(1, len(ages_s)) ** 2)
        num_before = sum(places.priority <= priority for places in self._queue)
        return math.ceil(min(max(min_s, (num_before + 1) * free_s), max_s))

    def check(self, priority: int = 0) -> None:
        """Raises Overloaded when a request would not even be queued, so that it costs nothing more; NotReady after
        `close`. A full queue is full for all; the priority says when to come again.
        """
        self._check_open()
        if self.running >= self.places and self.waiting >= self.queue_len:
            raise Overloaded(
                f"{self.running} of {self.places} places are taken and {self.waiting} requests wait already, "
                f"of at most {self.queue_len}",
                retry_after_s=self.retry_after_s(priority),
            )

    def close(self) -> None:
        """Refuses requests that come, or wait and have not begun, so that they go elsewhere; others get all places."""
        self.is_leaving = self._is_closed = True
        for places in self._queue:
            if not places.has_begun:
                places.turn.set()
        self._queue = deque(places for places in self._queue if places.has_begun)

    def end(self) -> None:
        """Ends those who still run, wherever they are: what they wait for next is NotReady."""
        self._is_over = True
        for places in self._entered:
            if places.patience is not None:
                places.patience.reschedule(0.0)

    async def next_of(self, events: AsyncIterator[EventT], places: Reservation) -> EventT | None:
        """Next event of a request, None after the last; raises NotReady after `end`."""
        if not self._is_over:
            try:
                async with asyncio.timeout(None) as places.patience:
                    return await anext(events, None)
            except TimeoutError:
                if not self._is_over:
                    raise
            finally:
                places.patience = None
        raise NotReady("The gateway is stopping, and the time of its last requests is over")

    async def emptied(self) -> None:
        """Waits until all requests have ended that were let in."""
        while self._entered:
            self._left.clear()
            await self._left.wait()

    @contextmanager
    def arrival(self, priority: int = 0) -> Iterator[None]:
        """Bounds how many requests are looked at, which takes long while the target is away. Raises as `check` does."""
        self.check(priority)
        if self._num_arriving >= self.places + self.queue_len:
            message = f"{self._num_arriving} requests are looked at already, which takes long while the target is away"
            raise Overloaded(message, retry_after_s=self.retry_after_s(priority))
        self._num_arriving += 1
        try:
            yield
        finally:
            self._num_arriving -= 1

    @asynccontextmanager
    async def entry(self, priority: int = 0, watched: Wait | None = None) -> AsyncIterator[Reservation]:
        """Waits for a request's first place; `watched` gets its place in the queue meanwhile. What it holds when it
        is left is given back. Raises as `check` does.
        """
        self.check(priority)
        places = Reservation(self._clock_s(), priority, watched)
        self._entered.add(places)
        try:
            await self.take(places)
            yield places
        finally:
            # It may wait, for its first place or a further one, and its turn may have come in this very moment.
            with suppress(ValueError):
                self._queue.remove(places)
                self._tell()
            while places.taken:
                self.give_back(places)
            self._entered.remove(places)
            self._left.set()

    async def take(self, places: Reservation) -> None:
        """Waits for one more place, after all that wait and have no greater priority. Raises NotReady when it is the
        first and the gateway stops.
        """
        places.turn.clear()
        insort(self._queue, places, key=lambda each: each.priority)
        self._call()
        await places.turn.wait()
        if not places.has_begun:
            self._check_open()

    def give_back(self, places: Reservation) -> None:
        """Gives back one place of a request; does nothing when it has none left."""
        if not places.taken:
            return
        # Which of them it was changes no mean. By those who ran beside it and not by all places: had these been taken,
        # it might have been as much slower.
        taken_s, num_running = places.taken.popleft()
        free_s = (self._clock_s() - taken_s) / max(num_running, self.running)
        self._free_s += SMOOTHING * (free_s - self._free_s)
        self.running -= 1
        self._call()

    def _check_open(self) -> None:
        if self._is_closed:
            raise NotReady("The gateway is stopping and takes no more requests")

    def _call(self) -> None:
        """Gives places to the first of the queue."""
        while self._queue and self.running < self.places:
            places, now_s = self._queue.popleft(), self._clock_s()
            self.running += 1
            places.taken.append((now_s, self.running))
            places.waited_s, places.has_begun = now_s - places.arrived_s, True
            places.turn.set()
            if places.watched is not None:
                places.watched.stand(0)
        self._tell()

    def _tell(self) -> None:
        """Says to those who watch where they stand."""
        for number, places in enumerate(self._queue, 1):
            if places.watched is not None:
                places.watched.stand(number)
