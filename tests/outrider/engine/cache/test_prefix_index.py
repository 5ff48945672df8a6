"""Published blocks: who finds them, what is written instead of them, and which of them goes first."""

import pytest
import torch

from outrider.engine import cache
from outrider.engine.cache import BlockPool, BlockTable, KVCache
from outrider.engine.session import Session
from outrider.errors import CacheFull
from outrider.token_tree import EMPTY, TokenTree

SIZE = 4


class Engine:
    """A pool whose keys are the token that was computed there, without a model."""

    def __init__(self, num_blocks: int = 8) -> None:
        self.pool = BlockPool(num_blocks, SIZE)
        self.cache = KVCache(1, num_blocks * SIZE, 1, 1, torch.float32, torch.device("cpu"))

    def open(self, *token_ids: int, salt: bytes | None = b"") -> Session:
        return Session(BlockTable(self.pool, self.cache), token_ids, 1, salt)

    def run(self, session: Session, tree: TokenTree = EMPTY) -> None:
        """What a runner and a service do for one session."""
        session.reserve(len(tree))
        written = [*session.token_ids, *tree.token_ids]
        slots = session.table.slots(session.next_position, len(written))
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor[slots] = torch.tensor(written[session.next_position :], dtype=torch.float32)[:, None, None]
        session.advance(len(session), tree)
        session.publish(len(session))

    def served(self, *token_ids: int, salt: bytes | None = b"") -> Session:
        session = self.open(*token_ids, salt=salt)
        self.run(session)
        return session

    def hits(self, *token_ids: int, salt: bytes | None = b"") -> int:
        """How many tokens a new session would find; takes and gives back."""
        session = self.open(*token_ids, salt=salt)
        num_hits = session.take_prefix()
        check(session)
        session.free()
        self.pool.check_integrity()
        return num_hits


def check(session: Session) -> None:
    """What is cached are the keys of the session's own tokens."""
    keys, _ = session.table.cache.gather(session.table.slots(0, session.cached_len))
    assert keys[0, :, 0, 0].tolist() == session.token_ids[: session.cached_len]


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_whole_blocks_are_found_and_the_last_token_is_computed_anew(engine: Engine) -> None:
    """Nothing of a block that is not full, and never all tokens, because the logits of the last are wanted."""
    engine.served(*range(10)).free()
    assert engine.pool.num_free == 8
    found = [engine.hits(*range(length)) for length in range(1, 14)]
    assert found == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 8]
    assert engine.hits(0, 1, 2, 9, 4, 5) == 0
    assert engine.hits(0, 1, 2, 3, 9, 5, 6, 7, 8) == 4


def test_equal_blocks_behind_other_tokens_are_not_the_same(engine: Engine) -> None:
    """Keys depend on everything before them, and so does the name of a block."""
    engine.served(1, 1, 1, 1, 2, 2, 2, 2, 9).free()
    assert engine.hits(3, 3, 3, 3, 2, 2, 2, 2, 9) == 0
    assert engine.hits(2, 2, 2, 2, 9) == 0


def test_salts_share_nothing(engine: Engine) -> None:
    """Neither with each other nor with sessions that have none."""
    engine.served(*range(9), salt=b"one").free()
    assert [engine.hits(*range(9), salt=salt) for salt in (b"one", b"two", b"", None)] == [8, 0, 0, 0]
    engine.served(*range(20, 29), salt=None).free()
    assert [engine.hits(*range(20, 29), salt=salt) for salt in (b"", None)] == [0, 0]


