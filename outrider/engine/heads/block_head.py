"""Layers that guess a block of tokens in one pass: DFlash (arXiv 2602.06036), which reads the target's features.

Of a committed token at position j every layer keeps a key and a value, made of what the target knew there:

    g = features_norm(features [taps of j]);  key = rotated(key_norm(K g), j);  value = V g

The block is the last committed token, of which the target knows nothing yet, and masks at the positions after it. Its
rows go through layers like a model's, r = r + attention(input_norm(r)), r = r + mlp(post_norm(r)), and see all that is
kept before them; of the block they see every row, or in a causal layer those up to their own. A mask guesses the token
at its own position. So a guess depends on the committed tokens and its place alone, and nothing that stands on guesses
is ever kept: the rows of a block are written anew by the next one, and its last token's once its features are there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np
import torch
from torch import Tensor

from outrider.engine.batching import RowPlan
from outrider.engine.cache import KVCache, Slots
from outrider.engine.devices import send
from outrider.engine.heads.head import HeadFacts, HeadRows, TargetParts, over_target_ids
from outrider.engine.models.config import Masks, ModelConfig
from outrider.engine.models.rope import rotary_tables
from outrider.engine.models.transformer import Linear
from outrider.engine.ops import Ops, Weight

METHOD = "dflash"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHeadConfig:
    """Sizes and switches of a block drafter."""

    method: str
    taps: tuple[int, ...]
    """Taps of the head; see HeadFacts."""
    layers: ModelConfig
    """Sizes, rotary embedding and windows of its layers."""
    masks: Masks
    causal: tuple[bool, ...]
    """Layers in which a row sees none of the block's rows after its own."""
    context_len: int
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    """Logits end softly at so much, if at all."""

    @property
    def hidden_size(self) -> int:
        return self.layers.hidden_size


@dataclass(frozen=True, slots=True)
class BlockLayer:
    """The tensors of one layer. Keys and values are a product of their own, which committed tokens need alone."""

    input_norm: Tensor
    query: Linear
    key_value: Linear
    query_norm: Tensor
    key_norm: Tensor
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear

    @classmethod
    def take(cls, ops: Ops, tensors: dict[str, Tensor], prefix: str) -> Self:
        linear = partial(Linear.take, ops, tensors)
        return cls(
            tensors.pop(f"{prefix}input_layernorm.weight"),
            linear(f"{prefix}self_attn.", "q_proj"),
            linear(f"{prefix}self_attn.", "k_proj", "v_proj"),
            tensors.pop(f"{prefix}self_attn.q_norm.weight"),
            tensors.pop(f"{prefix}self_attn.k_norm.weight"),
            linear(f"{prefix}self_attn.", "o_proj"),
            tensors.pop(f"{prefix}post_attention_layernorm.weight"),
            linear(f"{prefix}mlp.", "gate_proj", "up_proj"),
            linear(f"{prefix}mlp.", "down_proj"),
        )

    @property
    def weights(self) -> list[Weight]:
        linears = (self.query, self.key_value, self.output, self.gate_up, self.down)
        norms = (self.input_norm, self.query_norm, self.key_norm, self.post_norm)
        return [*norms, *(weight for each in linears for weight in each.weights)]


