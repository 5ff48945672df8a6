"""One decoder layer that reads the target's features: EAGLE 1 to 3.1, MTP, HASS, Kangaroo, as settings of one layer.

EAGLE: Li et al., 2024, arXiv 2401.15077; EAGLE-2: 2406.16858; EAGLE-3: 2503.01840. Multi-token prediction: DeepSeek-AI,
2024, arXiv 2412.19437. Kangaroo: Liu et al., 2024, arXiv 2404.18911. For the row of token x with the state s after the
token before it, each norm where the checkpoint has it:

    a, b = embedding_norm(embedding(x)), state_norm(s)
    pair:  u = fuse([a; b]), or fuse([b; a]);  r = u;  the layer's attention reads input_norm(u)
    wide:  r = s, or b where residuals are normed;     the layer's attention reads [a; b]
    own:   r = s, which is that of x itself;           the layer's attention reads input_norm(r), and there is no mlp
    o = r + attention;  o = o + mlp(post_norm(o))
    logits = head(out_norm(o)), of the ids that the head knows

The state after x is then o, or out_norm(o). After a committed token it is what its features mean: a product with the
taps, which may be normed, each or all of them, or the one tap itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from outrider.engine.heads.head import HeadFacts, HeadRows, TargetParts, over_target_ids
from outrider.engine.models.rope import Rope, rotary_tables
from outrider.engine.models.transformer import Linear
from outrider.engine.ops import Ops, Weight


class Fuse(StrEnum):
    """Way in which a row's embedding and state come together."""

    PAIR = "pair"
    """A product with [embedding; state]."""
    REVERSED = "reversed"
    """A product with [state; embedding]."""
    WIDE = "wide"
    """The attention reads both, side by side."""
    OWN = "own"
    """The attention is all there is, and reads the state alone: that of the row's own token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureHeadConfig:
    """Sizes and switches of a feature head; which norms and matrices there are, its tensors say."""

    method: str
    taps: tuple[int, ...]
    """Taps of the head; see HeadFacts."""
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope: Rope
    context_len: int
    fuse: Fuse
    normed_residual: bool = False
    """Whether the residual of a wide head is the normed state."""
    feeds_normed: bool = False
    """Whether the state after a guess is what leaves the head's last norm."""


