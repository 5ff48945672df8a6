"""Memory for weights, in huge pages where the system has them. Cuts pieces off and never takes one back.

A forward reads every weight once, in the order in which they were placed; with pages of 4 KiB looking up their
addresses costs a tenth of that time.
"""

import contextlib
import mmap
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
# Address space only: memory is taken when it is written to.
CHUNK_BYTES = 256 << 20
CACHE_LINE_BYTES = 64


class Arena:
    """Hands out tensors side by side; the memory lives as long as any of them."""

    def __init__(self) -> None:
        self._chunk = memoryview(b"")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor whose values are zero or anything else, at the beginning of a cache line."""
        num_bytes = prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.empty(*shape, dtype=dtype)
        if num_bytes > len(self._chunk):
            size = max(num_bytes, CHUNK_BYTES)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                # It begins with a huge page. Private: the kernel gives shared memory other pages.
                memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                with contextlib.suppress(OSError):
                    # A kernel without huge pages refuses, and ordinary ones do as well.
                    memory.madvise(mmap.MADV_HUGEPAGE)
                address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
                self._chunk = memoryview(memory)[-address % HUGE_PAGE_BYTES :]
            else:
                self._chunk = memoryview(mmap.mmap(-1, size))
        tensor = torch.frombuffer(self._chunk[:num_bytes], dtype=dtype).view(*shape)
        self._chunk = self._chunk[-(-num_bytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES :]
        return tensor
