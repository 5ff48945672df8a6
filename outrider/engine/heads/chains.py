"""Heads that need no attention of their own: MLP speculators, Medusa, BPD and Hydra; f is what leaves the final norm.

MLP speculator (Wertheimer et al., 2024, arXiv 2404.19124), a recurrent cell for each depth; n cells of inner size m:

    s' = gelu(norm_i(projection_i s + (e / w) embedding_i(token)) + bias_i);  logits = head_i s'
    w = 0.5^(0.5 / n);  e = sqrt((1 - w^2) m / 2);  the gelu with erf; after a committed token s is f

Blocks (Stern et al., 2018, arXiv 1811.03115; Cai et al., 2024, 2401.10774; Ankner et al., 2024, 2402.05109): of each
depth some residual blocks and a matrix, which read f, or, grounded, f and the embeddings of all tokens since:

    Medusa, Hydra:  y = y + silu(W y + b), the first of a grounded head  y = V y + c + silu(W y + b)
    BPD:            y = y + W' relu(W y + b) + b'

Hydra++ first sends f through one Llama layer over all positions, with keys and values of its own, and a norm.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from outrider.engine.devices import send
from outrider.engine.heads.head import HeadFacts, HeadRows, TargetParts, over_target_ids
from outrider.engine.models.rope import Rope, rotary_tables
from outrider.engine.models.transformer import Layer, Linear
from outrider.engine.ops import Ops, Weight

CELL_EPSILON = 1e-6


def by_depth(compute: Callable[..., Tensor], depths: Sequence[int], *columns: Tensor) -> Tensor:
    """Results of `compute` for each depth and its rows of the columns, in the order of the rows."""
    if len(set(depths)) <= 1:
        return compute(depths[0] if depths else 0, *columns)
    order, device = sorted(range(len(depths)), key=depths.__getitem__), columns[0].device
    parts = []
    for depth, rows in groupby(order, key=depths.__getitem__):
        index = send(np.array(list(rows), dtype=np.int64), device)
        parts.append(compute(depth, *(column.index_select(0, index) for column in columns)))
    return torch.cat(parts).index_select(0, send(np.argsort(order), device))


@dataclass(frozen=True, slots=True)
class Cell:
    """Weights of one depth of an MLP speculator; tied ones share tensors."""

    embedding: Tensor
    projection: Weight
    norm: Tensor
    bias: Tensor
    head: Weight


class MlpSpeculator:
    """States are f and zeros, or s' and zeros: as wide as the wider of the two."""

    def __init__(self, cells: Sequence[Cell], scales_input: bool, target: TargetParts, ops: Ops) -> None:
        """scales_input: whether f is normed, without a weight, and divided by the root of 2."""
        self._cells, self._ops = cells, ops
        inner_size, hidden_size = cells[0].projection.shape
        kept = 0.5 ** (0.5 / len(cells))
        self._share = ((1 - kept**2) * inner_size / 2) ** 0.5 / kept
        self._input_norm = cells[0].norm.new_full((hidden_size,), 0.5**0.5) if scales_input else None
        self.facts = _facts("mlp_speculator", target.num_layers, max(hidden_size, inner_size), len(cells), target)

    @property
    def weights(self) -> Sequence[Weight]:
        each = [
            tensor
            for cell in self._cells
            for tensor in (cell.embedding, cell.projection, cell.norm, cell.bias, cell.head)
        ]
        return _unique(each)

    def states_of(self, features: Tensor) -> Tensor:
        if self._input_norm is not None:
            features = self._ops.rms_norm(features, self._input_norm, CELL_EPSILON)
        return _padded(features, self.facts.state_size)

    def step(self, rows: HeadRows) -> tuple[Tensor, Tensor]:
        states = by_depth(self._advance, rows.depths, rows.plan.token_ids, rows.states)
        return states, states

    def logits(self, outputs: Tensor, depths: Sequence[int]) -> Tensor:
        size = self._cells[0].projection.shape[0]
        return by_depth(
            lambda depth, own: self._ops.linear(own, self._cells[depth].head),
            depths,
            outputs[:, :size].contiguous(),
        )

    def _advance(self, depth: int, token_ids: Tensor, states: Tensor) -> Tensor:
        cell = self._cells[depth]
        projected = self._ops.linear(states[:, : cell.projection.shape[1]].contiguous(), cell.projection)
        # Two operations: one that multiplies and adds rounds once or twice, by an element's place.
        weighted = cell.embedding.index_select(0, token_ids).float() * self._share
        x = self._ops.rms_norm(projected + weighted, cell.norm, CELL_EPSILON) + cell.bias
        # A row at a time, because single elements have another erf than vectors of them.
        return _padded(torch.cat([functional.gelu(row) for row in x.chunk(max(len(x), 1))]), self.facts.state_size)


