"""Tests of outrider.rpc.fencing: every pair of epochs and lengths has one answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import InvalidRequest
from outrider.rpc.fencing import Fence, Known, Standing, check_fence, judge, judge_open, judge_rollback

ID = bytes(16)
# Ten tokens are committed in epoch 3; verdicts on 7 and 9 are kept, everything below has been acknowledged.
KNOWN = Known(epoch=3, committed_len=10, answerable=frozenset({7, 9}), least_len=10)


@pytest.mark.parametrize(
    ("epoch", "base_len", "num_new", "standing"),
    [
        (2, 10, 0, Standing.STALE),
        (2, 11, 0, Standing.STALE),
        (3, 10, 0, Standing.CURRENT),
        (3, 7, 0, Standing.REPEAT),
        (3, 9, 0, Standing.REPEAT),
        (3, 8, 0, Standing.STALE),
        (3, 5, 0, Standing.STALE),
        (3, 11, 0, Standing.FUTURE),
        (3, 11, 1, Standing.CURRENT),
        (3, 13, 2, Standing.FUTURE),
        (3, 13, 4, Standing.CURRENT),
        (4, 10, 0, Standing.REWIND),
        (4, 7, 0, Standing.REWIND),
        (4, 11, 0, Standing.FUTURE),
        (4, 11, 1, Standing.REWIND),
    ],
)
def test_messages_are_judged_by_epoch_and_length(epoch: int, base_len: int, num_new: int, standing: Standing) -> None:
    """Older epochs are dropped, kept answers repeated, missing tokens asked for, newer epochs rewind."""
    assert judge(Fence(ID, epoch, base_len), KNOWN, num_new) is standing


def test_an_unknown_session_asks_for_tokens() -> None:
    """Without an open there is nothing to build on."""
    assert judge(Fence(ID, 1, 5), None) is Standing.FUTURE
    assert judge_rollback(Fence(ID, 1, 5), None) is Standing.FUTURE


@pytest.mark.parametrize(
    ("epoch", "base_len", "standing"),
    [
        (2, 10, Standing.STALE),
        (3, 9, Standing.REPEAT),
        (3, 10, Standing.REPEAT),
        (3, 8, Standing.STALE),
        (4, 2, Standing.CURRENT),
    ],
)
def test_only_a_newer_epoch_opens_again(epoch: int, base_len: int, standing: Standing) -> None:
    """The same open twice is a repetition."""
    assert judge_open(Fence(ID, epoch, base_len), KNOWN) is standing
    assert judge_open(Fence(ID, epoch, base_len), None) is Standing.CURRENT


@pytest.mark.parametrize(("epoch", "standing"), [(2, Standing.STALE), (3, Standing.REPEAT), (4, Standing.CURRENT)])
def test_rollback_acts_once_an_epoch(epoch: int, standing: Standing) -> None:
    """The same epoch again changes nothing, an older one neither."""
    assert judge_rollback(Fence(ID, epoch, 4), KNOWN) is standing


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
    known = Known(known_epoch, committed_len, answerable, committed_len)
    standing = judge(Fence(ID, epoch, base_len), known, num_new)
    if epoch < known_epoch:
        assert standing is Standing.STALE
    elif base_len - num_new > committed_len:
        assert standing is Standing.FUTURE
    else:
        assert (standing is Standing.REWIND) == (epoch > known_epoch)
        assert standing is not Standing.FUTURE


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
