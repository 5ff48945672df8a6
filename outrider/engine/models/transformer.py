"""The transformer: one readable decoder for Llama, Qwen 2, Qwen 3 with and without experts, Mistral, Gemma 3 and Phi 3.

A forward computes the rows of a plan, which may belong to many sequences, prompts and trees alike. Activations are
float32 rows; all arithmetic that sums is in `ops`, and what is left here is elementwise, so a row's bits depend on
nothing but the row where the operations are row-invariant. Tensor names are those of the checkpoint.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from outrider.engine.batching import RowPlan
from outrider.engine.cache import KVCache
from outrider.engine.devices import one_thread
from outrider.engine.models.config import ModelConfig
from outrider.engine.models.decoder import LayeredDecoder, ProbedDecoder
from outrider.engine.models.experts import ExpertSizes, take_experts
from outrider.engine.models.rope import rotary_tables
from outrider.engine.models.weights import (
    NORM_AFTER_MLP,
    NORM_BEFORE_MLP,
    NORM_BEHIND,
    SINKS,
    STACKED_GATE,
    STACKED_HEADS,
)
from outrider.engine.ops import Experts, Ops, Weight
from outrider.engine.ops.blocks import unpacked

TABLE_POSITIONS = 256
"""The rotary tables have a multiple of so many positions, or the whole context."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Weight [N, K] and bias [N] float32 or None."""

    weight: Weight
    bias: Tensor | None

    @classmethod
    def take(cls, ops: Ops, tensors: MutableMapping[str, Any], prefix: str, *names: str) -> Self:
        """Takes the named layers out of `tensors` and stacks them into one, so that one product serves them all."""
        weights = [tensors.pop(f"{prefix}{name}.weight") for name in names]
        biases = [tensors.pop(f"{prefix}{name}.bias") for name in names if f"{prefix}{name}.bias" in tensors]
        return cls(ops.stack(weights), torch.cat(biases) if biases else None)

    @property
    def weights(self) -> list[Weight]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


@dataclass(frozen=True, slots=True)
class Layer:
    """The tensors of one layer; norms that a family has not are None. query_norm and key_norm are [D]."""

    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    sinks: Tensor | None
    """Scores [H] of attention to nothing."""
    output: Linear
    attended_norm: Tensor | None
    """Norm of what attention gives, before it is added."""
    post_norm: Tensor
    """Norm of what the MLP reads."""
    gate_up: Linear | None
    """None, as `down`, where a layer has experts."""
    down: Linear | None
    experts: Experts | None
    mlp_norm: Tensor | None
    """Norm of what the MLP gives, before it is added."""

    @classmethod
    def take(cls, ops: Ops, tensors: MutableMapping[str, Any], prefix: str, experts: ExpertSizes | None = None) -> Self:
        """Takes one layer's tensors out of `tensors`, so that their separate copies are freed as they are fused."""
        is_stacked = f"{prefix}self_attn.{STACKED_HEADS}.weight" in tensors
        heads = (STACKED_HEADS,) if is_stacked else ("q_proj", "k_proj", "v_proj")
        gate = (STACKED_GATE,) if is_stacked else ("gate_proj", "up_proj")
        # Its name says after attention, where it is in families that have another norm before the MLP.
        behind = tensors.pop(f"{prefix}{NORM_BEHIND}.weight")
        before = tensors.pop(f"{prefix}{NORM_BEFORE_MLP}.weight", None)
        return cls(
            input_norm=tensors.pop(f"{prefix}input_layernorm.weight"),
            qkv=Linear.take(ops, tensors, f"{prefix}self_attn.", *heads),
            query_norm=tensors.pop(f"{prefix}self_attn.q_norm.weight", None),
            key_norm=tensors.pop(f"{prefix}self_attn.k_norm.weight", None),
            sinks=tensors.pop(f"{prefix}{SINKS}", None),
            output=Linear.take(ops, tensors, f"{prefix}self_attn.", "o_proj"),
            attended_norm=None if before is None else behind,
            post_norm=behind if before is None else before,
            gate_up=None if experts is not None else Linear.take(ops, tensors, f"{prefix}mlp.", *gate),
            down=None if experts is not None else Linear.take(ops, tensors, f"{prefix}mlp.", "down_proj"),
            experts=None if experts is None else take_experts(ops, tensors, f"{prefix}mlp.", experts),
            mlp_norm=tensors.pop(f"{prefix}{NORM_AFTER_MLP}.weight", None),
        )

    @property
    def mlp(self) -> tuple[Linear, Linear]:
        """gate_up and down. Raises ValueError for a layer that has experts instead."""
        if self.gate_up is None or self.down is None:
            raise ValueError("a layer with experts has no multilayer perceptron of its own")
        return self.gate_up, self.down

    @property
    def weights(self) -> list[Weight]:
        heads, outputs = (self.query_norm, self.key_norm, self.sinks), (self.attended_norm, self.mlp_norm)
        vectors = (self.input_norm, self.post_norm, *heads, *outputs)
        parts = (self.qkv, self.output, self.gate_up, self.down, self.experts)
        found = [tensor for part in parts if part is not None for tensor in part.weights]
        return [*(vector for vector in vectors if vector is not None), *found]


