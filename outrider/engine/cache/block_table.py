"""Paged keys and values: tables that map positions to slots of blocks, and the tensors behind the slots.

A block that two tables share or that is published
is never written: whoever has to write into one first gets a copy of its own, so truncating into such a block costs
nothing until the next write (Kwon et al., 2023).
"""

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.cache.block_pool import BlockPool
from outrider.engine.cache.prefix_index import ROOT

Slots = NDArray[np.int64]


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
        # Of the leading blocks, those that are published, each behind the one before.
        self._num_published = 0
        # Kept as an array that only grows at its end, so that a forward never walks a long prefix in Python.
        self._slots: Slots = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def capacity(self) -> int:
        """Positions that have a slot."""
        return len(self._blocks) * self.pool.block_size

    @property
    def shared_blocks(self) -> tuple[int, ...]:
        """Blocks that other tables hold as well. They lead, because whoever shares a block shares those before it."""
        return tuple(takewhile(self.pool.is_shared, self._blocks))

    def reserve(self, length: int, written_from: int = 0) -> None:
        """Gives every position below length a slot, those from written_from on in blocks that nobody else can read.

        Raises CacheFull, and then nothing has changed.
        """
        size = self.pool.block_size
        written = range(written_from // size, min(-(-length // size), len(self._blocks)))
        shared = [index for index in written if self.pool.is_shared(self._blocks[index])]
        num_new = max(-(-length // size) - len(self._blocks), 0)
        self.pool.require(len(shared) + num_new)
        for index in shared:
            self._unshare(index)
        for _ in range(num_new):
            self._append(self.pool.allocate())
        # From the end, because whatever stands behind a block loses its name before the block does.
        for index in reversed(written):
            if self._blocks[index] in self.pool.prefixes:
                self._unpublish(index)

    def truncate(self, length: int) -> None:
        """Gives back the blocks that hold no position below length."""
        keep = -(-length // self.pool.block_size)
        while len(self._blocks) > keep:
            self.pool.release(self._blocks.pop())
        self._num_published = min(self._num_published, keep)

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
        twin._num_published = min(self._num_published, len(twin))
        return twin

    def free(self) -> None:
        """Gives back all blocks; idempotent."""
        self.truncate(0)

    def publish(self, salt: bytes, token_ids: Sequence[int], length: int) -> None:
        """Lets tables of the same salt find the full blocks below length, which hold keys and values of token_ids.

        Where another table has published the same tokens before, its block takes the place of this table's own.
        """
        size = self.pool.block_size
        for index in range(self._num_published, length // size):
            own, tokens = self._blocks[index], token_ids[index * size : (index + 1) * size]
            if own not in self.pool.prefixes and self.pool.is_shared(own):
                # A fork reads it too, and might go on without the block that it would stand behind.
                return
            block = self.pool.prefixes.publish(own, salt, self._parent(index), tokens)
            if block is None:
                return
            if block != own:
                self.pool.retain(block)
                self._replace(index, block)
            self._num_published = index + 1

    def take(self, salt: bytes, token_ids: Sequence[int], start: int) -> int:
        """Takes the published blocks that hold token_ids behind position start, all but the last token at most.

        Returns how many of token_ids the table holds then, start when nothing was found. Never raises CacheFull.
        """
        size, prefixes = self.pool.block_size, self.pool.prefixes
        full = start // size
        found: list[int] = []
        if self._num_published >= full:
            parent = self._parent(full)
            for first in range(full * size, len(token_ids) - size, size):
                block = prefixes.find(salt, parent, token_ids[first : first + size])
                if block is None:
                    break
                found.append(block)
                parent = block
        if not found:
            return start
        self.truncate(full * size)
        for block in found:
            self.pool.retain(block)
            self._append(block)
        self._num_published = len(self._blocks)
        return len(self._blocks) * size

    def _parent(self, index: int) -> int:
        return self._blocks[index - 1] if index else ROOT

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
        self._replace(index, own)
        self._num_published = min(self._num_published, index)

    def _unpublish(self, index: int) -> None:
        """Makes a published block that only this table holds writable."""
        if self.pool.num_free:
            self._unshare(index)
        else:
            # A session that fills the pool on its own must not need one block more than it has tokens for.
            self.pool.prefixes.withdraw(self._blocks[index])
            self._num_published = min(self._num_published, index)

    def _replace(self, index: int, block: int) -> None:
        """Puts a block that has been retained in the place of another, which is released."""
        size = self.pool.block_size
        self.pool.release(self._blocks[index])
        self._blocks[index] = block
        self._slots[index * size : (index + 1) * size] = _block_slots(block, size)


def _block_slots(block: int, size: int) -> Slots:
    return np.arange(block * size, (block + 1) * size, dtype=np.int64)
