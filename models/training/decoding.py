"""A frozen target that writes many texts at once, a token of each in every step, and shows what it computes on the way.

All texts are as long at every step, so attention reads one block of keys without a mask. Products are computed in
bfloat16, as the services do by default; residuals, norms and rotations in float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from outrider.engine.models.rope import Rope, rotary_tables
from training.heads import rotated
from training.model import CausalModel

DRAWN_TOGETHER = 32


class LayerWeights(NamedTuple):
    """Matrices in bfloat16, those that read the same stacked; norms in float32."""

    input_norm: Tensor
    qkv: Tensor
    head_norms: tuple[Tensor, Tensor] | None
    """Norms of queries and keys, where the model has them (Qwen 3)."""
    output: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class States(NamedTuple):
    """Results of one step for each text."""

    taps: Tensor
    """[B, taps * H] bfloat16: residuals that enter the tapped layers, side by side."""
    normed: Tensor
    """[B, H] bfloat16: what leaves the final norm, and is read by the output matrix."""


class BatchDecoder:
    """On the CPU; `rewind` says how many texts there are, before the first step."""

    def __init__(self, model: CausalModel, taps: tuple[int, ...]) -> None:
        config = model.config
        self.taps, self.epsilon = taps, config.rms_norm_eps
        self.num_heads, self.num_groups = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}

        def stacked(prefix: str, *names: str) -> Tensor:
            return torch.cat([weights[f"{prefix}{name}.weight"] for name in names]).bfloat16()

        self.layers = [
            LayerWeights(
                weights[f"{prefix}input_layernorm.weight"].float(),
                stacked(f"{prefix}self_attn.", "q_proj", "k_proj", "v_proj"),
                (weights[f"{prefix}self_attn.q_norm.weight"], weights[f"{prefix}self_attn.k_norm.weight"])
                if f"{prefix}self_attn.q_norm.weight" in weights
                else None,
                stacked(f"{prefix}self_attn.", "o_proj"),
                weights[f"{prefix}post_attention_layernorm.weight"].float(),
                stacked(f"{prefix}mlp.", "gate_proj", "up_proj"),
                stacked(f"{prefix}mlp.", "down_proj"),
            )
            for prefix in (f"model.layers.{index}." for index in range(config.num_hidden_layers))
        ]
        self.embedding = weights["model.embed_tokens.weight"].bfloat16()
        self.head = weights["lm_head.weight"].bfloat16()
        self.norm = weights["model.norm.weight"].float()
        rope = Rope(theta=config.rope_parameters["rope_theta"])
        self.context_len = config.max_position_embeddings
        self.cos, self.sin = rotary_tables(rope, self.head_dim, self.context_len, torch.device("cpu"))
        self.position = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def rewind(self, count: int, length: int) -> None:
        """Begins so many new texts, of so many tokens at most."""
        self.position, shape = 0, (count, self.num_groups, length, self.head_dim)
        if not self._keys or self._keys[0].shape != shape:
            self._keys, self._values = (
                [torch.empty(shape, dtype=torch.bfloat16) for _ in self.layers] for _ in range(2)
            )

    @torch.inference_mode()
    def step(self, token_ids: Tensor) -> States:
        """Reads one token [B] of each text."""
        (batch,), now = token_ids.shape, self.position
        x = self.embedding[token_ids].float()
        taken: dict[int, Tensor] = {}
        for number, layer in enumerate(self.layers):
            if number in self.taps:
                taken[number] = x.bfloat16()
            heads = linear(self._normed(x, layer.input_norm), layer.qkv).view(batch, -1, self.head_dim)
            sizes = (self.num_heads, self.num_groups, self.num_groups)
            query, key, value = heads.split_with_sizes(sizes, 1)
            if layer.head_norms is not None:
                query, key = (
                    rms_norm(each.float(), weight.shape, weight.float(), self.epsilon).bfloat16()
                    for each, weight in zip((query, key), layer.head_norms, strict=True)
                )
            cos, sin = self.cos[now], self.sin[now]
            keys, values = self._keys[number], self._values[number]
            keys[:, :, now], values[:, :, now] = rotated(key, cos, sin).bfloat16(), value
            # The heads of a group are rows of one product with its keys.
            query = rotated(query, cos, sin).bfloat16().view(batch, self.num_groups, -1, self.head_dim)
            attended = scaled_dot_product_attention(query, keys[:, :, : now + 1], values[:, :, : now + 1])
            x = x + linear(attended.reshape(batch, -1), layer.output)
            gate, up = linear(self._normed(x, layer.post_norm), layer.gate_up).chunk(2, -1)
            x = x + linear(silu(gate) * up, layer.down)
        self.position += 1
        return States(torch.cat([taken[tap] for tap in self.taps], -1), self._normed(x, self.norm))

    def logits(self, normed: Tensor) -> Tensor:
        """[B, V] bfloat16 of final states [B, H]."""
        return linear(normed, self.head)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, self.epsilon).bfloat16()


def drawn(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """One id [B] drawn from each row of logits [B, V], at the temperatures [B]; the likeliest at 0."""
    # Every text takes its number, drawn or not, so that one text's temperature changes no other text.
    numbers = torch.rand(len(logits), 1, generator=generator)
    ids = logits.argmax(-1)
    # Few rows at once, whose sums stay in the cache.
    for rows in torch.split((temperatures > 0).nonzero()[:, 0], DRAWN_TOGETHER):
        sums = (logits[rows].float() / temperatures[rows, None]).softmax(-1).cumsum(-1)
        places = torch.searchsorted(sums, numbers[rows] * sums[:, -1:])
        ids[rows] = places[:, 0].clamp_(max=logits.shape[1] - 1)
    return ids
