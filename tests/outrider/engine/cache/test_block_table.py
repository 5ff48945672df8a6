"""The block pool's accounts, tables that share blocks, and copies of slots."""

import numpy as np
import pytest
import torch

from outrider.engine.cache import BlockPool, BlockTable, KVCache
from outrider.errors import CacheFull

SIZE = 4


def make(num_blocks: int) -> tuple[BlockPool, KVCache]:
    """A pool and a cache of one layer whose keys are their slot."""
    pool = BlockPool(num_blocks, SIZE)
    cache = KVCache(1, num_blocks * SIZE, 1, 2, torch.float32, torch.device("cpu"))
    cache.keys[0][:] = torch.arange(num_blocks * SIZE, dtype=torch.float32)[:, None, None]
    cache.values[0][:] = -cache.keys[0]
    return pool, cache


def contents(table: BlockTable, length: int) -> list[float]:
    """The keys of a table's positions."""
    keys, values = table.cache.gather(table.slots(0, length))
    assert torch.equal(keys, -values)
    return keys[0, :, 0, 0].tolist()


def test_pool_counts_holders_and_frees_with_the_last() -> None:
    """A retained block outlives its first holder."""
    pool = BlockPool(2)
    block = pool.allocate()
    pool.retain(block)
    pool.release(block)
    assert (pool.num_used, pool.num_free) == (1, 1)
    pool.release(block)
    assert pool.num_free == 2
    pool.check_integrity()


def test_pool_refuses_what_would_corrupt_its_accounts() -> None:
    """Releasing or retaining a free block is an error, and so is an empty pool."""
    pool = BlockPool(1)
    with pytest.raises(ValueError, match="free already"):
        pool.release(0)
    with pytest.raises(ValueError, match="cannot be retained"):
        pool.retain(0)
    pool.allocate()
    with pytest.raises(CacheFull, match="0 of 1 blocks free, but 1 are needed"):
        pool.allocate()


def test_integrity_check_finds_a_planted_leak() -> None:
    """A block that is neither free nor held, or both, does not pass."""
    pool = BlockPool(2)
    block = pool.allocate()
    pool._holders[block] = 0
    with pytest.raises(RuntimeError, match="do not add up"):
        pool.check_integrity()
    pool._holders[block] = 1
    pool._free.append(block)
    with pytest.raises(RuntimeError, match="do not add up"):
        pool.check_integrity()


def test_reserve_takes_all_blocks_or_none() -> None:
    """A reservation that does not fit leaves the table and the pool as they were."""
    pool, cache = make(3)
    table = BlockTable(pool, cache)
    table.reserve(5)
    with pytest.raises(CacheFull):
        table.reserve(13)
    assert (len(table), pool.num_free) == (2, 1)
    table.reserve(12)
    assert (len(table), pool.num_free) == (3, 0)


def test_truncate_is_idempotent_and_slots_follow_positions() -> None:
    """Slots of a position stay while it is kept, and every freed block comes back."""
    pool, cache = make(8)
    table = BlockTable(pool, cache)
    table.reserve(14)
    before = table.slots(0, 5).tolist()
    assert len(set(table.slots(0, 14).tolist())) == 14
    for _ in range(2):
        table.truncate(5)
        assert (len(table), pool.num_free, table.slots(0, 5).tolist()) == (2, 6, before)
    with pytest.raises(ValueError, match="no slot"):
        table.slots(0, 9)
    for _ in range(2):
        table.free()
        assert pool.num_free == 8
    pool.check_integrity()


def test_slot_array_grows_with_long_tables() -> None:
    """Growing keeps the slots of earlier positions."""
    pool, cache = make(64)
    table = BlockTable(pool, cache)
    table.reserve(10)
    head = table.slots(0, 10).tolist()
    table.reserve(250)
    assert table.slots(0, 10).tolist() == head
    assert sorted(table.slots(0, table.capacity).tolist()) == sorted(
        slot for block in table._blocks for slot in range(block * SIZE, block * SIZE + SIZE)
    )


def test_fork_shares_until_someone_writes() -> None:
    """The first writer into a shared block gets a copy with the same contents; the other keeps the original."""
    pool, cache = make(8)
    table = BlockTable(pool, cache)
    table.reserve(7)
    original, slots = contents(table, 6), table.slots(0, 6).tolist()
    twin = table.fork(6)
    assert pool.num_used == 2
    twin.reserve(7, written_from=6)
    assert pool.num_used == 3
    assert contents(twin, 6) == contents(table, 6) == original
    assert twin.slots(0, 4).tolist() == slots[:4]
    assert set(twin.slots(4, 8).tolist()).isdisjoint(table.slots(4, 8).tolist())
    table.reserve(7, written_from=6)
    assert (pool.num_used, table.slots(0, 6).tolist()) == (3, slots)
    table.free()
    assert contents(twin, 6) == original
    twin.free()
    pool.check_integrity()
    assert pool.num_free == 8


def test_truncating_into_a_shared_block_copies_only_at_the_next_write() -> None:
    """A rollback never needs a block, so it cannot fail in a full pool; the write after it may."""
    pool, cache = make(2)
    table = BlockTable(pool, cache)
    table.reserve(8)
    twin = table.fork(8)
    twin.truncate(2)
    with pytest.raises(CacheFull):
        twin.reserve(3, written_from=2)
    assert contents(twin, 2) == contents(table, 2)
    table.truncate(4)
    twin.reserve(3, written_from=2)
    assert contents(twin, 2) == contents(table, 2)
    assert twin.slots(0, 1) != table.slots(0, 1)
    pool.check_integrity()


def test_copy_reads_all_before_it_writes() -> None:
    """Overlapping lists shift slots without smearing one value over all."""
    _, cache = make(2)
    cache.copy(np.array([1, 2, 3]), np.array([0, 1, 2]))
    assert cache.keys[0][:4, 0, 0].tolist() == [1, 2, 3, 3]
    assert cache.values[0][:4, 0, 1].tolist() == [-1, -2, -3, -3]
