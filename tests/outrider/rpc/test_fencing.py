"""Tests of outrider.rpc.fencing: every pair of epochs and lengths has one answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import InvalidRequest
from outrider.rpc.fencing import Fence, MessageStatus, SessionView, check_fence, classify, classify_open

ID = bytes(16)
# Ten tokens are committed in epoch 3; verdicts on 7 and 9 are kept, everything below has been acknowledged.
VIEW = SessionView(epoch=3, committed_len=10, answerable=frozenset({7, 9}))


@pytest.mark.parametrize(
    ("epoch", "base_len", "num_new", "status"),
    [
        (2, 10, 0, MessageStatus.STALE),
        (2, 11, 0, MessageStatus.STALE),
        (3, 10, 0, MessageStatus.CURRENT),
        (3, 7, 0, MessageStatus.REPEAT),
        (3, 9, 0, MessageStatus.REPEAT),
        (3, 8, 0, MessageStatus.STALE),
        (3, 5, 0, MessageStatus.STALE),
        (3, 11, 0, MessageStatus.FUTURE),
        (3, 11, 1, MessageStatus.CURRENT),
        (3, 13, 2, MessageStatus.FUTURE),
        (3, 13, 4, MessageStatus.CURRENT),
        (4, 10, 0, MessageStatus.REWIND),
        (4, 7, 0, MessageStatus.REWIND),
        (4, 11, 0, MessageStatus.FUTURE),
        (4, 11, 1, MessageStatus.REWIND),
    ],
)
def test_messages_are_classified_by_epoch_and_length(
    epoch: int, base_len: int, num_new: int, status: MessageStatus
) -> None:
    """Older epochs are dropped, kept answers repeated, missing tokens asked for, newer epochs rewind."""
    assert classify(Fence(ID, epoch, base_len), VIEW, num_new) is status


def test_an_unknown_session_asks_for_tokens() -> None:
    """Without an open there is nothing to build on."""
    assert classify(Fence(ID, 1, 5), None) is MessageStatus.FUTURE


@pytest.mark.parametrize(
    ("epoch", "base_len", "status"),
    [
        (2, 10, MessageStatus.STALE),
        (3, 9, MessageStatus.REPEAT),
        (3, 10, MessageStatus.REPEAT),
        (3, 8, MessageStatus.STALE),
        (4, 2, MessageStatus.CURRENT),
    ],
)
def test_only_a_newer_epoch_opens_again(epoch: int, base_len: int, status: MessageStatus) -> None:
    """The same open twice is a repetition."""
    assert classify_open(Fence(ID, epoch, base_len), VIEW) is status
    assert classify_open(Fence(ID, epoch, base_len), None) is MessageStatus.CURRENT


@given(
    st.integers(1, 6),
    st.integers(1, 20),
    st.integers(0, 5),
    st.integers(1, 6),
    st.integers(1, 20),
    st.frozensets(st.integers(1, 20)),
)
def test_no_message_of_an_older_epoch_has_an_effect(
    epoch: int, base_len: int, num_new: int, known_epoch: int, committed_len: int, answerable: frozenset[int]
) -> None:
    """STALE exactly when older, or of this epoch and acknowledged; nothing is taken whose tokens are missing."""
    known = SessionView(known_epoch, committed_len, answerable)
    status = classify(Fence(ID, epoch, base_len), known, num_new)
    if epoch < known_epoch:
        assert status is MessageStatus.STALE
    elif base_len - num_new > committed_len:
        assert status is MessageStatus.FUTURE
    else:
        assert (status is MessageStatus.REWIND) == (epoch > known_epoch)
        assert status is not MessageStatus.FUTURE


@pytest.mark.parametrize(
    ("fence", "field"),
    [
        (Fence(bytes(15), 1, 1), "fence.session_id"),
        (Fence(b"", 1, 1), "fence.session_id"),
        (Fence(ID, 0, 1), "fence.epoch"),
        (Fence(ID, -4, 1), "fence.epoch"),
        (Fence(ID, 1, 0), "fence.base_len"),
        (Fence(ID, 1, 101), "fence.base_len"),
    ],
)
def test_fences_out_of_range_are_refused(fence: Fence, field: str) -> None:
    """The field is named."""
    with pytest.raises(InvalidRequest, match=field):
        check_fence(fence, context_len=100)


def test_the_ends_of_the_range_pass() -> None:
    """1 and the context are lengths."""
    for base_len in (1, 100):
        assert check_fence(Fence(ID, 1, base_len), 100).base_len == base_len
