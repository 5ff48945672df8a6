"""The sessions that a service holds: opened, opened again, taken back, dropped.

Everything here belongs to the device thread and runs between two steps, so that no session changes under one and none
is freed under a running forward. A Rollback is a call of its own and may overtake the open of its session; which epochs
are over is remembered, or the older open after it would be taken.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog

from outrider.engine.runner import ForwardCounts, ModelRunner, reopen
from outrider.errors import OutriderError
from outrider.estimates.prefixes import PrefixJournal
from outrider.estimates.timing import ComputeTimes
from outrider.grammar import Grammar
from outrider.model_service.leases import LeaseTable
from outrider.model_service.outbox import Outbox, SessionAnswer
from outrider.model_service.session_state import SessionState, SessionTrace
from outrider.parameters import SessionSpec
from outrider.process.telemetry import session_prefix
from outrider.rpc.fencing import Fence, MessageStatus, classify_open

log = structlog.get_logger()

# Of one client. A Rollback overtakes an open by milliseconds, so a newer one never pushes out one that still matters.
MAX_REMEMBERED = 1024


class SessionRefused(OutriderError):
    """The client must leave the session alone: another one has opened it."""

    status = "PERMISSION_DENIED"
    reason = "SESSION_REFUSED"
    exit_code = 77


StateT = TypeVar("StateT", bound=SessionState[Any])


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

    def __init__(self, runner: ModelRunner, table: LeaseTable[StateT], *, prefix_cache: bool = True) -> None:
        """prefix_cache lets sessions share equal beginnings."""
        self.table = table
        self.is_draining = False
        """Whether links open no session any more, because the service ends; set on the event loop."""
        self._runner = runner
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

    @property
    def forward_counts(self) -> ForwardCounts:
        return self._runner.forward_counts

    @property
    def prefix_journal(self) -> PrefixJournal:
        return self._runner.pool.prefixes.journal

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

    def unread(self) -> dict[Outbox, int]:
        """Tokens that jobs have yet to read, all but the last of a text, by the links that have some.

        From any thread, a forward old at most.
        """
        counts: dict[Outbox, int] = {}
        for held in self.table:
            num_unread = len(held.session) - 1 - held.session.cached_len
            if held.task is not None and num_unread > 0:
                counts[held.owner] = counts.get(held.owner, 0) + num_unread
        return counts

    def _classify_open(self, fence: Fence, owner: Outbox) -> tuple[MessageStatus, StateT | None]:
        """Status of an open, and the session if there is one."""
        held = self.table.get(fence.session_id)
        view = None if held is None else held.view
        return classify_open(fence, view, self._min_epochs[owner.client].get(fence.session_id)), held

    def _salt(self, spec: SessionSpec) -> bytes | None:
        """Salt of the sessions with which a session shares what is cached, None where it shares nothing."""
        return spec.cache_salt if self._prefix_cache else None

    def _open(
        self, fence: Fence, spec: SessionSpec, grammar: Grammar | None, owner: Outbox, make: Callable[..., StateT]
    ) -> StateT:
        """A session of the spec's tokens; a newer epoch starts over, with what is cached of them.

        `make` is the class of its state, to be called with spec, epoch, engine session, owner and trace.
        """
        known = self.table.get(fence.session_id)
        if known is not None:
            self._num_stopped_jobs += known.stop_job()
            known.free_parts()
        session = reopen(
            self._runner, None if known is None else known.session, spec.token_ids, spec.prompt_len, self._salt(spec)
        )
        session.owner, session.grammar = owner, grammar
        if known is None:
            held = make(spec, fence.epoch, session, owner, SessionTrace(fence.session_id, dict(spec.trace_context)))
            self.table.add(fence.session_id, held)
            self._min_epochs[owner.client].forget(fence.session_id)
        else:
            held = make(spec, fence.epoch, session, owner, known.trace)
            held.last_active = known.last_active
            self.table.renew(fence.session_id, held)
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
