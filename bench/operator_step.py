"""The second floor: one decoder step of a model's shape, written by hand in PyTorch's own operators.

Not the engine and not exact: weights are constants, the cache is one contiguous tensor, rows are not bitwise
independent of their number. It tells what an engine would cost that does nothing but call the operators.
"""

import time

import torch
from torch import Tensor
from torch.nn import functional

from bench.floors import past_caches
from outrider.engine.models.config import ModelConfig

CONTEXT_LEN = 128


class OperatorStep:
    """Weights and cache of one shape in one type; `ms` runs a forward over some rows behind a context."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, num_threads: int, max_rows: int) -> None:
        self._config, self._dtype, self._num_threads = config, dtype, num_threads
        width, heads, groups = config.hidden_size, config.num_heads, config.num_kv_heads
        shapes = {
            "qkv": ((heads + 2 * groups) * config.head_dim, width),
            "output": (width, heads * config.head_dim),
            "gate_up": (2 * config.intermediate_size, width),
            "down": (width, config.intermediate_size),
        }
        # Values do not change the time, but layers must have memory of their own, at least as much as no cache holds.
        layer_bytes = sum(rows * columns for rows, columns in shapes.values()) * dtype.itemsize
        num_own = min(config.num_layers, 1 + past_caches() // layer_bytes)
        own = [{name: self._weight(*shape) for name, shape in shapes.items()} for _ in range(num_own)]
        self._layers = [own[index % num_own] for index in range(config.num_layers)]
        self._head, self._norm = self._weight(config.vocab_size, width), torch.ones(width, dtype=dtype)
        self._cache = torch.zeros(config.num_layers, 2, groups, CONTEXT_LEN + max_rows, config.head_dim, dtype=dtype)

    def ms(self, rows: int) -> float:
        """Milliseconds of a second forward over `rows` new tokens behind the context, logits of every row included."""
        torch.set_num_threads(self._num_threads)
        token_ids = torch.arange(rows) % self._config.vocab_size
        turn = torch.ones(2, rows, 1, self._config.head_dim, dtype=self._dtype)
        mask = torch.ones(rows, CONTEXT_LEN + rows, dtype=torch.bool).tril(CONTEXT_LEN) if rows > 1 else None
        # As with the engine's steps, the first forward brings the weights back into caches that hold something else.
        self._forward(token_ids, turn, mask)
        started_ns = time.perf_counter_ns()
        self._forward(token_ids, turn, mask)
        return (time.perf_counter_ns() - started_ns) / 1e6

    def _weight(self, *shape: int) -> Tensor:
        return torch.full(shape, 0.01, dtype=self._dtype)

    def _forward(self, token_ids: Tensor, turn: Tensor, mask: Tensor | None) -> Tensor:
        x = functional.embedding(token_ids, self._head)
        for layer, cache in zip(self._layers, self._cache, strict=True):
            x = x + self._attend(layer, self._normed(x), cache, turn, mask)
            gate, up = functional.linear(self._normed(x), layer["gate_up"]).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, layer["down"])
        return functional.linear(self._normed(x), self._head)

    def _attend(self, layer: dict[str, Tensor], x: Tensor, cache: Tensor, turn: Tensor, mask: Tensor | None) -> Tensor:
        config, rows = self._config, x.shape[0]
        heads = functional.linear(x, layer["qkv"]).view(rows, -1, config.head_dim)
        num_turned = config.num_heads + config.num_kv_heads
        turned = _rotated(heads[:, :num_turned], turn)
        window = cache[:, :, : CONTEXT_LEN + rows]
        window[0, :, CONTEXT_LEN:] = turned[:, config.num_heads :].transpose(0, 1)
        window[1, :, CONTEXT_LEN:] = heads[:, num_turned:].transpose(0, 1)
        query = turned[:, : config.num_heads].transpose(0, 1).unsqueeze(0)
        keys, values = window.unsqueeze(1)
        mixed = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        return functional.linear(mixed[0].transpose(0, 1).reshape(rows, -1), layer["output"])

    def _normed(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self._norm.shape, self._norm, 1e-5)


def _rotated(heads: Tensor, turn: Tensor) -> Tensor:
    """Rotary embedding of halves (Su et al., 2021); turn holds cosines and sines."""
    first, second = heads.chunk(2, dim=-1)
    return heads * turn[0] + torch.cat((second.neg(), first), dim=-1) * turn[1]
