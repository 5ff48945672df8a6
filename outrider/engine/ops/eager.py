"""The operations in plain torch, batched, on any device. Not row-invariant: libraries pick kernels by size.

On CUDA products run in the type of the weights; on the CPU weights are widened to float32, as the compiled kernels do.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from outrider.engine.batching import RowPlan
from outrider.engine.noise import gumbel
from outrider.engine.ops.blocks import BlockMatrix, StackedMatrix, Weight, block_product, parts_of, quantise, unpacked
from outrider.engine.ops.experts import Experts, routed
from outrider.engine.ops.faults import marked, refuse
from outrider.engine.ops.temperature import apply_temperature, argmax_mask

# Elements of one temporary: 64 MiB of float32, so that long lists and wide vocabularies are worked through in pieces.
TEMPORARY_ELEMENTS = 1 << 24


class EagerOps:
    """Operations in torch; see outrider.engine.ops.Ops."""

    name = "eager"

    def __init__(self, packed_bits: int | None = None) -> None:
        self._packed_bits = packed_bits

    def stack(self, weights: Sequence[Weight]) -> Weight:
        weights = [self.quantised(weight) for weight in weights]
        tensors = [weight for weight in weights if isinstance(weight, Tensor)]
        if len(weights) == 1:
            return weights[0]
        if len(tensors) == len(weights):
            return torch.cat(tensors)
        # Addresses are for kernels.
        parts = [part for weight in weights for part in parts_of(weight)]
        return StackedMatrix(tuple(parts), torch.empty(0, dtype=torch.int64))

    def quantised(self, weight: Weight) -> Weight:
        if self._packed_bits is None or not isinstance(weight, Tensor):
            return weight
        return quantise([weight], self._packed_bits)

    def embed(self, weight: Weight, token_ids: Tensor) -> Tensor:
        return unpacked(weight).index_select(0, token_ids).float()

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, StackedMatrix):
            summed = torch.cat([self.linear(x, part) for part in weight.parts], 1)
            return summed if bias is None else summed + bias
        if isinstance(weight, BlockMatrix):
            summed = block_product(x, weight)
            return summed if bias is None else summed + bias
        if weight.device.type == "cpu":
            return functional.linear(x, weight.float(), bias)
        product = functional.linear(x.to(weight.dtype), weight).float()
        return product if bias is None else product + bias

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight

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
        row_cos, row_sin = cos[plan.positions].unsqueeze(1), sin[plan.positions].unsqueeze(1)
        key_cache.index_copy_(0, plan.slots, _rotate(key, row_cos, row_sin).to(key_cache.dtype))
        value_cache.index_copy_(0, plan.slots, value.to(value_cache.dtype))
        return _rotate(query, row_cos, row_sin)

    def attention(
        self,
        query: Tensor,
        plan: RowPlan,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Lists are padded to the longest, a few rows at a time to bound memory."""
        num_rows, num_heads, head_dim = query.shape
        num_groups = key_cache.shape[1]
        output = query.new_empty(num_rows, num_heads * head_dim, dtype=torch.float32)
        steps = torch.arange(plan.max_key_count, device=query.device)
        for rows in _pieces(num_rows, plan.max_key_count * num_groups * head_dim):
            hidden = steps >= plan.key_counts[rows, None]
            # Padding reads the list's own first slot: a valid address, whose weight is then exactly zero.
            places = plan.key_starts[rows, None] + steps.masked_fill(hidden, 0)
            slots = plan.key_slots[places].long()
            grouped = query[rows].float().view(-1, num_groups, num_heads // num_groups, head_dim)
            scores = torch.einsum("rghd,rlgd->rghl", grouped, key_cache[slots].float()) * scale
            scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
            if sinks is not None:
                column = sinks.view(1, num_groups, -1, 1).expand(scores.shape[0], -1, -1, -1)
                scores = torch.cat((scores, column), dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., : plan.max_key_count]
            output[rows] = torch.einsum("rghl,rlgd->rghd", weights, value_cache[slots].float()).flatten(1)
        return output

    def gate_multiply(self, gate_up: Tensor, *, is_gelu: bool = False) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (functional.gelu(gate, approximate="tanh") if is_gelu else functional.silu(gate)) * up

    def experts(self, x: Tensor, experts: Experts) -> Tensor:
        return routed(self, x, experts)

    def clamped_multiply(self, gate_up: Tensor, slope: float, limit: float) -> Tensor:
        gate, up = gate_up.clamp(max=limit).chunk(2, dim=-1)
        return gate * torch.sigmoid(gate * slope) * (up.clamp(min=-limit) + 1)

    def softmax(self, scores: Tensor) -> Tensor:
        _check_scores(scores)
        return torch.softmax(scores.double(), dim=-1)

    def draw(self, scores: Tensor, keys: Tensor) -> Tensor:
        _check_scores(scores)
        ids = torch.empty_like(keys)
        for rows in _pieces(scores.shape[0], scores.shape[1]):
            noise = gumbel(keys[rows], scores.shape[1])
            # The first of equal maxima.
            ids[rows] = torch.argmax(scores[rows].double() + noise, dim=-1)
        return ids if ids.is_cpu else marked(ids, scores)

    def rank(self, scores: Tensor, scales: Tensor, count: int, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        _check_scores(scores)
        ids, shares = (
            torch.full((scores.shape[0], count), -1, device=scores.device),
            torch.zeros(scores.shape[0], count, device=scores.device).double(),
        )
        for rows in _pieces(scores.shape[0], scores.shape[1]):
            sums = scores[rows].double()
            if keys is not None:
                sums = sums + gumbel(keys[rows], scores.shape[1])
            # Stable, because a selection takes any of equal ones.
            best = sums.sort(dim=-1, descending=True, stable=True)
            found = torch.softmax(sums / scales[rows, None], dim=-1).gather(1, best.indices[:, :count])
            width = found.shape[1]
            ids[rows, :width] = best.indices[:, :count].masked_fill(best.values[:, :count] == -torch.inf, -1)
            shares[rows, :width] = found
        if not ids.is_cpu:
            ids[:, 0] = marked(ids[:, 0], scores)
        return ids, shares

    def choose(self, logits: Tensor, temperatures: Tensor, keys: Tensor, num_tokens: int) -> Tensor:
        scores, column = logits[:, :num_tokens], temperatures[:, None]
        # Every row is computed all three ways, because asking which it needs would wait for the device.
        tempered = torch.where(column == 1, scores, apply_temperature(scores, column.float()))
        return self.draw(torch.where(column == 0, argmax_mask(scores), tempered), keys)

    def mask(self, logits: Tensor, bits: Tensor) -> Tensor:
        lanes = torch.arange(32, device=bits.device)
        allowed = (bits[:, :, None] >> lanes & 1).flatten(1)[:, : logits.shape[1]].bool()
        allowed = functional.pad(allowed, (0, logits.shape[1] - allowed.shape[1]))
        return logits.masked_fill(~allowed, -torch.inf)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, still = heads.split_with_sizes((half, half, heads.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, still), dim=-1)


def _pieces(num_rows: int, elements_per_row: int) -> Iterator[slice]:
    step = max(1, TEMPORARY_ELEMENTS // max(1, elements_per_row))
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _check_scores(scores: Tensor) -> None:
    # One comparison finds both faults: the greatest score of a sound row is finite (amax carries NaN along).
    if scores.is_cpu and not bool(torch.isfinite(scores.amax(dim=-1)).all()):
        raise refuse()