def test_a_collision_serves_nobody(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a digest that is always the same only the very tokens are found, and nothing is published over them."""
    monkeypatch.setattr(cache, "digest", lambda before, token_ids: b"same")
    first = engine.served(*range(9))
    second = engine.served(*range(10, 19))
    assert [engine.hits(*range(9)), engine.hits(*range(10, 19)), engine.hits(*range(9), salt=b"x")] == [4, 0, 0]
    assert set(first.table.slots(0, 8)).isdisjoint(second.table.slots(0, 8))
    engine.pool.check_integrity()


def test_rows_of_a_proposal_are_not_published_before_they_are_kept(engine: Engine) -> None:
    """Neither those of a tree that may be rejected, nor tokens past the length that is committed."""
    session = engine.open(0, 1, 2)
    engine.run(session, TokenTree.chain([3, 4, 5, 6, 7]))
    assert engine.hits(*range(9)) == 0
    session.keep((1, 2))
    session.publish(len(session))
    assert engine.hits(*range(9)) == 4
    session.extend([5, 6, 7])
    session.reserve()
    session.advance(8, EMPTY)
    session.publish(7)
    assert engine.hits(*range(9)) == 4


def test_the_same_tokens_are_kept_once(engine: Engine) -> None:
    """Two sessions that computed a block at the same time share one of the two from then on."""
    first, second = engine.served(*range(9)), engine.served(*range(9))
    assert engine.pool.num_used == 4
    assert first.table.slots(0, 8).tolist() == second.table.slots(0, 8).tolist()
    assert first.table.shared_blocks == second.table.shared_blocks
    assert len(first.table.shared_blocks) == 2
    check(second)


def test_truncating_into_a_published_block_copies_what_is_kept(engine: Engine) -> None:
    """The next write goes into the copy, and the block goes on to serve those who find it."""
    session = engine.served(*range(9))
    session.truncate(6)
    session.extend([50, 51, 52])
    engine.run(session)
    check(session)
    assert engine.hits(*range(9)) == 8
    assert engine.hits(0, 1, 2, 3, 4, 5, 50, 51, 52) == 8
    engine.pool.check_integrity()


def test_the_last_token_computed_once_more_is_not_written_into_a_published_block(engine: Engine) -> None:
    """On a device whose rows are not the same bits every time, others would see the difference."""
    session = engine.served(*range(8))
    before = session.table.slots(0, 8).tolist()
    session.reserve()
    assert session.table.slots(0, 4).tolist() == before[:4]
    assert set(session.table.slots(4, 8)).isdisjoint(before)


def test_a_session_that_fills_the_pool_needs_no_block_more() -> None:
    """Without any other block its own loses its name and is written."""
    engine = Engine(2)
    session = engine.served(*range(8))
    session.truncate(7)
    session.extend([70])
    engine.run(session)
    check(session)
    session.free()
    assert engine.hits(*range(9)) == 4
    assert engine.hits(*range(7), 70, 8) == 8


def test_what_was_used_longest_ago_goes_first_and_tails_before_heads(engine: Engine) -> None:
    """A block without holders is as good as a free one, and is taken when there is no other."""
    engine.served(*range(9)).free()
    engine.served(*range(20, 29)).free()
    assert (engine.pool.num_free, engine.pool.num_cached) == (8, 4)
    assert engine.hits(*range(9)) == 8
    hog = engine.open(*range(100, 120), salt=None)
    hog.reserve()
    assert [engine.hits(*range(20, 29)), engine.hits(*range(9))] == [4, 8]
    hog.table.reserve(24)
    assert [engine.hits(*range(20, 29)), engine.hits(*range(9))] == [0, 8]
    with pytest.raises(CacheFull):
        hog.table.reserve(33)
    assert engine.hits(*range(9)) == 8
    hog.table.reserve(32)
    assert (engine.pool.num_free, engine.pool.num_cached) == (0, 0)
    engine.pool.check_integrity()


def test_a_session_goes_on_with_what_others_published(engine: Engine) -> None:
    """After what it has cached itself; a block that it has begun gives way to the full one."""
    engine.served(*range(13)).free()
    session = engine.open(*range(6))
    session.take_prefix()
    engine.run(session)
    session.extend(range(6, 13))
    assert (session.cached_len, session.take_prefix(), session.cached_len) == (6, 6, 12)
    check(session)
    engine.run(session)
    assert session.take_prefix() == 0
    session.free()
    assert engine.pool.num_free == 8
    engine.pool.check_integrity()


def test_a_fork_and_published_blocks(engine: Engine) -> None:
    """A block that a fork reads is not published after one that the fork does not hold."""
    session = engine.open(*range(9), salt=None)
    engine.run(session)
    twin = Session(session.table.fork(8), range(8), 1, b"")
    twin.cached_len = 8
    twin.publish(8)
    assert engine.hits(*range(9)) == 0
    session.free()
    twin.publish(8)
    assert engine.hits(*range(9)) == 8
    other = Session(twin.table.fork(8), range(8), 1, b"")
    twin.free()
    engine.pool.check_integrity()
    other.free()
    assert (engine.pool.num_free, engine.pool.num_cached) == (8, 2)


def test_integrity_check_finds_planted_faults(engine: Engine) -> None:
    """A name without a block, a free block with a name, and a block that outlives the one before it."""
    session = engine.served(*range(9))
    index = engine.pool.prefixes
    [head, tail] = index._prefixes
    entry = index._prefixes.pop(tail)
    with pytest.raises(RuntimeError, match="2 names stand for 1 published"):
        engine.pool.check_integrity()
    index._prefixes[tail] = entry
    index._unheld[tail] = None
    with pytest.raises(RuntimeError, match="do not add up"):
        engine.pool.check_integrity()
    session.free()
    index._unheld.move_to_end(tail)
    with pytest.raises(RuntimeError, match="would outlive"):
        engine.pool.check_integrity()
    index.withdraw(head)
    engine.pool._free.append(head)
    with pytest.raises(RuntimeError, match="has no name"):
        engine.pool.check_integrity()
