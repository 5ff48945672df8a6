"""The sessions that a service holds: opened, opened again, taken back, leased when their stream breaks, dropped.

Everything here belongs to the device thread and runs between two steps, so that no session changes under one and none
is freed under a running forward. A Rollback is a call of its own and may overtake the open of its session; which epochs
are over is remembered, or the older open behind it would be taken.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog

from outrider.engine.runner import ModelRunner, reopen
from outrider.engine.session import Session
from outrider.engine.worker import Task
from outrider.errors import CacheFull, OutriderError, Overloaded
from outrider.parameters import SessionSpec
from outrider.process.telemetry import session_prefix
from outrider.rpc.fencing import ComputeTimes, Fence, MessageStatus, SessionView, classify_open

log = structlog.get_logger()

# Eight windows of unasked verdicts: a client that asks for all of them again a few times is still heard.
MAX_UNSENT_ANSWERS = 2048
# More than streams are carried at a time, so that among as many sessions there are always leased ones.
MAX_SESSIONS = 4096
# A Rollback overtakes an open by milliseconds, so a newer one never pushes out one that still matters.
MAX_REMEMBERED = 1024
TIMER_S = 1e-6  # a loop's timer may come early by its clock's resolution, and there is one for every lease

ContentT = TypeVar("ContentT")
TaskT = TypeVar("TaskT", bound=Task)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SessionAnswer(Generic[ContentT]):
    """What a session says about a message: a proposal or verdict on the fence's length, or that it lacks tokens."""

    fence: Fence
    content: ContentT | None
    """None asks for the tokens behind known_len."""
    known_len: int
    cached_len: int
    times: ComputeTimes


class Outbox:
    """Answers in order; filled from any thread, emptied on the loop that made it. Owns the sessions of its stream.

    A client that leaves more than `maximum` of them unread is given up: `overflow` has the error then.
    """

    def __init__(self, maximum: int = MAX_UNSENT_ANSWERS) -> None:
        self._loop = asyncio.get_running_loop()
        self._maximum = maximum
        self._items: deque[Any] = deque()
        self._is_waking = False
        self._wanted: asyncio.Future[None] | None = None
        self.overflow: asyncio.Future[Overloaded] = self._loop.create_future()

    def put(self, answer: object) -> None:
        """Adds an answer, the error that ends the stream, or None for its end behind the answers so far."""
        if len(self._items) <= self._maximum:
            self._items.append(answer)
        # One wake serves all that is put before the loop gets to it. A loop that has been closed has no streams left.
        if not self._is_waking and not self._loop.is_closed():
            self._is_waking = True
            self._loop.call_soon_threadsafe(self._wake)

    async def get(self) -> Any:  # noqa: ANN401 - what was put
        """The next answer, None at the end; raises the error that ends the stream."""
        while not self._items:
            self._wanted = self._loop.create_future()
            await self._wanted
        item = self._items.popleft()
        if isinstance(item, Exception):
            raise item
        return item

    def _wake(self) -> None:
        # Before the looking, so that whatever is put from now on wakes again.
        self._is_waking = False
        if len(self._items) > self._maximum and not self.overflow.done():
            message = f"the client has left {self._maximum} answers of this stream unread"
            self.overflow.set_result(Overloaded(message, limit=self._maximum))
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)


@dataclass(slots=True, eq=False)
class SessionState(ABC, Generic[TaskT]):
    """A session as either service keeps it: its tokens and cache, the stream that owns it, and the job under way."""

    spec: SessionSpec
    epoch: int
    session: Session
    owner: Outbox
    task: TaskT | None = None
    prefix_len: int = 0
    """Tokens that its last opening found in the prefix cache."""
    last_active: int = 0
    """Step of the device in which a job of it was last under way; see target_service.block_allocator."""

    @property
    @abstractmethod
    def answerable(self) -> Collection[int]:
        """Lengths on which requests have been taken in this epoch, whose answers are kept or under way."""

    @property
    @abstractmethod
    def committed_len(self) -> int:
        """Number of committed tokens."""

    @property
    def cached_len(self) -> int:
        """Number of committed tokens whose keys and values are cached, as answers report it."""
        return min(self.session.cached_len, self.committed_len)

    @property
    def view(self) -> SessionView:
        return SessionView(self.epoch, self.committed_len, self.answerable)

    @abstractmethod
    def rewind(self, epoch: int, length: int) -> bool:
        """Begins an epoch at a length, at most the committed one; tells whether a job was stopped."""

    def stop_job(self) -> bool:
        """Stops the running job, whose answer is never sent; tells whether there was one."""
        task, self.task = self.task, None
        if task is not None:
            task.stopped = True
        return task is not None

    def free(self) -> None:
        self.stop_job()
        self.session.free()


StateT = TypeVar("StateT", bound=SessionState[Any])


class LeaseTable(Generic[StateT]):
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
        self._held: dict[bytes, StateT] = {}
        # When each ends, in the order of their beginnings.
        self._leases: dict[bytes, float] = {}

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

    def with_room(self, allocate: Callable[[], T]) -> T:
        """Calls `allocate`, evicting leased sessions as long as it raises CacheFull and there are some."""
        while True:
            try:
                return allocate()
            except CacheFull:
                if not self.evict_oldest():
                    raise


