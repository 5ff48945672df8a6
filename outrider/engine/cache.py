"""Paged keys and values: tables that map positions to slots of blocks, the blocks themselves, and shared prefixes.

A block is free, held by one or more tables, or published and held by none: then it keeps what was computed, for
sessions that ask for the same tokens, until a block is needed and no other is free. A block that two tables share or
that is published is never written: a table that has to write into one first gets its own copy, so truncating into such
a block costs nothing until the next write (Kwon et al., 2023).

A published block has a name: a digest of its own tokens and of all before them, that begins with a salt, so that
sessions of different salts share nothing. The digest only finds a block; what is served is compared token by token with
what was asked for, and so a collision serves no wrong keys.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.devices import send
from outrider.errors import CacheFull
from outrider.estimates.prefixes import PrefixJournal

BLOCK_SIZE = 16
DIGEST_BYTES = 32
ROOT = -1
"""Stands for the block before the first one."""

Slots = NDArray[np.int64]


class BlockPool:
    """Counts who holds each block. Slot s is place s % block_size of block s // block_size."""

    def __init__(self, num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Taken from the end: the block freed last is the one most likely still in a processor's cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks
        # Published blocks that no table holds are as good as free, and are taken last.
        self.prefixes = PrefixIndex()

    def __repr__(self) -> str:
        return f"<BlockPool {self.num_used} of {self.num_blocks} blocks of {self.block_size} slots used>"

    @property
    def num_free(self) -> int:
        """Number of blocks that a table that needs them gets."""
        return len(self._free) + self.prefixes.num_unheld

    @property
    def num_cached(self) -> int:
        """Free blocks that still hold what was published in them."""
        return self.prefixes.num_unheld

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def require(self, num_blocks: int) -> None:
        """Raises CacheFull when fewer than num_blocks are free; takes none."""
        if num_blocks > self.num_free:
            message = (
                f"the key-value cache has {self.num_free} of {self.num_blocks} blocks free, but {num_blocks} are needed"
            )
            raise CacheFull(message, free=self.num_free, total=self.num_blocks, needed=num_blocks)

    def allocate(self) -> int:
        """A block with one holder, not published; raises CacheFull."""
        self.require(1)
        block = self._free.pop() if self._free else self.prefixes.evict()
        self._holders[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Adds a holder to a block that has one or is published; raises ValueError for any other."""
        if not self._holders[block] and not self.prefixes.take_up(block):
            raise ValueError(f"block {block} is free and cannot be retained")
        self._holders[block] += 1

    def release(self, block: int) -> None:
        """Takes a holder away, and frees the block with the last one; raises ValueError for a free block."""
        if not self._holders[block]:
            raise ValueError(f"block {block} is free already")
        self._holders[block] -= 1
        if self._holders[block]:
            return
        if block in self.prefixes:
            self.prefixes.put_by(block)
        else:
            self._free.append(block)

    def is_shared(self, block: int) -> bool:
        """Whether more than one holder reads the block, so that none may write to it."""
        return self._holders[block] > 1

    def is_writable(self, block: int) -> bool:
        """Whether a block has one holder, and is not published."""
        return self._holders[block] == 1 and block not in self.prefixes

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every block is free, cached or held, none is two of them, and names agree."""
        free = set(self._free)
        held = {block for block, holders in enumerate(self._holders) if holders > 0}
        total = len(self._free) + self.num_cached + len(held)
        if len(free) != len(self._free) or free & held or total != self.num_blocks:
            raise RuntimeError(f"block accounts do not add up: {len(self._free)} free, {len(held)} held: {self}")
        if any(block in self.prefixes for block in free):
            raise RuntimeError(f"a free block is published: {self}")
        self.prefixes.check(held)


@dataclass(frozen=True, slots=True)
class Prefix:
    """Content of a published block: its own tokens, after those of the published block `parent`."""

    digest: bytes
    salt: bytes
    parent: int
    token_ids: tuple[int, ...]


class PrefixIndex:
    """Published blocks by their digests, and those of them that no table holds, which stay until a block is needed.

    A table that holds a block holds its parent too, and lets go of it later. So of the blocks that none holds the
    oldest never has a published child, and what is evicted leaves nothing that cannot be reached any more.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._prefixes: dict[int, Prefix] = {}
        # The one that was held longest ago comes first.
        self._unheld: OrderedDict[int, None] = OrderedDict()
        self.journal = PrefixJournal()

    def __contains__(self, block: int) -> bool:
        return block in self._prefixes

    @property
    def num_unheld(self) -> int:
        return len(self._unheld)

    def find(self, salt: bytes, parent: int, token_ids: Sequence[int]) -> int | None:
        """Block of these tokens after a published parent, or ROOT; None when there is none."""
        wanted = self._prefix(salt, parent, token_ids)
        block = self._blocks.get(wanted.digest)
        return block if block is not None and self._prefixes[block] == wanted else None

    def publish(self, block: int, salt: bytes, parent: int, token_ids: Sequence[int]) -> int | None:
        """Gives a held block its name; returns the block that has it, which may be an earlier one of the same tokens.

        None when another prefix has the same digest, or when the block has another name already.
        """
        prefix = self._prefix(salt, parent, token_ids)
        found = self._blocks.get(prefix.digest)
        if found is not None:
            return found if self._prefixes[found] == prefix else None
        if block in self._prefixes:
            return None
        self._blocks[prefix.digest], self._prefixes[block] = block, prefix
        self.journal.publish(block, salt, parent, prefix.token_ids)
        return block

    def withdraw(self, block: int) -> None:
        """Takes the name from a block that has no published children."""
        del self._blocks[self._prefixes.pop(block).digest]
        self._unheld.pop(block, None)
        self.journal.withdraw(block)

    def put_by(self, block: int) -> None:
        """Takes note that no table holds this published block any more."""
        self._unheld[block] = None

    def take_up(self, block: int) -> bool:
        """Takes note that a table holds a block again; returns whether it was one that was kept here."""
        if block not in self._unheld:
            return False
        del self._unheld[block]
        return True

    def evict(self) -> int:
        """Withdraws the block that was held longest ago, and returns it; raises KeyError when all are held."""
        block = next(iter(self._unheld))
        self.withdraw(block)
        return block

    def check(self, held: set[int]) -> None:
        """Raises RuntimeError unless names, blocks and those that no table holds agree."""
        named = {self._blocks.get(prefix.digest) for prefix in self._prefixes.values()}
        if named != set(self._prefixes) or len(self._blocks) != len(self._prefixes):
            raise RuntimeError(f"{len(self._blocks)} names stand for {len(self._prefixes)} published blocks")
        if set(self._unheld) != set(self._prefixes) - held:
            raise RuntimeError(f"{len(self._unheld)} published blocks count as unheld, but others are")
        ages = {block: age for age, block in enumerate(self._unheld)}
        for block, prefix in self._prefixes.items():
            if prefix.parent != ROOT and prefix.parent not in self._prefixes:
                raise RuntimeError(f"block {block} stands behind block {prefix.parent}, which has no name")
            if ages.get(prefix.parent, len(ages)) < ages.get(block, len(ages)):
                raise RuntimeError(f"block {block} would outlive block {prefix.parent}, behind which it stands")

    def _prefix(self, salt: bytes, parent: int, token_ids: Sequence[int]) -> Prefix:
        before = first_digest(salt) if parent == ROOT else self._prefixes[parent].digest
        return Prefix(digest(before, token_ids), salt, parent, tuple(token_ids))


def first_digest(salt: bytes) -> bytes:
    """Digest that the chain of a salt begins with."""
    return hashlib.blake2b(salt, digest_size=DIGEST_BYTES, person=b"salt").digest()


def digest(before: bytes, token_ids: Sequence[int]) -> bytes:
    """The link of a chain: digest of token ids after the digest of all before them."""
    return hashlib.blake2b(before + array("q", token_ids).tobytes(), digest_size=DIGEST_BYTES, person=b"block").digest()


class KVCache:
    """Rotated keys and values of every slot: per layer two tensors [num_slots, G, D]; and features, where wanted."""

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
        exact = torch.float32 if device.type == "cpu" else dtype
        self.features = torch.empty(num_slots, 0, dtype=exact, device=device)
        """[num_slots, F]: what is kept of the token in each slot beside keys and values."""
        self.taps: tuple[int, ...] = ()
        """Boundaries of a model whose residuals its forwards store as features, side by side: b is what enters layer b,
        and N, the number of layers, is what leaves the final norm."""

    def keep_features(self, size: int, taps: tuple[int, ...] = ()) -> None:
        """Keeps `size` numbers of every slot from now on; with taps every forward writes them."""
        self.features = self.features.new_empty(self.features.shape[0], size)
        self.taps = taps

    def columns(self, taps: Sequence[int]) -> NDArray[np.int64]:
        """Columns of the features that these taps have, side by side in this order."""
        size = self.features.shape[1] // len(self.taps)
        places = [self.taps.index(tap) * size for tap in taps]
        return np.concatenate([np.arange(place, place + size) for place in places])

    def store_tap(self, boundary: int, slots: Tensor, rows: Tensor) -> None:
        """Stores rows [R, H] of a boundary at slots [R], wherever it is among the taps."""
        size = rows.shape[1]
        for place, tap in enumerate(self.taps):
            if tap == boundary:
                self.features[:, place * size : (place + 1) * size].index_copy_(0, slots, rows.to(self.features.dtype))

    def load_tap(self, boundary: int, slots: Tensor) -> Tensor:
        """Rows [R, H] float32 of a boundary at slots [R]; raises ValueError for one that is no tap."""
        if boundary not in self.taps:
            raise ValueError(f"nothing is tapped at boundary {boundary}")
        size = self.features.shape[1] // len(self.taps)
        place = self.taps.index(boundary) * size
        return self.features[:, place : place + size].index_select(0, slots).float()

    def copy(self, source_slots: Slots, destination_slots: Slots) -> None:
        """Copies slots to slots in every layer; the two lists may overlap, since all is read before it is written."""
        device = self.features.device
        source, destination = send(source_slots, device), send(destination_slots, device)
        for tensor in (*self.keys, *self.values, *((self.features,) if self.features.shape[1] else ())):
            tensor.index_copy_(0, destination, tensor.index_select(0, source))

    def gather(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Copies of keys and values [num_layers, len(slots), G, D]."""
        index = send(slots, self.features.device)
        keys = torch.stack([tensor.index_select(0, index) for tensor in self.keys])
        return keys, torch.stack([tensor.index_select(0, index) for tensor in self.values])


class BlockTable:
    """The blocks of one session, in position order."""

    def __init__(self, pool: BlockPool, cache: KVCache) -> None:
        self.pool = pool
        self.cache = cache
        self._blocks: list[int] = []
        # Of the leading blocks, those that are published, each after the one before.
        self._num_published = 0
        # Kept as an array that only grows at its end, so that a forward never walks a long prefix in Python.
        self._slots: Slots = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def capacity(self) -> int:
        return len(self._blocks) * self.pool.block_size

    @property
    def next_publishable(self) -> int:
        """Length from which on there is a full block that has not been published."""
        return (self._num_published + 1) * self.pool.block_size

    @property
    def shared_blocks(self) -> tuple[int, ...]:
        """Blocks that other tables hold as well. They lead, because who shares a block shares those before it."""
        return tuple(takewhile(self.pool.is_shared, self._blocks))

    def reserve(self, length: int, written_from: int = 0) -> None:
        """Gives every position below length a slot, those from written_from on in blocks that no other table can read.

        Raises CacheFull, and then nothing has changed.
        """
        size = self.pool.block_size
        if length <= self.capacity and all(
            map(self.pool.is_writable, self._blocks[written_from // size : -(-length // size)])
        ):
            return
        written = range(written_from // size, min(-(-length // size), len(self._blocks)))
        shared = [index for index in written if self.pool.is_shared(self._blocks[index])]
        num_new = max(-(-length // size) - len(self._blocks), 0)
        self.pool.require(len(shared) + num_new)
        for index in shared:
            self._unshare(index)
        for _ in range(num_new):
            self._append(self.pool.allocate())
        # From the end, because the blocks after a block lose their names before it does.
        for index in reversed(written):
            if self._blocks[index] not in self.pool.prefixes:
                continue
            if self.pool.num_free:
                self._unshare(index)
            else:
                # A session that fills the pool on its own must not need one block more than it has tokens for.
                self.pool.prefixes.withdraw(self._blocks[index])
                self._num_published = min(self._num_published, index)

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
        """A table that shares the blocks of the first `length` positions; the first to write makes its own copy."""
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
                # A fork reads it too, and might go on without the block that it would come after.
                return
            block = self.pool.prefixes.publish(own, salt, self._parent(index), tokens)
            if block is None:
                return
            if block != own:
                self.pool.retain(block)
                self._replace(index, block)
            self._num_published = index + 1

    def take(self, salt: bytes, token_ids: Sequence[int], start: int) -> int:
        """Takes the published blocks that hold token_ids after position start, all but the last token at most.

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

    def coming(self, token_ids: Sequence[int], start: int, count: int) -> tuple[int, tuple[int, ...]] | None:
        """The next `count` tokens from the block of `start` on, and the published block that they come after.

        Tables of one salt for which it is equal are about to hold the same. None where that block is not published.
        """
        full = start // self.pool.block_size
        if self._num_published < full:
            return None
        first = full * self.pool.block_size
        return self._parent(full), tuple(token_ids[first : first + count])

    def _parent(self, index: int) -> int:
        return self._blocks[index - 1] if index else ROOT

    def _append(self, block: int) -> None:
        index, size = len(self._blocks), self.pool.block_size
        if (index + 1) * size > len(self._slots):
            grown = np.empty(max(2 * len(self._slots), 8 * size), dtype=np.int64)
            grown[: len(self._slots)] = self._slots
            self._slots = grown
        self._blocks.append(block)
        self._slots[index * size : (index + 1) * size] = self._block_slots(block)

    def _unshare(self, index: int) -> None:
        """Puts a copy in the place of a block that others read."""
        own = self.pool.allocate()
        self.cache.copy(self._block_slots(self._blocks[index]), self._block_slots(own))
        self._replace(index, own)
        self._num_published = min(self._num_published, index)

    def _replace(self, index: int, block: int) -> None:
        """Puts a block that has been retained in the place of another, which is released."""
        size = self.pool.block_size
        self.pool.release(self._blocks[index])
        self._blocks[index] = block
        self._slots[index * size : (index + 1) * size] = self._block_slots(block)

    def _block_slots(self, block: int) -> Slots:
        size = self.pool.block_size
        return np.arange(block * size, (block + 1) * size, dtype=np.int64)
