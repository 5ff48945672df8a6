"""The sessions that a service holds, and the leases of those whose stream broke. Knows nothing about what a session is.

A table belongs to one thread. Freeing and evicting happen there, so a session is never freed under a running forward.
"""

import time
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from outrider.errors import CacheFull
from outrider.fencing import Fence


class Held(Protocol):
    """What a table holds: a session that one stream owns, until another takes it up."""

    epoch: int
    owner: object

    def stop_job(self) -> bool:
        """Stops the running job, whose answer is never sent; tells whether there was one."""
        ...

    def free(self) -> None:
        """Stops the job and gives back everything; called once."""
        ...


HeldT = TypeVar("HeldT", bound=Held)
T = TypeVar("T")


class SessionTable(Generic[HeldT]):
    """Sessions by id. A leased one is kept `lease_s` seconds for its gateway to come back, unless room is needed."""

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.lease_s = lease_s
        self._clock = clock
        self._held: dict[bytes, HeldT] = {}
        # In the order of their ends, because all leases are equally long.
        self._leases: dict[bytes, float] = {}

    def __repr__(self) -> str:
        return f"<SessionTable {len(self)} sessions, {self.num_leased} leased>"

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[HeldT]:
        """The sessions in the order of their first open."""
        return iter(list(self._held.values()))

    @property
    def num_leased(self) -> int:
        """Sessions without a stream."""
        return len(self._leases)

    def get(self, session_id: bytes) -> HeldT | None:
        """The session of an id."""
        return self._held.get(session_id)

    def add(self, session_id: bytes, held: HeldT) -> None:
        """Holds a session; raises ValueError when the id has one already."""
        if session_id in self._held:
            raise ValueError(f"session {session_id.hex()} is held already")
        self._held[session_id] = held

    def attach(self, session_id: bytes) -> None:
        """Ends a lease because a stream has taken the session up."""
        self._leases.pop(session_id, None)

    def lease(self, session_id: bytes) -> None:
        """Begins the lease of a session whose stream has ended; without an effect for an unknown id."""
        if session_id in self._held:
            self._leases.pop(session_id, None)
            self._leases[session_id] = self._clock() + self.lease_s

    def leave(self, session_id: bytes, owner: object) -> bool:
        """A stream has ended: if the session is there and its own, the job stops and a lease begins; tells whether."""
        held = self._held.get(session_id)
        if held is None or held.owner is not owner:
            return False
        held.stop_job()
        self.lease(session_id)
        return True

    def close(self, fence: Fence, owner: object) -> None:
        """Frees a session because its stream says so; an older epoch has no say, nor has a stream that lost it."""
        held = self._held.get(fence.session_id)
        if held is not None and held.owner is owner and fence.epoch >= held.epoch:
            self.drop(fence.session_id)

    def drop(self, session_id: bytes) -> None:
        """Frees a session; without an effect for an unknown id."""
        self._leases.pop(session_id, None)
        held = self._held.pop(session_id, None)
        if held is not None:
            held.free()

    def clear(self) -> None:
        """Frees all sessions."""
        for session_id in list(self._held):
            self.drop(session_id)

    def evict_oldest(self) -> bool:
        """Frees the session that has been leased longest; tells whether there was one."""
        oldest = next(iter(self._leases), None)
        if oldest is None:
            return False
        self.drop(oldest)
        return True

    def sweep(self) -> int:
        """Frees the sessions whose lease has ended; returns their number."""
        now = self._clock()
        ended = [session_id for session_id, end in self._leases.items() if end <= now]
        for session_id in ended:
            self.drop(session_id)
        return len(ended)

    def with_room(self, allocate: Callable[[], T]) -> T:
        """Calls `allocate`, evicting leased sessions as long as it raises CacheFull and there are some."""
        while True:
            try:
                return allocate()
            except CacheFull:
                if not self.evict_oldest():
                    raise
