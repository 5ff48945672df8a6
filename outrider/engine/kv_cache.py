"""Paged keys and values: a pool of blocks, tables that map positions to slots, and the tensors behind the slots.

Knows neither tokens nor models. A block that two tables share is never written: whoever has to write into one first
gets a copy of its own, so truncating into a shared block costs nothing until the next write (Kwon et al., 2023).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import CacheFull

BLOCK_SIZE = 16
Slots = NDArray[np.int64]


class BlockPool:
    """Counts who holds each block. Slot s is place s % block_size of block s // block_size."""

    def __init__(self, num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Taken from the end: the block freed last is the one most likely still in a processor's cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks

    def __repr__(self) -> str:
        return f"<BlockPool {self.num_used} of {self.num_blocks} blocks of {self.block_size} slots used>"

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - len(self._free)

    def require(self, num_blocks: int) -> None:
        """Raises CacheFull when fewer than num_blocks are free; takes none."""
        if num_blocks > self.num_free:
            message = (
                f"the key-value cache has {self.num_free} of {self.num_blocks} blocks free, but {num_blocks} are needed"
            )
            raise CacheFull(message, free=self.num_free, total=self.num_blocks, needed=num_blocks)

    def allocate(self) -> int:
        """A block with one holder; raises CacheFull."""
        self.require(1)
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Adds a holder to a block that has one; raises ValueError for a free block."""
        if not self._holders[block]:
            raise ValueError(f"block {block} is free and cannot be retained")
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """Takes a holder away, and frees the block with the last one; raises ValueError for a free block."""
        if not self._holders[block]:
            raise ValueError(f"block {block} is free already")
        self._holders[block] -= 1
        if not self._holders[block]:
            self._free.append(block)

    def is_shared(self, block: int) -> bool:
        """Whether more than one holder reads the block, so that nobody may write to it."""
        return self._holders[block] > 1

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every block is either free or held, and none is both or lost."""
        free = set(self._free)
        held = {block for block, holders in enumerate(self._holders) if holders > 0}
        if len(free) != len(self._free) or free & held or len(free) + len(held) != self.num_blocks:
            raise RuntimeError(f"block accounts do not add up: {len(self._free)} free, {len(held)} held: {self}")


class KVCache:
    """Rotated keys and values of every slot: per layer two tensors [num_slots, G, D]."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Not zeroed: no row reads a slot before it was written, and memory that is never used is then never touched.
        shape = (num_slots, num_kv_heads, head_dim)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def copy(self, source_slots: Slots, destination_slots: Slots) -> None:
        """Copies slots to slots in every layer; the two lists may overlap, since all is read before it is written."""
        device = self.keys[0].device
        source = torch.from_numpy(source_slots).to(device)
        destination = torch.from_numpy(destination_slots).to(device)
        for tensor in (*self.keys, *self.values):
            tensor.index_copy_(0, destination, tensor.index_select(0, source))

    def gather(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Copies of keys and values [num_layers, len(slots), G, D]."""
        index = torch.from_numpy(slots).to(self.keys[0].device)
        keys = torch.stack([tensor.index_select(0, index) for tensor in self.keys])
        return keys, torch.stack([tensor.index_select(0, index) for tensor in self.values])


class BlockTable:
    """The blocks of one session, in position order."""

    def __init__(self, pool: BlockPool, cache: KVCache) -> None:
        self.pool = pool
        self.cache = cache
        self._blocks: list[int] = []
        # Kept as an array that only grows at its end, so that a forward never walks a long prefix in Python.
        self._slots: Slots = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def capacity(self) -> int:
        """Positions that have a slot."""
        return len(self._blocks) * self.pool.block_size

    def reserve(self, length: int, written_from: int = 0) -> None:
        """Gives every position below length a slot, those from written_from on in blocks of this table alone.

        Raises CacheFull, and then nothing has changed.
        """
        size = self.pool.block_size
        shared = [
            index
            for index in range(written_from // size, min(-(-length // size), len(self._blocks)))
            if self.pool.is_shared(self._blocks[index])
        ]
        num_new = max(-(-length // size) - len(self._blocks), 0)
        self.pool.require(len(shared) + num_new)
        for index in shared:
            self._unshare(index)
        for _ in range(num_new):
            self._append(self.pool.allocate())

    def truncate(self, length: int) -> None:
        """Gives back the blocks that hold no position below length."""
        keep = -(-length // self.pool.block_size)
        while len(self._blocks) > keep:
            self.pool.release(self._blocks.pop())

    def slots(self, start: int, end: int) -> Slots:
        """Slots of positions, a view that holds until the table changes; raises ValueError for those without a slot."""
        if end > self.capacity:
            raise ValueError(f"position {end - 1} has no slot; {self.capacity} are reserved")
        return self._slots[start:end]

    def fork(self, length: int) -> "BlockTable":
        """A table that shares the blocks of the first `length` positions; whoever writes first makes its own copy."""
        if length > self.capacity:
            raise ValueError(f"cannot share {length} positions of {self.capacity}")
        twin = BlockTable(self.pool, self.cache)
        for block in self._blocks[: -(-length // self.pool.block_size)]:
            self.pool.retain(block)
            twin._append(block)
        return twin

    def free(self) -> None:
        """Gives back all blocks; idempotent."""
        self.truncate(0)

    def _append(self, block: int) -> None:
        index, size = len(self._blocks), self.pool.block_size
        if (index + 1) * size > len(self._slots):
            grown = np.empty(max(2 * len(self._slots), 8 * size), dtype=np.int64)
            grown[: len(self._slots)] = self._slots
            self._slots = grown
        self._blocks.append(block)
        self._slots[index * size : (index + 1) * size] = _block_slots(block, size)

    def _unshare(self, index: int) -> None:
        shared, size = self._blocks[index], self.pool.block_size
        own = self.pool.allocate()
        self.cache.copy(_block_slots(shared, size), _block_slots(own, size))
        self.pool.release(shared)
        self._blocks[index] = own
        self._slots[index * size : (index + 1) * size] = _block_slots(own, size)


def _block_slots(block: int, size: int) -> Slots:
    return np.arange(block * size, (block + 1) * size, dtype=np.int64)