class FeatureHead:
    """Tensors have the names of `feature_tensors`; absent ones are the target's, or none."""

    def __init__(self, law: FeatureHeadConfig, tensors: dict[str, Tensor], target: TargetParts, ops: Ops) -> None:
        """Takes the tensors and empties the dictionary."""
        self.law = law
        self._ops = ops

        def matrix(name: str) -> Weight | None:
            weight = tensors.pop(f"{name}.weight", None)
            return None if weight is None else ops.stack([weight])

        def norm(name: str) -> Tensor | None:
            return tensors.pop(f"{name}.weight", None)

        own_embedding, own_head = tensors.pop("embedding.weight", None), matrix("head")
        self.embedding = target.embedding if own_embedding is None else own_embedding
        self.embedding_norm, self.state_norm = norm("embedding_norm"), norm("state_norm")
        self._tap_norms = [norm(f"features.norms.{index}") for index in range(len(law.taps))]
        self._feature_norm, self.features = norm("features.norm"), matrix("features")
        self.fuse, self.fuse_bias = matrix("fuse"), tensors.pop("fuse.bias", None)
        self.input_norm, self.post_norm = norm("layer.input_layernorm"), norm("layer.post_attention_layernorm")
        self.qkv = Linear.take(ops, tensors, "layer.self_attn.", "q_proj", "k_proj", "v_proj")
        self.query_norm, self.key_norm = norm("layer.self_attn.q_norm"), norm("layer.self_attn.k_norm")
        self.output = Linear.take(ops, tensors, "layer.self_attn.", "o_proj")
        has_mlp = law.fuse is not Fuse.OWN
        self.gate_up = Linear.take(ops, tensors, "layer.mlp.", "gate_proj", "up_proj") if has_mlp else None
        self.down = Linear.take(ops, tensors, "layer.mlp.", "down_proj") if has_mlp else None
        self.out_norm = norm("out_norm")
        self.head = target.output if own_head is None else own_head
        self.target_ids = tensors.pop("target_ids", None)
        self.vocab_size = target.vocab_size
        if tensors:
            raise ValueError(f"nothing reads {', '.join(sorted(tensors))}")
        self._own = [
            tensor
            for tensor in (
                *(own_embedding, self.embedding_norm, self.state_norm, *self._tap_norms, self._feature_norm),
                *(self.features, self.fuse, self.fuse_bias, self.input_norm, *self.qkv.weights),
                *(self.query_norm, self.key_norm, *self.output.weights, self.post_norm),
                *(weight for each in (self.gate_up, self.down) if each is not None for weight in each.weights),
                *(self.out_norm, own_head),
            )
            if tensor is not None
        ]
        self.cos, self.sin = rotary_tables(law.rope, law.head_dim, law.context_len, self.embedding.device)
        self.facts = HeadFacts(
            method=law.method,
            taps=law.taps,
            state_size=law.hidden_size,
            num_kv_layers=1,
            num_kv_heads=law.num_kv_heads,
            head_dim=law.head_dim,
            context_len=min(law.context_len, target.context_len),
            reads_own=law.fuse is Fuse.OWN,
        )

    @property
    def weights(self) -> Sequence[Weight]:
        return self._own

    @property
    def has_feature_norms(self) -> bool:
        """Whether what it reads of the target is normed before the product."""
        return self._feature_norm is not None or any(norm is not None for norm in self._tap_norms)

    def states_of(self, features: Tensor) -> Tensor:
        if any(norm is not None for norm in self._tap_norms):
            taps = features.split_with_sizes([features.shape[1] // len(self._tap_norms)] * len(self._tap_norms), 1)
            pairs = zip(taps, self._tap_norms, strict=True)
            features = torch.cat([self._norm(tap.contiguous(), norm) for tap, norm in pairs], 1)
        features = self._norm(features, self._feature_norm)
        return features if self.features is None else self._ops.linear(features, self.features)

    def step(self, rows: HeadRows) -> tuple[Tensor, Tensor]:
        ops, law = self._ops, self.law
        embedded = self._norm(ops.embed(self.embedding, rows.plan.token_ids), self.embedding_norm)
        state = self._norm(rows.states, self.state_norm)
        parts = (state, embedded) if law.fuse is Fuse.REVERSED else (embedded, state)
        x = torch.cat(parts, 1)
        if self.fuse is None:
            residual = state if law.normed_residual else rows.states
        else:
            residual = ops.linear(x, self.fuse, self.fuse_bias)
        if law.fuse is not Fuse.WIDE:
            x = self._norm(residual, self.input_norm)
        x = residual + self._attend(x, rows)
        if self.gate_up is not None and self.down is not None:
            gate_up = ops.linear(self._norm(x, self.post_norm), self.gate_up.weight, self.gate_up.bias)
            x = x + ops.linear(ops.gate_multiply(gate_up), self.down.weight, self.down.bias)
        output = self._norm(x, self.out_norm)
        return output, output if law.feeds_normed else x

    def logits(self, outputs: Tensor, depths: Sequence[int]) -> Tensor:
        return over_target_ids(self._ops.linear(outputs, self.head), self.target_ids, self.vocab_size)

    def _attend(self, x: Tensor, rows: HeadRows) -> Tensor:
        law, ops, cache = self.law, self._ops, rows.cache
        heads = ops.linear(x, self.qkv.weight, self.qkv.bias).view(x.shape[0], -1, law.head_dim)
        query, key, value = heads.split_with_sizes((law.num_heads, law.num_kv_heads, law.num_kv_heads), 1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self._norm_heads(query, self.query_norm), self._norm_heads(key, self.key_norm)
        keys, values = cache.keys[0], cache.values[0]
        query = ops.rotate_and_store(query, key, value, rows.plan, self.cos, self.sin, keys, values)
        attended = ops.attention(query, rows.plan, keys, values, law.head_dim**-0.5)
        return ops.linear(attended, self.output.weight, self.output.bias)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._ops.rms_norm(x, weight, self.law.norm_epsilon)

    def _norm_heads(self, heads: Tensor, weight: Tensor) -> Tensor:
        rows = heads.reshape(-1, self.law.head_dim).contiguous()
        return self._ops.rms_norm(rows, weight, self.law.norm_epsilon).view(heads.shape)


def feature_tensors(
    law: FeatureHeadConfig, intermediate_size: int, target_size: int, vocab_size: int, draft_vocab_size: int
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Names and shapes of a feature head's tensors: those that it must have, and those that it may have."""
    h, width = law.hidden_size, law.hidden_size * (2 if law.fuse is Fuse.WIDE else 1)
    query, key = law.num_heads * law.head_dim, law.num_kv_heads * law.head_dim
    sizes = {"q_proj": (query, width), "k_proj": (key, width), "v_proj": (key, width), "o_proj": (h, query)}
    attention = {f"layer.self_attn.{name}.weight": shape for name, shape in sizes.items()}
    if law.fuse is Fuse.OWN:
        return attention | {"layer.input_layernorm.weight": (h,), "out_norm.weight": (h,)}, {}
    required = attention | {
        "layer.mlp.gate_proj.weight": (intermediate_size, h),
        "layer.mlp.up_proj.weight": (intermediate_size, h),
        "layer.mlp.down_proj.weight": (h, intermediate_size),
        "layer.post_attention_layernorm.weight": (h,),
    }
    if law.fuse is not Fuse.WIDE:
        required["fuse.weight"] = (h, 2 * h)
    optional: dict[str, tuple[int, ...]] = {
        "embedding.weight": (vocab_size, h),
        "embedding_norm.weight": (h,),
        "state_norm.weight": (h,),
        "features.weight": (h, len(law.taps) * target_size),
        "features.norm.weight": (len(law.taps) * target_size,),
        **{f"features.norms.{index}.weight": (target_size,) for index in range(len(law.taps))},
        "fuse.bias": (h,),
        "layer.input_layernorm.weight": (h,),
        "layer.self_attn.q_norm.weight": (law.head_dim,),
        "layer.self_attn.k_norm.weight": (law.head_dim,),
        **{f"layer.self_attn.{name}.bias": shape[:1] for name, shape in sizes.items()},
        "out_norm.weight": (h,),
        "head.weight": (draft_vocab_size, h),
        "target_ids": (draft_vocab_size,),
    }
    return required, optional
