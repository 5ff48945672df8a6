"""The sessions that a service holds: opened, opened again, taken back, leased when their link breaks, dropped.

Everything here belongs to the device thread and runs between two steps, so that no session changes under one and none
is freed under a running forward. A Rollback is a call of its own and may overtake the open of its session; which epochs
are over is remembered, or the older open after it would be taken.
"""

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import structlog

from outrider.engine.runner import ModelRunner, reopen
from outrider.engine.session import Session
from outrider.engine.worker import Task
from outrider.errors import CacheFull, OutriderError, Overloaded
from outrider.parameters import SessionSpec
from outrider.process import telemetry
from outrider.process.telemetry import session_prefix
from outrider.rpc.fencing import ComputeTimes, Fence, MessageStatus, SessionView, classify_open

log = structlog.get_logger()

# Answers that wait on a link, of one session and of all: eight windows of unasked verdicts, so that a client that asks
# for all of them again a few times is still heard.
MAX_UNSENT_OF_SESSION = 2048
MAX_UNSENT = 65_536
MAX_SESSIONS = 4096
# Of one client. A Rollback overtakes an open by milliseconds, so a newer one never pushes out one that still matters.
MAX_REMEMBERED = 1024
IDLE_S = 60.0  # without a word from a session's gateway, which then has lost count of it or has a slow client
TIMER_S = 1e-6  # a loop's timer may come early by its clock's resolution
# What took longer gets an event of its own; everything else is in the sums.
SLOW_US = 500_000

ContentT = TypeVar("ContentT")
TaskT = TypeVar("TaskT", bound=Task)
T = TypeVar("T")


# The content of an answer to a ping.
PONG = object()


class SessionAnswer(NamedTuple, Generic[ContentT]):
    """Answer of a session to a message: a proposal or verdict on the fence's length, or that it lacks tokens."""

    fence: Fence
    content: ContentT | None
    """Proposal or verdict; None asks for the tokens after known_len, unless there is an error."""
    known_len: int
    cached_len: int
    times: ComputeTimes
    error: OutriderError | None = None
    """Error that ended the session."""


class Outboxes:
    """The outboxes that the device has filled since it last rested.

    No link is woken before, so that all that one step has for one gateway leaves together.
    """

    def __init__(self) -> None:
        self._filled: dict[Outbox, None] = {}

    def add(self, outbox: "Outbox") -> None:
        self._filled[outbox] = None

    def flush(self) -> None:
        """Wakes those who wait for what was put; on the device thread."""
        filled, self._filled = self._filled, {}
        for outbox in filled:
            outbox.flush()


class Outbox:
    """Answers of one link in order; filled on the device thread, emptied on the loop that made it. Owns its sessions.

    A client that leaves more than MAX_UNSENT of them unread is given up: `overflow` has the error then. `client` is the
    name in its certificate, and empty without one.
    """

    def __init__(self, outboxes: Outboxes, client: str = "") -> None:
        self.client = client
        self._outboxes = outboxes
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._answers: list[SessionAnswer[Any]] = []
        self._counts: dict[bytes, int] = {}
        self._has_ended = False
        self._is_waking = False
        self._wanted: asyncio.Future[None] | None = None
        self._flooded: set[bytes] = set()
        self.overflow: asyncio.Future[Overloaded] = self._loop.create_future()

    def put(self, answer: SessionAnswer[Any]) -> None:
        """Adds an answer, which leaves when the device rests."""
        session_id = answer.fence.session_id
        with self._lock:
            count = self._counts.get(session_id, 0)
            if answer.error is None and count >= MAX_UNSENT_OF_SESSION:
                self._flooded.add(session_id)
            elif len(self._answers) <= MAX_UNSENT:
                self._counts[session_id] = count + 1
                self._answers.append(answer)
        self._outboxes.add(self)

    def take_flooded(self) -> set[bytes]:
        """Sessions that have had more answers here than one may have, and lost what came after; each is named once."""
        flooded, self._flooded = self._flooded, set()
        return flooded

    def pong(self, fence: Fence) -> None:
        """Answers a ping at once; on the loop."""
        with self._lock:
            self._answers.append(SessionAnswer(fence, PONG, 0, 0, ComputeTimes()))
        self._wake()

    def end(self) -> None:
        """Ends the link after the answers so far."""
        self._has_ended = True
        self._outboxes.add(self)

    def flush(self) -> None:
        """Wakes the loop; from any thread. One wake serves all that is put before the loop gets to it."""
        # A loop that has been closed has no links left.
        if not self._is_waking and not self._loop.is_closed():
            self._is_waking = True
            self._loop.call_soon_threadsafe(self._wake)

    async def take(self) -> list[SessionAnswer[Any]]:
        """Takes all answers there are, at least one; none at the end of the link."""
        while not self._answers and not self._has_ended:
            self._wanted = self._loop.create_future()
            await self._wanted
        with self._lock:
            answers, self._answers = self._answers, []
            self._counts.clear()
        return answers

    def _wake(self) -> None:
        # Before the looking, so that whatever is put from now on wakes again.
        self._is_waking = False
        if len(self._answers) > MAX_UNSENT and not self.overflow.done():
            message = f"the client has left {MAX_UNSENT} answers of this link unread"
            self.overflow.set_result(Overloaded(message, limit=MAX_UNSENT))
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)