@dataclass(frozen=True, slots=True)
class SiluBlock:
    """Medusa's and Hydra's; with a shortcut, `linear` is W above V."""

    linear: Linear
    has_shortcut: bool = False

    @property
    def weights(self) -> list[Weight]:
        return self.linear.weights

    def apply(self, y: Tensor, ops: Ops) -> Tensor:
        gate = ops.linear(y, self.linear.weight, self.linear.bias)
        if self.has_shortcut:
            gate, y = gate.chunk(2, 1)
        # The operations' silu, whose bits do not depend on an element's place; torch's do.
        return y + ops.gate_multiply(torch.cat((gate, torch.ones_like(gate)), 1))


@dataclass(frozen=True, slots=True)
class ReluBlock:
    """A block of BPD: x + W' relu(W x + b) + b'."""

    up: Linear
    down: Linear

    @property
    def weights(self) -> list[Weight]:
        return [*self.up.weights, *self.down.weights]

    def apply(self, y: Tensor, ops: Ops) -> Tensor:
        inner = ops.linear(y, self.up.weight, self.up.bias).relu()
        return y + ops.linear(inner, self.down.weight, self.down.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixConfig:
    """Sizes of Hydra++'s layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope: Rope
    context_len: int


class PrefixLayer:
    """A Llama layer and a norm, which Hydra++ runs on f."""

    def __init__(self, law: PrefixConfig, tensors: dict[str, Tensor], prefix: str, ops: Ops) -> None:
        """Takes the tensors that begin with the prefix as those of a Llama model of one layer."""
        self.law, self._ops = law, ops
        self._layer = Layer.take(ops, tensors, f"{prefix}layers.0.")
        self._norm = tensors.pop(f"{prefix}norm.weight")
        self._cos, self._sin = rotary_tables(law.rope, law.head_dim, law.context_len, self._norm.device)

    @property
    def weights(self) -> list[Weight]:
        return [*self._layer.weights, self._norm]

    def forward(self, x: Tensor, rows: HeadRows) -> Tensor:
        """States [R, H] that the layer makes of f of the plan's rows."""
        law, ops, layer, cache = self.law, self._ops, self._layer, rows.cache
        normed = ops.rms_norm(x, layer.input_norm, law.norm_epsilon)
        heads = ops.linear(normed, layer.qkv.weight).view(x.shape[0], -1, law.head_dim)
        query, key, value = heads.split_with_sizes((law.num_heads, law.num_kv_heads, law.num_kv_heads), 1)
        keys, values = cache.keys[0], cache.values[0]
        query = ops.rotate_and_store(query, key, value, rows.plan, self._cos, self._sin, keys, values)
        x = x + ops.linear(ops.attention(query, rows.plan, keys, values, law.head_dim**-0.5), layer.output.weight)
        gate_up, down = layer.mlp
        gated = ops.gate_multiply(ops.linear(ops.rms_norm(x, layer.post_norm, law.norm_epsilon), gate_up.weight))
        x = x + ops.linear(gated, down.weight)
        return ops.rms_norm(x, self._norm, law.norm_epsilon)


@dataclass(frozen=True, slots=True)
class Branch:
    """Weights that guess at one depth; branches may share an output, and without one the target's matrix is it."""

    blocks: Sequence[SiluBlock | ReluBlock]
    output: Linear | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockParts:
    """Parts of a head of blocks."""

    method: str
    tap: int
    """Boundary of the target's layers that f comes from."""
    branches: Sequence[Branch]
    embedding: Weight | None = None
    """[V, H], which may be the target's, of a grounded head."""
    prefix: PrefixLayer | None = None
    target_ids: Tensor | None = None
    """[T] int64, the tokens that the rows of the outputs are about; None for all."""


class BlockHeads:
    """Medusa, BPD, Hydra and Hydra++; a state is f, and after it, grounded, the embeddings of the tokens since."""

    def __init__(self, parts: BlockParts, target: TargetParts, ops: Ops) -> None:
        self._parts, self._target, self._ops = parts, target, ops
        self._size = target.hidden_size
        num_embeddings = 0 if parts.embedding is None else len(parts.branches)
        facts = _facts(parts.method, parts.tap, (1 + num_embeddings) * self._size, len(parts.branches), target)
        if parts.prefix is not None:
            law = parts.prefix.law
            facts = replace(
                facts,
                num_kv_layers=1,
                num_kv_heads=law.num_kv_heads,
                head_dim=law.head_dim,
                context_len=min(law.context_len, target.context_len),
            )
        self.facts = facts

    @property
    def weights(self) -> Sequence[Weight]:
        parts = self._parts
        each = [tensor for branch in parts.branches for block in branch.blocks for tensor in block.weights]
        each += [tensor for branch in parts.branches if branch.output is not None for tensor in branch.output.weights]
        each += [] if parts.prefix is None else parts.prefix.weights
        each += [] if parts.embedding is None or parts.embedding is self._target.embedding else [parts.embedding]
        return _unique(each)

    def states_of(self, features: Tensor) -> Tensor:
        return _padded(features, self.facts.state_size)

    def step(self, rows: HeadRows) -> tuple[Tensor, Tensor]:
        parts, states = self._parts, rows.states
        if parts.prefix is not None and (own := [row for row, depth in enumerate(rows.depths) if depth == 0]):
            # The target's own f go through the layer.
            index = send(np.array(own, dtype=np.int64), states.device)
            chosen = rows._replace(plan=rows.plan.select(index))
            made = parts.prefix.forward(states[:, : self._size].index_select(0, index), chosen)
            states = states.index_copy(0, index, _padded(made, self.facts.state_size))
        if parts.embedding is not None:
            embedded = self._ops.embed(parts.embedding, rows.plan.token_ids)
            states = by_depth(self._append, rows.depths, states, embedded)
        return states, states

    def logits(self, outputs: Tensor, depths: Sequence[int]) -> Tensor:
        own = by_depth(self._guess, depths, outputs)
        return over_target_ids(own, self._parts.target_ids, self._target.vocab_size)

    def _append(self, depth: int, states: Tensor, embedded: Tensor) -> Tensor:
        return _padded(torch.cat((states[:, : (1 + depth) * self._size], embedded), 1), self.facts.state_size)

    def _guess(self, depth: int, states: Tensor) -> Tensor:
        branch = self._parts.branches[depth]
        y = states[:, : (1 if self._parts.embedding is None else 2 + depth) * self._size].contiguous()
        for block in branch.blocks:
            y = block.apply(y, self._ops)
        output = Linear(self._target.output, None) if branch.output is None else branch.output
        return self._ops.linear(y, output.weight, output.bias)


def _facts(method: str, tap: int, state_size: int, max_draft_count: int, target: TargetParts) -> HeadFacts:
    return HeadFacts(
        method=method,
        taps=(tap,),
        state_size=state_size,
        num_kv_layers=0,
        num_kv_heads=0,
        head_dim=0,
        context_len=target.context_len,
        max_draft_count=max_draft_count,
    )


def _padded(rows: Tensor, width: int) -> Tensor:
    """rows [R, N] with zeros to their right, [R, width]."""
    return functional.pad(rows, (0, width - rows.shape[1])) if rows.shape[1] < width else rows


def _unique(tensors: Sequence[Weight]) -> list[Weight]:
    return list({id(tensor): tensor for tensor in tensors}.values())
