"""The blocks of a cache: who holds how many of them, and which are free.

A block is free, held by one or more tables, or published and held by nobody: then it keeps what was computed, for
whoever asks for the same tokens, until a block is needed and no other is free.
"""

from outrider.engine.cache.prefix_index import PrefixIndex
from outrider.errors import CacheFull

BLOCK_SIZE = 16


class BlockPool:
    """Counts who holds each block. Slot s is place s % block_size of block s // block_size."""

    def __init__(self, num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Taken from the end: the block freed last is the one most likely still in a processor's cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks
        self.prefixes = PrefixIndex()
        """The published blocks. Those that nobody holds are as good as free, and are taken last."""

    def __repr__(self) -> str:
        return f"<BlockPool {self.num_used} of {self.num_blocks} blocks of {self.block_size} slots used>"

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, and that whoever needs them gets."""
        return len(self._free) + self.prefixes.num_unheld

    @property
    def num_cached(self) -> int:
        """Of the free blocks those that still hold what was published in them."""
        return self.prefixes.num_unheld

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
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
        """Whether more than one holder reads the block, so that nobody may write to it."""
        return self._holders[block] > 1

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