class SessionRefused(OutriderError):
    """The client must leave the session alone: another one has opened it."""

    status = "PERMISSION_DENIED"
    reason = "SESSION_REFUSED"
    exit_code = 77


class SessionTrace:
    """The span of a session on this service, from its first open to its end, with what its answers cost."""

    def __init__(self, session_id: bytes, trace_context: Mapping[str, str]) -> None:
        self._span = telemetry.begin_span("session", trace_context, session=session_prefix(session_id))
        self._num_answers = self._num_forwards = self._queue_us = self._compute_us = 0

    def add(self, times: ComputeTimes) -> None:
        """Counts an answer; the first one, which read the prompt, and slow ones are events of their own."""
        self._num_answers += 1
        self._num_forwards += times.forward_count
        self._queue_us += times.queue_us
        self._compute_us += times.compute_us
        if self._num_answers == 1 or times.queue_us + times.compute_us > SLOW_US:
            name = "first answer" if self._num_answers == 1 else "slow answer"
            costs = {"queue_us": times.queue_us, "compute_us": times.compute_us, "forwards": times.forward_count}
            self._span.add_event(name, costs)

    def end(self) -> None:
        counts = {"answers": self._num_answers, "forwards": self._num_forwards}
        self._span.set_attributes({**counts, "queue_us": self._queue_us, "compute_us": self._compute_us})
        self._span.end()


@dataclass(slots=True, eq=False)
class SessionState(ABC, Generic[TaskT]):
    """A session as either service keeps it: its tokens and cache, the link that owns it, and the job under way."""

    spec: SessionSpec
    epoch: int
    session: Session
    owner: Outbox
    trace: SessionTrace
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
    def sessions(self) -> tuple[Session, ...]:
        """Engine sessions that hold blocks for it."""
        return (self.session,)

    @property
    def cached_len(self) -> int:
        """Number of committed tokens whose keys and values are cached, as answers report it."""
        return min(self.session.cached_len, self.committed_len)

    @property
    def view(self) -> SessionView:
        return SessionView(self.epoch, self.committed_len, self.answerable)

    @abstractmethod
    def rewind(self, epoch: int, length: int) -> bool:
        """Begins an epoch at a length, at most the committed one; returns whether a job was stopped."""

    def stop_job(self) -> bool:
        """Stops the running job, whose answer is never sent; returns whether there was one."""
        task, self.task = self.task, None
        if task is not None:
            task.stopped = True
        return task is not None

    def answer(self, answer: SessionAnswer[Any]) -> None:
        """Sends what was computed for the first time."""
        self.trace.add(answer.times)
        self.owner.put(answer)

    def free(self) -> None:
        self.stop_job()
        self.session.free()
        self.trace.end()


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


class MinEpochs:
    """Least epochs that may open the sessions that were unknown at their Rollback; the newest ones only."""

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
    """Number of free blocks that keep a prefix."""
    prefix_query_tokens: int
    prefix_hit_tokens: int


