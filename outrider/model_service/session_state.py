"""A session as either service keeps it, and the span that traces it."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from outrider.engine.device_thread import Task
from outrider.engine.session import Session
from outrider.estimates.timing import ComputeTimes
from outrider.model_service.outbox import Outbox, SessionAnswer
from outrider.parameters import SessionSpec
from outrider.process import telemetry
from outrider.process.telemetry import session_prefix
from outrider.rpc.fencing import SessionView

# What took longer gets an event of its own; everything else is in the sums.
SLOW_US = 500_000

TaskT = TypeVar("TaskT", bound=Task)


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

    def closed(self) -> None:
        """Takes note that its link has ended it, before it is freed."""

    @abstractmethod
    def free_parts(self) -> None:
        """Gives back what it has beside the blocks of its tokens."""

    def free(self) -> None:
        self.stop_job()
        self.free_parts()
        self.session.free()
        self.trace.end()
