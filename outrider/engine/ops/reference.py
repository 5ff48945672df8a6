"""The CPU operations without compiled kernels: the eager ones, a row at a time. Not fast; row-invariant so.

Each row is copied before it is computed, because libraries may also choose their order of additions by the address.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from outrider.engine.batching import RowPlan
from outrider.engine.ops.blocks import Weight
from outrider.engine.ops.eager import EagerOps
from outrider.engine.ops.experts import Experts


class ReferenceOps(EagerOps):
    """Operations in torch, row by row; see outrider.engine.ops.Ops."""

    name = "reference"

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        linear, widened = super().linear, weight.float() if isinstance(weight, Tensor) else weight
        return _by_row(lambda row: linear(row, widened, bias), x)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rms_norm = super().rms_norm
        return _by_row(lambda row: rms_norm(row, weight, epsilon), x)

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
        plans, rotate = _rows_of(plan), super().rotate_and_store
        tables = cos, sin, key_cache, value_cache
        return _by_row(lambda one, k, v: rotate(one, k, v, next(plans), *tables), query, key, value)

    def attention(
        self,
        query: Tensor,
        plan: RowPlan,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        plans, attention = _rows_of(plan), super().attention
        return _by_row(lambda row: attention(row, next(plans), key_cache, value_cache, scale, sinks), query)

    def gate_multiply(self, gate_up: Tensor, *, is_gelu: bool = False) -> Tensor:
        return _by_row(partial(super().gate_multiply, is_gelu=is_gelu), gate_up)

    def experts(self, x: Tensor, experts: Experts) -> Tensor:
        compute = super().experts
        return _by_row(lambda row: compute(row, experts), x)

    def clamped_multiply(self, gate_up: Tensor, slope: float, limit: float) -> Tensor:
        clamped_multiply = super().clamped_multiply
        return _by_row(lambda row: clamped_multiply(row, slope, limit), gate_up)

    def softmax(self, scores: Tensor) -> Tensor:
        return _by_row(super().softmax, scores)

    def draw(self, scores: Tensor, keys: Tensor) -> Tensor:
        return _by_row(super().draw, scores, keys)

    def choose(self, logits: Tensor, temperatures: Tensor, keys: Tensor, num_tokens: int) -> Tensor:
        choose = super().choose
        return _by_row(lambda row, one, key: choose(row, one, key, num_tokens), logits, temperatures, keys)

    def rank(self, scores: Tensor, scales: Tensor, count: int, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        rank = super().rank
        columns = (scores, scales) if keys is None else (scores, scales, keys)
        both = _by_row(lambda row, scale, *key: torch.stack(rank(row, scale, count, *key), dim=-1), *columns)
        return both[..., 0].long(), both[..., 1]


def _by_row(compute: Callable[..., Tensor], *columns: Tensor) -> Tensor:
    """The rows of `compute` of one row each of the columns, copied."""
    copies = (
        [column[row : row + 1].clone(memory_format=torch.contiguous_format) for column in columns]
        for row in range(columns[0].shape[0])
    )
    rows = [compute(*each) for each in copies]
    return torch.cat(rows) if rows else compute(*columns)


def _rows_of(plan: RowPlan) -> Iterator[RowPlan]:
    """Plans of one row each; the plan itself where it has none."""
    for row in range(plan.num_rows):
        one = slice(row, row + 1)
        yield replace(
            plan,
            token_ids=plan.token_ids[one],
            positions=plan.positions[one],
            slots=plan.slots[one],
            key_starts=plan.key_starts[one],
            key_counts=plan.key_counts[one],
            max_key_count=int(plan.key_counts[row]),
        )
    yield plan
