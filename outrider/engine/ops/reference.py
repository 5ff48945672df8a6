"""The CPU operations without compiled kernels: the eager ones, a row at a time. Not fast; row-invariant so.

Each row is copied before it is computed, because libraries may also choose their order of additions by the address.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.engine.ops.eager import EagerOps
from outrider.engine.plan import RowPlan


class ReferenceOps:
    """Operations in torch, row by row; see outrider.engine.ops.Ops for shapes."""

    name = "reference"

    def __init__(self) -> None:
        self._eager = EagerOps()

    def stack(self, weights: Sequence[Tensor]) -> Tensor:
        """weights [N, K] -> [sum of N, K]."""
        return self._eager.stack(weights)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [R, K], weight [N, K] -> [R, N] float32."""
        widened = weight.float()
        output = x.new_empty(x.shape[0], weight.shape[0])
        for row in range(x.shape[0]):
            output[row] = self._eager.linear(_copy(x, row), widened, bias)[0]
        return output

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """x [R, D], weight [D] -> [R, D]."""
        output = torch.empty_like(x)
        for row in range(x.shape[0]):
            output[row] = self._eager.rms_norm(_copy(x, row), weight, epsilon)[0]
        return output

    def rotate_and_store(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: RowPlan,
        cos: Tensor,
        sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> Tensor:
        """Stores the rotated key and the value, returns the rotated query [R, H, D]."""
        output = query.new_empty(query.shape)
        for row in range(query.shape[0]):
            heads = _copy(query, row), _copy(key, row), _copy(value, row)
            one = _one_row(plan, row)
            output[row] = self._eager.rotate_and_store(*heads, one, cos, sin, key_cache, value_cache)[0]
        return output

    def attention(self, query: Tensor, plan: RowPlan, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        """query [R, H, D] -> [R, H*D]."""
        output = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        for row in range(query.shape[0]):
            one = _one_row(plan, row)
            output[row] = self._eager.attention(_copy(query, row), one, key_cache, value_cache, scale)[0]
        return output

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        """gate_up [R, 2M] -> [R, M]."""
        output = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        for row in range(gate_up.shape[0]):
            output[row] = self._eager.silu_multiply(_copy(gate_up, row))[0]
        return output

    def softmax(self, scores: Tensor) -> Tensor:
        """scores [R, V] -> float64 [R, V]."""
        output = scores.new_empty(scores.shape, dtype=torch.float64)
        for row in range(scores.shape[0]):
            output[row] = self._eager.softmax(_copy(scores, row))[0]
        return output

    def draw(self, scores: Tensor, keys: Tensor) -> Tensor:
        """scores [R, V], keys [R] -> ids [R]."""
        output = torch.empty_like(keys)
        for row in range(scores.shape[0]):
            output[row] = self._eager.draw(_copy(scores, row), keys[row : row + 1])[0]
        return output

    def choose(self, logits: Tensor, temperatures: Tensor, keys: Tensor, num_tokens: int) -> Tensor:
        """logits [R, V], temperatures [R], keys [R] -> ids [R]."""
        output = torch.empty_like(keys)
        for row in range(logits.shape[0]):
            one = slice(row, row + 1)
            output[row] = self._eager.choose(_copy(logits, row), temperatures[one], keys[one], num_tokens)[0]
        return output


def _copy(rows: Tensor, row: int) -> Tensor:
    return rows[row : row + 1].clone(memory_format=torch.contiguous_format)


def _one_row(plan: RowPlan, row: int) -> RowPlan:
    one = slice(row, row + 1)
    return replace(
        plan,
        token_ids=plan.token_ids[one],
        positions=plan.positions[one],
        slots=plan.slots[one],
        key_starts=plan.key_starts[one],
        key_counts=plan.key_counts[one],
        max_key_count=int(plan.key_counts[row]),
    )
