"""Sessions: lengths after every operation, and where the rows of a tree end up."""

import pytest
import torch

from outrider.engine.cache import BlockPool, BlockTable, KVCache
from outrider.engine.session import Session
from outrider.errors import CacheFull, InvalidRequest
from outrider.token_tree import EMPTY, TokenTree

TREE = TokenTree(token_ids=(10, 20, 30, 40, 50), parents=(0, 0, 1, 2, 4))


@pytest.fixture
def pool() -> BlockPool:
    """Eight blocks of four slots."""
    return BlockPool(8, 4)


def open_session(pool: BlockPool, *token_ids: int) -> Session:
    """A session over a cache whose keys are their slot."""
    cache = KVCache(1, pool.num_blocks * pool.block_size, 1, 1, torch.float32, torch.device("cpu"))
    cache.keys[0][:] = torch.arange(len(cache.keys[0]))[:, None, None]
    return Session(BlockTable(pool, cache), token_ids, 1)


def run(session: Session, tree: TokenTree = EMPTY) -> None:
    """What a runner does, without computing anything."""
    session.reserve(len(tree))
    session.advance(len(session), tree)


def test_new_session_has_nothing_cached(pool: BlockPool) -> None:
    """Opening takes no block."""
    session = open_session(pool, 1, 2, 3)
    assert (session.cached_len, session.token_ids[session.cached_len :], session.next_position) == (0, [1, 2, 3], 0)
    assert pool.num_used == 0


@pytest.mark.parametrize(("token_ids", "prompt_len"), [([], 1), ([1, 2], 0), ([1, 2], 3)])
def test_impossible_prompts_are_refused(pool: BlockPool, token_ids: list[int], prompt_len: int) -> None:
    """A session needs a token, and a prompt within its tokens."""
    table = open_session(pool, 1).table
    with pytest.raises(InvalidRequest):
        Session(table, token_ids, prompt_len)


def test_keep_moves_accepted_rows_behind_the_committed_tokens(pool: BlockPool) -> None:
    """Rows 2, 4, 5 of a tree become positions 6, 7, 8, and the slots of the rest come back."""
    session = open_session(pool, 1, 2, 3, 4, 5, 6)
    run(session, TREE)
    before = session.table.slots(0, 11).tolist()
    session.keep((2, 4, 5))
    assert session.token_ids == [1, 2, 3, 4, 5, 6, 20, 40, 50]
    assert (session.cached_len, session.token_ids[session.cached_len :]) == (9, [])
    keys, _ = session.table.cache.gather(session.table.slots(0, 9))
    assert keys[0, :, 0, 0].tolist() == [*before[:6], before[7], before[9], before[10]]
    assert len(session.table) == 3
    pool.check_integrity()


def test_keeping_a_chain_copies_nothing(pool: BlockPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The accepted rows of a chain lie where they belong."""
    session = open_session(pool, 1, 2, 3)
    run(session, TokenTree.chain([7, 8, 9]))
    monkeypatch.delattr(KVCache, "copy")
    session.keep((1, 2))
    assert (session.token_ids, session.cached_len) == ([1, 2, 3, 7, 8], 5)


@pytest.mark.parametrize("rows", [(4,), (1, 2), (2, 5), (6,), (0,), (2, 4, 4)])
def test_keep_refuses_rows_that_are_no_path(pool: BlockPool, rows: tuple[int, ...]) -> None:
    """Only a path from the root has keys and values that saw each other."""
    session = open_session(pool, 1, 2)
    run(session, TREE)
    with pytest.raises(ValueError, match="not a path"):
        session.keep(rows)
    assert session.token_ids == [1, 2]


def test_rows_are_provisional_until_the_tokens_change(pool: BlockPool) -> None:
    """After a plain commit the tree is gone, and its rows can no longer be kept."""
    session = open_session(pool, 1, 2)
    run(session, TREE)
    session.extend([9])
    with pytest.raises(ValueError, match="not a path"):
        session.keep((1,))
    assert (session.token_ids, session.token_ids[session.cached_len :]) == ([1, 2, 9], [9])


def test_truncate_is_idempotent(pool: BlockPool) -> None:
    """Twice the same length is once, for tokens, cache and blocks."""
    session = open_session(pool, *range(10))
    run(session, TREE)
    for _ in range(2):
        session.truncate(5)
        assert (session.token_ids, session.cached_len, len(session.table)) == ([0, 1, 2, 3, 4], 5, 2)
    assert session.next_position == 4
    for length in (0, 6):
        with pytest.raises(InvalidRequest):
            session.truncate(length)


def test_replace_tail_keeps_the_cache_of_the_common_prefix(pool: BlockPool) -> None:
    """Only what differs has to be computed again."""
    session = open_session(pool, 1, 2, 3, 4, 5)
    run(session)
    session.replace_tail(2, [3, 4, 9, 10])
    assert (session.token_ids, session.cached_len) == ([1, 2, 3, 4, 9, 10], 4)
    session.replace_tail(6, [11])
    assert (session.token_ids[-1], session.cached_len) == (11, 4)
    session.replace_tail(3, [])
    assert (session.token_ids, session.cached_len) == ([1, 2, 3], 3)


def test_reserve_that_does_not_fit_changes_nothing(pool: BlockPool) -> None:
    """The caller can fail one session and go on with the others."""
    session, other = open_session(pool, *range(20)), open_session(pool, *range(12))
    session.reserve()
    with pytest.raises(CacheFull):
        other.reserve(1)
    assert (len(other), other.cached_len, len(other.table)) == (12, 0, 0)
    other.reserve()
    session.free()
    session.free()
    other.free()
    pool.check_integrity()
    assert pool.num_free == 8
