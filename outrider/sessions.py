"""The sessions that a service holds, and the leases of those whose stream broke. Knows nothing about what a session is.

A table belongs to one thread. Freeing and evicting happen there, so a session is never freed under a running forward.
"""

import time
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

import structlog

from outrider.errors import CacheFull
from outrider.fencing import Fence
from outrider.process.logs import session_prefix

log = structlog.get_logger()

# More than streams are carried at a time, so that among as many sessions there are always leased ones.
MAX_SESSIONS = 4096
TIMER_S = 1e-6  # a loop's timer may come early by its clock's resolution, and there is one for every lease


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
    """Sessions by id. A leased one is kept `lease_s` seconds for its gateway to come back, unless room is needed.

    A lease may be made shorter for a session that nobody can come back for.
    """

    def __init__(
        self, lease_s: float, clock: Callable[[], float] = time.monotonic, max_sessions: int = MAX_SESSIONS
    ) -> None:
        self.lease_s = lease_s
        self.num_evicted = 0
        """Leased sessions that were ended early to make room."""
        self.num_expired = 0
        """Leased sessions that were ended because nobody came back in time."""
        self.num_preempted = 0
        """Sessions that lost their cache, and nothing else, to another one."""
        self._clock = clock
        self._max_sessions = max_sessions
        self._held: dict[bytes, HeldT] = {}
        # When each ends, in the order of their beginnings.
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
        """Holds a session, in the place of leased ones when there are too many; raises ValueError for an id held."""
        if session_id in self._held:
            raise ValueError(f"session {session_id.hex()} is held already")
        while len(self._held) >= self._max_sessions and self.evict_oldest():
            pass
        self._held[session_id] = held

    def attach(self, session_id: bytes) -> None:
        """Ends a lease because a stream has taken the session up."""
        if self._leases.pop(session_id, None) is not None:
            log.debug("lease taken up", session=session_prefix(session_id))

    def lease(self, session_id: bytes, lease_s: float | None = None) -> None:
        """Begins the lease of a session whose stream has ended; without an effect for an unknown id."""
        if session_id in self._held:
            lease_s = self.lease_s if lease_s is None else lease_s
            self._leases.pop(session_id, None)
            self._leases[session_id] = self._clock() + lease_s
            log.debug("lease begun", session=session_prefix(session_id), lease_s=lease_s)

    def leave(self, session_id: bytes, owner: object, lease_s: float | None = None) -> bool:
        """A stream has ended: if the session is there and its own, the job stops and a lease begins; tells whether."""
        held = self._held.get(session_id)
        if held is None or held.owner is not owner:
            return False
        held.stop_job()
        self.lease(session_id, lease_s)
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
        self.num_evicted += 1
        log.info("leased session evicted", session=session_prefix(oldest), num_leased=self.num_leased)
        return True

    def sweep(self) -> int:
        """Frees the sessions whose lease has ended; returns their number."""
        now = self._clock() + TIMER_S
        ended = [session_id for session_id, end in self._leases.items() if end <= now]
        for session_id in ended:
            self.drop(session_id)
            log.info("lease expired", session=session_prefix(session_id))
        self.num_expired += len(ended)
        return len(ended)

    def count_preemption(self) -> None:
        """A session of this table has lost its cache to another one."""
        self.num_preempted += 1

    def with_room(self, allocate: Callable[[], T]) -> T:
        """Calls `allocate`, evicting leased sessions as long as it raises CacheFull and there are some."""
        while True:
            try:
                return allocate()
            except CacheFull:
                if not self.evict_oldest():
                    raise
