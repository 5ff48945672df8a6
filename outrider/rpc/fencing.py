"""Whether a message of a session is old, repeated, timely or ahead.

Messages are matched by (epoch, base_len), never by their order, so that a stream that broke, a call that was repeated
and an answer that was overtaken need no handling of their own.
"""

from collections.abc import Collection
from enum import Enum, auto
from typing import NamedTuple

from outrider.errors import InvalidRequest

# Of the messages between a service and who uses it; both sides need the same.
PROTOCOL_VERSION = 3
SESSION_ID_LEN = 16


class Fence(NamedTuple):
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