class SessionStore(Generic[StateT]):
    """The sessions of a service. What draft and target do alike with a message is here, the rest in their subclasses.

    A message comes with its fence and with `owner`, the outbox of its link, which gets the answers: at once what is
    known, later what has to be computed.
    """

    def __init__(
        self, runner: ModelRunner, table: LeaseTable[StateT], kind: type[StateT], *, prefix_cache: bool = True
    ) -> None:
        """prefix_cache lets sessions share equal beginnings."""
        self.table = table
        self._runner = runner
        self._kind = kind
        # By the client: what others say about an id that is not opened is about sessions of their own.
        self._min_epochs: defaultdict[str, MinEpochs] = defaultdict(MinEpochs)
        self._num_stopped_jobs = 0
        self._prefix_cache = prefix_cache
        self._prefix_query_tokens = self._prefix_hit_tokens = 0

    def check_client(self, session_id: bytes, client: str) -> None:
        """Raises SessionRefused about a session that a client of another name has opened."""
        held = self.table.get(session_id)
        if held is not None and held.owner.client != client:
            log.warning("session refused", session=session_prefix(session_id), client=client, owner=held.owner.client)
            raise SessionRefused("The session belongs to another client")

    def rollback(self, fence: Fence, client: str = "") -> RolledBack:
        """Truncates a session and begins a new epoch; without an effect unless the epoch is newer.

        Raises SessionRefused.
        """
        self.check_client(fence.session_id, client)
        held = self.table.get(fence.session_id)
        if held is None:
            self._min_epochs[client].remember(fence.session_id, fence.epoch)
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

    def _classify_open(self, fence: Fence, owner: Outbox) -> tuple[MessageStatus, StateT | None]:
        """Status of an open, and the session if there is one."""
        held = self.table.get(fence.session_id)
        view = None if held is None else held.view
        return classify_open(fence, view, self._min_epochs[owner.client].get(fence.session_id)), held

    def _open(self, fence: Fence, spec: SessionSpec, owner: Outbox) -> StateT:
        """A session of the spec's tokens; a newer epoch starts over, with what is cached of them."""
        held = self.table.get(fence.session_id)
        salt = spec.cache_salt if self._prefix_cache else None
        if held is not None:
            self._num_stopped_jobs += held.stop_job()
        known = None if held is None else held.session
        session = reopen(self._runner, known, spec.token_ids, spec.prompt_len, salt)
        session.owner = owner
        if held is None:
            trace = SessionTrace(fence.session_id, dict(spec.trace_context))
            held = self._kind(spec, fence.epoch, session, owner, trace)
            self.table.add(fence.session_id, held)
            self._min_epochs[owner.client].forget(fence.session_id)
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
        """A link owns the session from now on; its lease ends."""
        self.table.attach(fence.session_id)
        held.owner = held.session.owner = owner

    def _rewind(self, held: StateT, epoch: int, length: int) -> bool:
        was_stopped = held.rewind(epoch, length)
        self._num_stopped_jobs += was_stopped
        return was_stopped

    def want_tokens(self, fence: Fence, held: StateT | None, owner: Outbox) -> None:
        """Asks for the tokens of a session, all of them unless it is held."""
        known_len = min(held.committed_len, fence.base_len - 1) if held else 0
        owner.put(SessionAnswer(fence, None, known_len, held.cached_len if held else 0, ComputeTimes()))

    def fail(self, session_id: bytes, held: StateT, error: OutriderError) -> None:
        """A session ends with an error. It must not keep what it has: its gateway opens it again."""
        held.task = None
        self.table.drop(session_id)
        fence = Fence(session_id, held.epoch, held.committed_len)
        held.owner.put(SessionAnswer(fence, None, 0, 0, ComputeTimes(), error))

    def refuse(self, fence: Fence, error: OutriderError, owner: Outbox) -> None:
        """A message cannot be taken: its session ends, unless the message is of an older epoch or of another link."""
        self.table.close(fence, owner)
        owner.put(SessionAnswer(fence, None, 0, 0, ComputeTimes(), error))
