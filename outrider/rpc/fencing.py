"""Whether a message of a session is old, repeated, timely or ahead, and what its answer cost to compute.

Messages are matched by (epoch, base_len), never by their order, so that a stream that broke, a call that was repeated
and an answer that was overtaken need no handling of their own.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from outrider.errors import InvalidRequest

SESSION_ID_LEN = 16


@dataclass(frozen=True, slots=True)
class Fence:
    """Session that a message belongs to, its epoch, and the committed length that the message builds on."""

    session_id: bytes
    epoch: int
    base_len: int


class SessionView(NamedTuple):
    """Knowledge of a service about a session.

    Requests on the lengths in `answerable` have been taken in this epoch, and their answers are kept or under way.
    A new request of this epoch builds on all that is committed.
    """

    epoch: int
    committed_len: int
    answerable: Collection[int]


class MessageStatus(Enum):
    """Treatment of a message."""

    STALE = auto()
    """Drop it: a newer epoch has begun, or its answer has been acknowledged."""
    REPEAT = auto()
    """Answer it again, without a second effect."""
    CURRENT = auto()
    """Take the message."""
    REWIND = auto()
    """Take the session back to what the message builds on, begin its epoch, and take it."""
    FUTURE = auto()
    """Ask for tokens: some are missing."""


def check_fence(fence: Fence, context_len: int) -> Fence:
    """Returns the fence, or raises InvalidRequest when no service can have sent it to a model of this context."""
    if len(fence.session_id) != SESSION_ID_LEN:
        raise InvalidRequest("fence.session_id", f"{len(fence.session_id)} bytes", f"{SESSION_ID_LEN} bytes long")
    if fence.epoch < 1:
        raise InvalidRequest("fence.epoch", fence.epoch, "at least 1")
    if not 1 <= fence.base_len <= context_len:
        raise InvalidRequest("fence.base_len", fence.base_len, f"in [1, {context_len}]")
    return fence


def classify(fence: Fence, view: SessionView | None, num_new: int = 0, *, is_owner: bool = True) -> MessageStatus:
    """Treatment of a message that is not an open and brings the last `num_new` of its base_len tokens with it.

    A link that does not own the session never moves it. When its epoch is not over, a Rollback has overtaken its open
    or another link has repeated that: it is asked for all tokens, so that it is not left without an answer.
    """
    if view is None:
        return MessageStatus.FUTURE
    if fence.epoch < view.epoch:
        return MessageStatus.STALE
    if not is_owner or fence.base_len - num_new > view.committed_len:
        return MessageStatus.FUTURE
    if fence.epoch > view.epoch:
        return MessageStatus.REWIND
    if fence.base_len in view.answerable:
        return MessageStatus.REPEAT
    return MessageStatus.CURRENT if fence.base_len >= view.committed_len else MessageStatus.STALE


def classify_open(fence: Fence, view: SessionView | None, min_epoch: int = 0) -> MessageStatus:
    """Treatment of an open, which brings all tokens: only a newer epoch starts over.

    `min_epoch` is that of a Rollback which came before the session was known.
    """
    if view is None:
        return MessageStatus.CURRENT if fence.epoch >= min_epoch else MessageStatus.STALE
    if fence.epoch > view.epoch:
        return MessageStatus.CURRENT
    # On the committed length itself, the open's own job is still under way.
    repeated = fence.epoch == view.epoch and fence.base_len in {*view.answerable, view.committed_len}
    return MessageStatus.REPEAT if repeated else MessageStatus.STALE


class ComputeTimes(NamedTuple):
    """Plain form of the message: waiting and device time in microseconds and rows, shared batches counted whole."""

    queue_us: int = 0
    compute_us: int = 0
    forward_count: int = 0
    row_count: int = 0


@dataclass(slots=True)
class Meter:
    """Adds up the cost of one answer. `arrived_ns` is when its request came, on time.perf_counter_ns."""

    arrived_ns: int = field(default_factory=time.perf_counter_ns)
    _queue_ns: int | None = None
    _compute_ns: int = 0
    _forward_count: int = 0
    _row_count: int = 0

    def add(self, started_ns: int, ended_ns: int, num_rows: int) -> None:
        """Counts one forward over so many rows, with the sampling that followed it."""
        if self._queue_ns is None:
            self._queue_ns = max(0, started_ns - self.arrived_ns)
        self._compute_ns += ended_ns - started_ns
        self._forward_count += 1
        self._row_count += num_rows

    def extend(self, num_ns: int) -> None:
        """Counts more time on the device, with no forward."""
        self._compute_ns += num_ns

    def times(self) -> ComputeTimes:
        return ComputeTimes(
            (self._queue_ns or 0) // 1000, self._compute_ns // 1000, self._forward_count, self._row_count
        )