class Transformer(LayeredDecoder, ProbedDecoder):
    """A decoder-only transformer on one device."""

    def __init__(self, config: ModelConfig, tensors: MutableMapping[str, Any], ops: Ops) -> None:
        """Takes the checkpoint's tensors (outrider.engine.models.weights.load_tensors) and empties the dictionary."""
        self.config: ModelConfig = config
        self.ops = ops
        embedding = tensors.pop("model.embed_tokens.weight")
        self.norm = tensors.pop("model.norm.weight")
        # Taken in the order in which a forward reads them, the product with the vocabulary last.
        self.layers = [
            Layer.take(ops, tensors, f"model.layers.{index}.", config.experts_of(index))
            for index in range(config.num_layers)
        ]
        head = tensors.pop("lm_head.weight", None)
        self.head = ops.stack([embedding if head is None else head])
        # One that is quantised here stays as it was where it is looked up.
        self._is_tied = head is None
        is_shared = self._is_tied and isinstance(self.head, type(embedding))
        self.embedding: Weight = self.head if is_shared else embedding
        self._tables: list[tuple[Tensor, Tensor]] = []
        self.scale = config.score_scale
        # As transformers has it: in the type of the matrix. One of a file's blocks stands for float32.
        kept = self.embedding.dtype if isinstance(self.embedding, Tensor) else torch.float32
        factor = config.hidden_size**0.5 if config.family.scales_embedding else 1.0
        self.embedding_scale = torch.tensor(factor, dtype=kept).item()
        self._is_gelu = config.family.activation[1] != "silu"

    @property
    def weights(self) -> list[Weight]:
        """Weights of the model; the rotary tables are none."""
        looked_up = [] if self._is_tied else [self.embedding]
        return [*looked_up, self.norm, self.head, *(weight for layer in self.layers for weight in layer.weights)]

    @property
    def tables(self) -> list[tuple[Tensor, Tensor]]:
        """cos and sin [P, D/2] of each layer; layers of one rotary embedding share them.

        They are of the positions that `reserve` was given, or of all that the model reads.
        """
        if not self._tables:
            self.reserve(self.config.context_len)
        return self._tables

    def reserve(self, num_positions: int) -> None:
        """Makes the tables of at least so many positions; they never become shorter."""
        # Whole runs, so that no end of a tensor falls where it does not in a longer one.
        count = min(self.config.context_len, -(-num_positions // TABLE_POSITIONS) * TABLE_POSITIONS)
        if self._tables and len(self._tables[0][0]) >= count:
            return
        sizes = self.config.head_dim, count, self.embedding.device
        with one_thread():
            tables = {rope: rotary_tables(rope, *sizes) for rope in set(self.config.ropes)}
        self._tables = [tables[rope] for rope in self.config.ropes]

    def embed_more(self, rows: Tensor) -> None:
        """Adds embeddings like any ProbedDecoder. A matrix that was also the output's is its own from then on."""
        known = unpacked(self.embedding)
        self.embedding = torch.cat((known, rows.to(known)))
        self._is_tied = False

    def forward(self, plan: RowPlan, cache: KVCache, wanted: Tensor) -> Tensor:
        """Computes rows like any Decoder. The product with the vocabulary is the dearest; few prompt rows need it."""
        return self.forward_layers(plan, cache, wanted, range(self.config.num_layers))

    def forward_layers(self, plan: RowPlan, cache: KVCache, wanted: Tensor, layers: range) -> Tensor:
        ops, epsilon = self.ops, self.config.norm_epsilon
        if layers.start:
            x = cache.load_tap(layers.start, plan.slots)  # [R, hidden]
        else:
            x = ops.embed(self.embedding, plan.token_ids) * self.embedding_scale
        views = {window: plan.windowed(window) for window in set(self.config.windows)}
        for boundary in layers:
            layer, view = self.layers[boundary], views[self.config.windows[boundary]]
            cache.store_tap(boundary, plan.slots, x)
            attended = self._attend(boundary, ops.rms_norm(x, layer.input_norm, epsilon), view, cache)
            x = x + self._norm_output(attended, layer.attended_norm)
            x = x + self._norm_output(self._mlp(layer, ops.rms_norm(x, layer.post_norm, epsilon)), layer.mlp_norm)
        if layers.stop in cache.taps:
            is_end = layers.stop == self.config.num_layers
            cache.store_tap(layers.stop, plan.slots, ops.rms_norm(x, self.norm, epsilon) if is_end else x)
        if not wanted.shape[0]:
            return x.new_empty(0, self.config.vocab_size)
        x = ops.rms_norm(x.index_select(0, wanted), self.norm, epsilon)
        return ops.linear(x, self.head, None)

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        if layer.experts is not None:
            return self.ops.experts(x, layer.experts)
        gate_up, down = layer.mlp
        return self._linear(down, self.ops.gate_multiply(self._linear(gate_up, x), is_gelu=self._is_gelu))  # of [R, 2M]

    def _attend(self, place: int, x: Tensor, plan: RowPlan, cache: KVCache) -> Tensor:
        layer, keys, values = self.layers[place], cache.keys[place], cache.values[place]
        num_heads, num_groups = self.config.num_heads, self.config.num_kv_heads
        heads = self._linear(layer.qkv, x).view(x.shape[0], -1, self.config.head_dim)  # [R, H + 2G, D]
        query, key, value = heads.split_with_sizes((num_heads, num_groups, num_groups), 1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._norm_heads(query, layer.query_norm), self._norm_heads(key, layer.key_norm)
        query = self.ops.rotate_and_store(query, key, value, plan, *self.tables[place], keys, values)
        return self._linear(layer.output, self.ops.attention(query, plan, keys, values, self.scale, layer.sinks))

    def _norm_heads(self, heads: Tensor, weight: Tensor) -> Tensor:
        # A single group is a view whose rows lie apart, and operations want them together.
        rows = heads.reshape(-1, self.config.head_dim).contiguous()
        return self.ops.rms_norm(rows, weight, self.config.norm_epsilon).view(heads.shape)

    def _norm_output(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self.ops.rms_norm(x, weight, self.config.norm_epsilon)

    def _linear(self, linear: Linear, x: Tensor) -> Tensor:
        return self.ops.linear(x, linear.weight, linear.bias)