class BlockHead:
    """Tensors have the names of `block_tensors`; absent matrices are the target's."""

    def __init__(self, law: BlockHeadConfig, tensors: dict[str, Tensor], target: TargetParts, ops: Ops) -> None:
        """Takes the tensors and empties the dictionary."""
        self._law = law
        self._ops = ops
        self._features = ops.stack([tensors.pop("features.weight")])
        self._features_norm, self._norm = tensors.pop("features.norm.weight"), tensors.pop("out_norm.weight")
        self._layers = [BlockLayer.take(ops, tensors, f"layers.{layer}.") for layer in range(law.layers.num_layers)]
        embedding, head = tensors.pop("embedding.weight", None), tensors.pop("head.weight", None)
        own_head = None if head is None else ops.stack([head])
        self._embedding = target.embedding if embedding is None else embedding
        self._head = target.output if own_head is None else own_head
        self._target_ids = tensors.pop("target_ids", None)
        self._vocab_size = target.vocab_size
        if tensors:
            raise ValueError(f"nothing reads {', '.join(sorted(tensors))}")
        parts = (self._features, self._features_norm, self._norm, embedding, own_head)
        own = [weight for layer in self._layers for weight in layer.weights]
        self.weights: Sequence[Weight] = [*(each for each in parts if each is not None), *own]
        sizes = law.layers.head_dim, law.context_len, target.embedding.device
        self._tables = rotary_tables(law.layers.ropes[0], *sizes)
        self.facts = HeadFacts(
            method=law.method,
            taps=law.taps,
            state_size=0,
            num_kv_layers=law.layers.num_layers,
            num_kv_heads=law.layers.num_kv_heads,
            head_dim=law.layers.head_dim,
            context_len=law.context_len,
            max_draft_count=law.masks.most_guesses,
            masks=law.masks,
        )

    def states_of(self, features: Tensor) -> Tensor:
        return self._norm_rows(self._ops.linear(features, self._features), self._features_norm)

    def keep(self, features: Tensor, first: int, slots: Slots, cache: KVCache) -> None:
        """Writes keys and values of the tokens from a position on, of which the target has these features [R, F]."""
        states, device = self.states_of(features), features.device
        positions = send(np.arange(first, first + len(slots), dtype=np.int64), device)
        sent = send(slots, device)
        # Rows that see themselves: nothing is asked of them.
        seen = sent.int(), positions - first, torch.ones_like(sent, dtype=torch.int32), 1
        plan = RowPlan(torch.zeros_like(positions), positions, sent, *seen)
        for place, layer in enumerate(self._layers):
            key, value = self._key_value(layer, states)
            # There are no queries, and what they would become is read by nothing.
            self._ops.rotate_and_store(key, key, value, plan, *self._tables, cache.keys[place], cache.values[place])

    def step(self, rows: HeadRows) -> tuple[Tensor, Tensor]:
        """Outputs of whole blocks, each of which has its rows side by side; no states."""
        ops, cache, head_dim = self._ops, rows.cache, self._law.layers.head_dim
        x = ops.embed(self._embedding, rows.plan.token_ids) * self._law.embedding_scale
        kinds = list(zip(self._law.causal, self._law.layers.windows, strict=True))
        views = {kind: self._seen(rows.plan, *kind) for kind in set(kinds)}
        for place, (layer, kind) in enumerate(zip(self._layers, kinds, strict=True)):
            normed, keys, values = self._norm_rows(x, layer.input_norm), cache.keys[place], cache.values[place]
            query = ops.linear(normed, layer.query.weight, layer.query.bias).view(x.shape[0], -1, head_dim)
            query = self._norm_heads(query, layer.query_norm)
            key, value = self._key_value(layer, normed)
            query = ops.rotate_and_store(query, key, value, rows.plan, *self._tables, keys, values)
            attended = ops.attention(query, views[kind], keys, values, self._law.layers.score_scale)
            x = x + ops.linear(attended, layer.output.weight, layer.output.bias)
            gate_up = ops.linear(self._norm_rows(x, layer.post_norm), layer.gate_up.weight)
            x = x + ops.linear(ops.gate_multiply(gate_up), layer.down.weight)
        return self._norm_rows(x, self._norm), x[:, :0]

    def logits(self, outputs: Tensor, depths: Sequence[int]) -> Tensor:
        logits, cap = self._ops.linear(outputs, self._head) * self._law.logit_scale, self._law.logit_cap
        if cap is not None:
            # Row by row: at the end of a tensor torch computes it with other bits than within.
            logits = torch.stack([torch.tanh(row) for row in logits / cap]) * cap
        return over_target_ids(logits, self._target_ids, self._vocab_size)

    def _seen(self, plan: RowPlan, is_causal: bool, window: int | None) -> RowPlan:
        """What each row sees: its list begins with the window, and goes on to the block's end unless it is causal."""
        hidden, ends = torch.zeros_like(plan.key_counts), plan.key_counts
        if window is not None:
            hidden = (plan.key_counts - window).clamp_min(0)
        if not is_causal:
            # A block's rows have one list, whose end its last row sees.
            blocks = plan.key_counts.view(-1, self._law.masks.count(0) + 1)
            ends = blocks[:, -1:].expand_as(blocks).reshape(-1)
        return plan.with_lists(plan.key_starts + hidden, ends - hidden, plan.max_key_count)

    def _key_value(self, layer: BlockLayer, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = self._ops.linear(x, layer.key_value.weight, layer.key_value.bias)
        key, value = heads.view(x.shape[0], -1, self._law.layers.head_dim).chunk(2, 1)
        return self._norm_heads(key, layer.key_norm), value

    def _norm_rows(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._ops.rms_norm(x, weight, self._law.layers.norm_epsilon)

    def _norm_heads(self, heads: Tensor, weight: Tensor) -> Tensor:
        rows = heads.reshape(-1, self._law.layers.head_dim).contiguous()
        return self._norm_rows(rows, weight).view(heads.shape)
