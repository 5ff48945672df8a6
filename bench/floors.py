"""The floor of a decoder step: bytes of weights over the bandwidth that plain reads of as many bytes reach.

Knows no engine: a buffer of the weights' size is read by whatever reads fastest, so that a model that fits a cache is
held against the cache, and a larger one against the memory.
"""

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bench.samples import ReadSample
from outrider.engine.models.config import ModelConfig

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
LEAST_BUFFER, LARGEST_BUFFER = 256 << 20, 1 << 30
# Not one of the bytes of 1.0, so that the search reads everything.
ABSENT_BYTE = 0x55


def step_bytes(config: ModelConfig, item_bytes: int) -> int:
    """Bytes of weights that one step touches: all layers and the product with the vocabulary, norms in float32.

    Of the embedding a step reads one row for a token, which does not count; keys and values come on top.
    """
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = config.hidden_size * (heads + config.num_heads * config.head_dim + 3 * config.intermediate_size)
    matrices = config.num_layers * layer + config.vocab_size * config.hidden_size
    norms = (2 * config.num_layers + 1) * config.hidden_size
    return matrices * item_bytes + norms * 4


def key_value_bytes(config: ModelConfig, context_len: int) -> int:
    """Bytes of keys and values that a step reads at a context, in float32 as the CPU keeps them."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * context_len * 4


def past_caches() -> int:
    """Bytes of a buffer that no cache holds: twice the largest cache, within limits that a small machine bears."""
    sizes = [_cache_bytes(path.read_text().strip()) for path in CACHES.glob("index*/size")]
    return min(max(LEAST_BUFFER, 2 * max(sizes, default=0)), LARGEST_BUFFER)


def _cache_bytes(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text)


class Reading:
    """A buffer and the ways to read all of it with some threads."""

    def __init__(self, name: str, num_bytes: int, num_threads: int) -> None:
        self.name = name
        self._num_threads = num_threads
        self._buffer = torch.ones(max(num_bytes // 4, num_threads), dtype=torch.float32)
        self._threads = ThreadPoolExecutor(num_threads)
        self._search = ctypes.CDLL(None).memchr
        self._search.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        self._search.restype = ctypes.c_void_p

    def measure(self) -> list[ReadSample]:
        """Reads the buffer once in each way, just after the same was done untimed: caches and threads are warm."""
        torch.set_num_threads(self._num_threads)
        ways: dict[str, Callable[[], object]] = {"torch.sum": self._buffer.sum, "memchr": self._search_all}
        return [ReadSample(self.name, way, self._buffer.nbytes, _timed_ms(read)) for way, read in ways.items()]

    def _search_all(self) -> None:
        # The C library's search releases the interpreter's lock, and is as wide as the processor's vectors.
        share = self._buffer.nbytes // self._num_threads
        start = self._buffer.data_ptr()
        parts = [(start + share * thread, ABSENT_BYTE, share) for thread in range(self._num_threads)]
        found = list(self._threads.map(lambda part: self._search(*part), parts))
        if any(found):
            raise ValueError("the byte that must be absent was found")


def _timed_ms(read: Callable[[], object]) -> float:
    read()
    started_ns = time.perf_counter_ns()
    read()
    return (time.perf_counter_ns() - started_ns) / 1e6