class MinEpochs:
    """For the sessions that were unknown at their Rollback the least epoch that may open them; the newest ones only."""

    def __init__(self, maximum: int = MAX_REMEMBERED) -> None:
        self._maximum = maximum
        self._epochs: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._epochs)

    def get(self, session_id: bytes) -> int:
        """The least epoch of an open, 0 when there was no Rollback."""
        return self._epochs.get(session_id, 0)

    def remember(self, session_id: bytes, epoch: int) -> None:
        """A Rollback has begun an epoch of a session that is not known; an older one changes nothing."""
        self._epochs[session_id] = max(epoch, self._epochs.pop(session_id, 0))
        if len(self._epochs) > self._maximum:
            del self._epochs[next(iter(self._epochs))]

    def forget(self, session_id: bytes) -> None:
        """The session is known now, and holds its epoch itself."""
        self._epochs.pop(session_id, None)


@dataclass(frozen=True, slots=True)
class RolledBack:
    """A session after a Rollback: its epoch and committed length now."""

    fence: Fence
    cached_len: int
    job_stopped: bool


@dataclass(frozen=True, slots=True)
class ServiceCounts:
    """State of the sessions and their cache, under the names that GetModelInfoResponse has for it."""

    free_block_count: int
    session_count: int
    leased_session_count: int
    stopped_job_count: int
    preemption_count: int
    evicted_session_count: int
    expired_lease_count: int
    cached_block_count: int
    """Of the free blocks those that keep a prefix."""
    prefix_query_tokens: int
    prefix_hit_tokens: int


class SessionStore(Generic[StateT]):
    """The sessions of a service. What draft and target do alike with a message is here, the rest in their subclasses.

    A message comes with its fence and with `owner`, the outbox of its stream, which gets the answers: at once what is
    known, later what has to be computed.
    """

    def __init__(
        self, runner: ModelRunner, table: LeaseTable[StateT], kind: type[StateT], *, prefix_cache: bool = True
    ) -> None:
        """prefix_cache lets sessions share equal beginnings."""
        self.table = table
        self._runner = runner
        self._kind = kind
        self._min_epochs = MinEpochs()
        self._num_stopped_jobs = 0
        self._prefix_cache = prefix_cache
        self._prefix_query_tokens = self._prefix_hit_tokens = 0

    def rollback(self, fence: Fence) -> RolledBack:
        """Truncates a session and begins a new epoch; without an effect unless the epoch is newer."""
        held = self.table.get(fence.session_id)
        if held is None:
            self._min_epochs.remember(fence.session_id, fence.epoch)
            return RolledBack(Fence(fence.session_id, fence.epoch, 0), 0, job_stopped=False)
        # An older one, or the same once more, only learns where the session is.
        is_newer = fence.epoch > held.epoch
        was_stopped = is_newer and self._rewind(held, fence.epoch, min(fence.base_len, held.committed_len))
        return RolledBack(Fence(fence.session_id, held.epoch, held.committed_len), held.cached_len, was_stopped)

    def counts(self) -> ServiceCounts:
        """Numbers for an observer, from any thread; a forward old at most."""
        return ServiceCounts(
            free_block_count=self._runner.pool.num_free,
            cached_block_count=self._runner.pool.num_cached,
            prefix_query_tokens=self._prefix_query_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            session_count=len(self.table),
            leased_session_count=self.table.num_leased,
            stopped_job_count=self._num_stopped_jobs,
            preemption_count=self.table.num_preempted,
            evicted_session_count=self.table.num_evicted,
            expired_lease_count=self.table.num_expired,
        )

    def _classify_open(self, fence: Fence) -> tuple[MessageStatus, StateT | None]:
        """What to do with an open, and the session if there is one."""
        held = self.table.get(fence.session_id)
        view = None if held is None else held.view
        return classify_open(fence, view, self._min_epochs.get(fence.session_id)), held

    def _open(self, fence: Fence, spec: SessionSpec, owner: Outbox) -> StateT:
        """A session of the spec's tokens; a newer epoch starts over, with what is cached of them."""
        held = self.table.get(fence.session_id)
        salt = spec.cache_salt if self._prefix_cache else None
        if held is not None:
            self._num_stopped_jobs += held.stop_job()
        known = None if held is None else held.session
        session = reopen(self._runner, known, spec.token_ids, spec.prompt_len, salt)
        if held is None:
            held = self._kind(spec, fence.epoch, session, owner)
            self.table.add(fence.session_id, held)
            self._min_epochs.forget(fence.session_id)
        else:
            held.session, held.spec = session, spec
            held.rewind(fence.epoch, fence.base_len)
            self._attach(fence, held, owner)
        # Log-probabilities of a prompt need its rows, and so every one of them is computed.
        if self._prefix_cache and not (spec.prompt_logprobs and len(session) == spec.prompt_len):
            self._prefix_query_tokens += len(session) - session.cached_len
            session.publish(len(session))
            held.prefix_len = session.take_prefix()
            self._prefix_hit_tokens += held.prefix_len
        else:
            held.prefix_len = 0
        return held

    def _attach(self, fence: Fence, held: StateT, owner: Outbox) -> None:
        """Another stream owns the session from now on; its lease ends."""
        self.table.attach(fence.session_id)
        held.owner = owner

    def _rewind(self, held: StateT, epoch: int, length: int) -> bool:
        was_stopped = held.rewind(epoch, length)
        self._num_stopped_jobs += was_stopped
        return was_stopped

    def _want_tokens(self, fence: Fence, held: StateT | None, owner: Outbox) -> None:
        known_len = min(held.committed_len, fence.base_len - 1) if held else 0
        owner.put(SessionAnswer(fence, None, known_len, held.cached_len if held else 0, ComputeTimes()))

    def _fail(self, session_id: bytes, held: StateT, error: OutriderError) -> None:
        """The job of a session has failed. It must not keep what it has: its gateway opens it again."""
        held.task = None
        self.table.drop(session_id)
        held.owner.put(error)
