"""What draft and target do with a session alike: open it, open it again, take it back, drop it, and count.

Everything here runs on the device thread, between two steps, so that no session changes under one. Knows no protobuf,
and neither guesses nor verdicts: what an answer is, and when it is given, is each service's own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draw import reopen
from outrider.engine.session import Session
from outrider.errors import OutriderError
from outrider.fencing import Fence, Known, Standing, judge_open, judge_rollback
from outrider.least_epochs import LeastEpochs
from outrider.model_servicer import RolledBack, ServiceCounts
from outrider.parameters import SessionSpec
from outrider.sessions import SessionTable


class StoppableTask(Protocol):
    """A job on the device; see outrider.engine.worker.Task."""

    stopped: bool


AnswerT = TypeVar("AnswerT")
TaskT = TypeVar("TaskT", bound=StoppableTask)


@dataclass(slots=True, eq=False)
class SessionRecord(ABC, Generic[AnswerT, TaskT]):
    """A session as either service keeps it: its tokens and cache, its stream, and the job under way."""

    spec: SessionSpec
    epoch: int
    session: Session
    owner: object
    reply: Callable[[AnswerT | OutriderError], None]
    task: TaskT | None = None
    prefix_len: int = 0
    """Tokens that its last opening found in the prefix cache."""

    @property
    @abstractmethod
    def known(self) -> Known:
        """What decides about a message."""

    @property
    @abstractmethod
    def committed_len(self) -> int:
        """Number of committed tokens."""

    @property
    @abstractmethod
    def cached_len(self) -> int:
        """Number of committed tokens whose keys and values are cached, as answers report it."""

    @abstractmethod
    def rewind(self, epoch: int, length: int) -> bool:
        """Begins an epoch at a length, at most the committed one; tells whether a job was stopped."""

    def stop_job(self) -> bool:
        """Stops the running job; see outrider.sessions.Held."""
        task, self.task = self.task, None
        if task is not None:
            task.stopped = True
        return task is not None

    def free(self) -> None:
        """Stops the job and gives back the blocks."""
        self.stop_job()
        self.session.free()


RecordT = TypeVar("RecordT", bound=SessionRecord)  # type: ignore[type-arg]  # whatever the answers and tasks are


class SessionBook(Generic[RecordT]):
    """The sessions of a service, in a table that knows their leases."""

    def __init__(
        self,
        runner: ModelRunner,
        table: SessionTable[RecordT],
        make: Callable[..., RecordT],
        *,
        prefix_cache: bool = True,
    ) -> None:
        """`make` gets the first five fields of a SessionRecord; prefix_cache lets sessions share equal beginnings."""
        self.table = table
        self._runner = runner
        self._make = make
        self._least_epochs = LeastEpochs()
        self._num_stopped_jobs = 0
        self._prefix_cache = prefix_cache
        self._prefix_query_tokens = self._prefix_hit_tokens = 0

    def judge_open(self, fence: Fence) -> tuple[Standing, RecordT | None]:
        """What to do with an open, and the session if there is one."""
        held = self.table.get(fence.session_id)
        known = held.known if held is not None else None
        return judge_open(fence, known, self._least_epochs.get(fence.session_id)), held

    def open(
        self, fence: Fence, spec: SessionSpec, owner: object, reply: Callable[[AnswerT | OutriderError], None]
    ) -> RecordT:
        """A session of the spec's tokens; a newer epoch starts over, with what is cached of them."""
        held = self.table.get(fence.session_id)
        if held is None:
            session = self._session(spec, None)
            held = self._make(spec, fence.epoch, session, owner, reply)
            self.table.add(fence.session_id, held)
            self._least_epochs.forget(fence.session_id)
        else:
            self._num_stopped_jobs += held.stop_job()
            held.session = self._session(spec, held.session)
            held.spec = spec
            held.rewind(fence.epoch, fence.base_len)
            self.take_up(fence, held, owner, reply)
        held.prefix_len = self._take_prefix(held.session, spec)
        return held

    def take_up(
        self, fence: Fence, held: RecordT, owner: object, reply: Callable[[AnswerT | OutriderError], None]
    ) -> None:
        """Another stream owns the session from now on; its lease ends."""
        self.table.attach(fence.session_id)
        held.owner, held.reply = owner, reply

    def rewind(self, held: RecordT, epoch: int, length: int) -> bool:
        """SessionRecord.rewind, counted."""
        was_stopped = held.rewind(epoch, length)
        self._num_stopped_jobs += was_stopped
        return was_stopped

    def rollback(self, fence: Fence) -> RolledBack:
        """Truncates a session and begins a new epoch; without an effect unless the epoch is newer."""
        held = self.table.get(fence.session_id)
        if held is None:
            self._least_epochs.remember(fence.session_id, fence.epoch)
            return RolledBack(Fence(fence.session_id, fence.epoch, 0), 0, job_stopped=False)
        was_stopped = judge_rollback(fence, held.known) is Standing.CURRENT and self.rewind(
            held, fence.epoch, min(fence.base_len, held.committed_len)
        )
        now = Fence(fence.session_id, held.epoch, held.committed_len)
        return RolledBack(now, held.cached_len, was_stopped)

    def fail(self, session_id: bytes, held: RecordT, error: OutriderError) -> None:
        """The job of a session has failed. It must not keep what it has: its gateway opens it again."""
        held.task = None
        self.table.drop(session_id)
        held.reply(error)

    def counts(self) -> ServiceCounts:
        """Numbers for an observer; see outrider.model_servicer.Sessions."""
        return ServiceCounts(
            free_blocks=self._runner.pool.num_free,
            cached_blocks=self._runner.pool.num_cached,
            prefix_query_tokens=self._prefix_query_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            sessions=len(self.table),
            leased_sessions=self.table.num_leased,
            stopped_jobs=self._num_stopped_jobs,
            preemptions=self.table.num_preempted,
            evicted_sessions=self.table.num_evicted,
            expired_leases=self.table.num_expired,
        )

    def _session(self, spec: SessionSpec, known: Session | None) -> Session:
        salt = spec.cache_salt if self._prefix_cache else None
        return reopen(self._runner, known, spec.token_ids, spec.prompt_len, salt)

    def _take_prefix(self, session: Session, spec: SessionSpec) -> int:
        """Takes what others have cached of a session's tokens; returns how many tokens that are."""
        if not self._prefix_cache or (spec.prompt_logprobs and len(session) == spec.prompt_len):
            # Log-probabilities of a prompt need its rows, and so every one of them is computed.
            return 0
        self._prefix_query_tokens += len(session) - session.cached_len
        session.publish(len(session))
        num_hits = session.take_prefix()
        self._prefix_hit_tokens += num_hits
        return num_hits
