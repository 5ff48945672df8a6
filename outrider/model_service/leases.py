"""Table of the sessions that a service holds: leased when their link breaks, dropped when their lease ends.

Everything here belongs to the device thread and runs between two steps.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import structlog

from outrider.errors import CacheFull, Overloaded
from outrider.model_service.session_state import SessionState
from outrider.process.telemetry import session_prefix
from outrider.rpc.fencing import Fence

log = structlog.get_logger()

MAX_SESSIONS = 4096
IDLE_S = 60.0  # without a word from a session's gateway, which then has lost count of it or has a slow client
TIMER_S = 1e-6  # a loop's timer may come early by its clock's resolution

T = TypeVar("T")

StateT = TypeVar("StateT", bound=SessionState[Any])


class LeaseTable(Generic[StateT]):
    """Sessions by id. A leased one is kept `lease_s` seconds for its gateway to come back, unless room is needed.

    Leases begin when a link ends, and for a session of which nothing has been heard for `idle_s`: a gateway that lost
    count of it never comes back, and any other one takes it up with its next message.
    """

    def __init__(
        self,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        max_sessions: int = MAX_SESSIONS,
        idle_s: float = IDLE_S,
    ) -> None:
        self.lease_s = lease_s
        self._idle_s = idle_s
        self.num_evicted = 0
        """Leased sessions that were ended early to make room."""
        self.num_expired = 0
        """Leased sessions that were ended because no gateway came back in time."""
        self.num_preempted = 0
        """Sessions that lost their cache, and nothing else, to another one."""
        self._clock = clock
        self._max_sessions = max_sessions
        self._held: dict[bytes, StateT] = {}
        # When each ends, in the order of their beginnings.
        self._leases: dict[bytes, float] = {}
        # When a message of each came last.
        self._heard: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[StateT]:
        """The sessions in the order of their first open."""
        return iter(list(self._held.values()))

    @property
    def num_leased(self) -> int:
        return len(self._leases)

    def get(self, session_id: bytes) -> StateT | None:
        return self._held.get(session_id)

    def add(self, session_id: bytes, held: StateT) -> None:
        """Holds a session, in the place of leased ones when there are too many; raises ValueError for an id held.

        Raises Overloaded when there are too many that are not leased.
        """
        if session_id in self._held:
            raise ValueError(f"session {session_id.hex()} is held already")
        while len(self._held) >= self._max_sessions:
            if not self.evict_oldest():
                raise Overloaded(f"{len(self._held)} sessions are held already", limit=self._max_sessions)
        self._held[session_id] = held
        self._heard[session_id] = self._clock()

    def renew(self, session_id: bytes, held: StateT) -> None:
        """Puts another state in the place of the one that is held; the session stays what it is to everybody else."""
        self._held[session_id] = held

    def attach(self, session_id: bytes) -> None:
        """Ends a lease because a link has taken the session up."""
        self._heard[session_id] = self._clock()
        if self._leases.pop(session_id, None) is not None:
            log.debug("lease taken up", session=session_prefix(session_id))

    def leave(self, owner: object) -> int:
        """A link has ended: the jobs of its sessions stop, and their leases begin; returns how many there are."""
        left = [session_id for session_id, held in self._held.items() if held.owner is owner]
        for session_id in left:
            self._held[session_id].stop_job()
            self._lease(session_id)
        return len(left)

    def hear(self, session_id: bytes, owner: object) -> None:
        """A message of a session has come by its own link, so that it is not idle."""
        held = self._held.get(session_id)
        if held is not None and held.owner is owner:
            self._heard[session_id] = self._clock()
            self._leases.pop(session_id, None)

    def owns_any(self, owner: object) -> bool:
        """Whether a link still has a session."""
        return any(held.owner is owner for held in self._held.values())

    def close(self, fence: Fence, owner: object) -> None:
        """Frees a session because its link says so; an older epoch has no say, nor has a link that lost it."""
        held = self._held.get(fence.session_id)
        if held is not None and held.owner is owner and fence.epoch >= held.epoch:
            held.closed()
            self.drop(fence.session_id)

    def drop(self, session_id: bytes) -> None:
        """Frees a session; without an effect for an unknown id."""
        self._leases.pop(session_id, None)
        self._heard.pop(session_id, None)
        held = self._held.pop(session_id, None)
        if held is not None:
            held.free()

    def clear(self) -> None:
        for session_id in list(self._held):
            self.drop(session_id)

    def evict_oldest(self) -> bool:
        """Frees the session that has been leased longest; returns whether there was one."""
        oldest = next(iter(self._leases), None)
        if oldest is None:
            return False
        self.drop(oldest)
        self.num_evicted += 1
        log.info("leased session evicted", session=session_prefix(oldest), num_leased=self.num_leased)
        return True

    def sweep(self) -> float | None:
        """Frees the sessions whose lease has ended, and leases those that have been idle for too long.

        Returns after how many seconds there may be more to do, None when no session is held.
        """
        now = self._clock() + TIMER_S
        for session_id in [session_id for session_id, end in self._leases.items() if end <= now]:
            self.drop(session_id)
            self.num_expired += 1
            log.info("lease expired", session=session_prefix(session_id))
        for session_id, held in self._held.items():
            if session_id not in self._leases and held.task is None and self._heard[session_id] + self._idle_s <= now:
                self._lease(session_id)
        ends = [self._leases.get(session_id, heard + self._idle_s) for session_id, heard in self._heard.items()]
        return max(min(ends) - now, self.lease_s / 10) if ends else None

    def _lease(self, session_id: bytes) -> None:
        self._leases.pop(session_id, None)
        self._leases[session_id] = self._clock() + self.lease_s
        log.debug("lease begun", session=session_prefix(session_id), lease_s=self.lease_s)

    def with_room(self, allocate: Callable[[], T]) -> T:
        """Calls `allocate`, evicting leased sessions as long as it raises CacheFull and there are some."""
        while True:
            try:
                return allocate()
            except CacheFull:
                if not self.evict_oldest():
                    raise
