"""What DFlash computes, in numpy and float64, by the names in its publishers' files; it knows nothing of our loader.

One dense attention over all tokens before the last one, whose keys and values are made of the target's features, and
over a block of the last token and masks.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from support.heads.head_oracle import Array, Target, read_tensors


@dataclass
class BlockOracle:
    """One drafter and what its target knew of a text."""

    folder: Path
    target: Target
    tensors: dict[str, Array] = field(init=False)

    def __post_init__(self) -> None:
        self.config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        self.tensors = read_tensors(self.folder)
        self.is_speculators = "speculators_model_type" in self.config
        self.layer: dict[str, Any] = self.config["transformer_layer_config"] if self.is_speculators else self.config

    def said(self, name: str, default: object = None) -> Any:
        """The value of a key, whichever place it is in."""
        return self.config.get("dflash_config", {}).get(name, self.config.get(name, default))

    @property
    def taps(self) -> list[int]:
        """Boundaries: inputs of layers."""
        if self.is_speculators:
            return list(self.config["aux_hidden_state_layer_ids"])
        return [each + 1 for each in self.said("target_layer_ids")]

    def logits(self, token_ids: list[int]) -> Array:
        """Logits [rows of the block, V] after these tokens, over the target's ids."""
        count, size = len(token_ids) - 1, self.said("block_size")
        block = [token_ids[-1], *[self.said("mask_token_id")] * (size - 1)]
        own = self.tensors.get("embed_tokens.weight")
        x = (self.target.embedding if own is None else own)[block] * self.said("input_embedding_scale", 1.0)
        features = np.concatenate([self.target.boundaries[tap, :count] for tap in self.taps], 1)
        context = self.norm(features @ self.tensors["fc.weight"].T, "hidden_norm")
        for layer in range(self.layer["num_hidden_layers"]):
            x = x + self.attention(self.norm(x, f"layers.{layer}.input_layernorm"), context, layer)
            normed = self.norm(x, f"layers.{layer}.post_attention_layernorm")
            gate = self.linear(normed, f"layers.{layer}.mlp.gate_proj")
            up = self.linear(normed, f"layers.{layer}.mlp.up_proj")
            x = x + self.linear(gate / (1 + np.exp(-gate)) * up, f"layers.{layer}.mlp.down_proj")
        return self.to_target(self.norm(x, "norm"))

    def attention(self, x: Array, context: Array, layer: int) -> Array:
        name, head_dim = f"layers.{layer}.self_attn", self.layer["head_dim"]
        count, total = len(context), len(context) + len(x)
        read = np.concatenate([context, x])
        query = self.norm(self.linear(x, f"{name}.q_proj").reshape(len(x), -1, head_dim), f"{name}.q_norm")
        key = self.norm(self.linear(read, f"{name}.k_proj").reshape(total, -1, head_dim), f"{name}.k_norm")
        value = self.linear(read, f"{name}.v_proj").reshape(total, -1, head_dim)
        query, key = self.rotate(query, np.arange(count, total)), self.rotate(key, np.arange(total))
        seen = np.stack(
            [[self.sees(row, column, count, layer) for column in range(total)] for row in range(count, total)]
        )
        group = query.shape[1] // key.shape[1]
        heads = []
        for head in range(query.shape[1]):
            scores = query[:, head] @ key[:, head // group].T / np.sqrt(head_dim)
            weights = np.where(seen, np.exp(scores - scores.max()), 0)
            heads.append(weights / weights.sum(1, keepdims=True) @ value[:, head // group])
        return self.linear(np.concatenate(heads, 1), f"{name}.o_proj")

    def sees(self, row: int, column: int, count: int, layer: int) -> bool:
        """Whether a row of the block at a position sees that of another position."""
        types = self.layer.get("layer_types")
        has_window = types is not None and types[layer] == "sliding_attention"
        stated = next((self.said(name) for name in ("is_causal", "causal") if self.said(name) is not None), None)
        causal = has_window and not self.said("sliding_window_non_causal", False) if stated is None else stated
        if causal and column > row:
            return False
        return not has_window or row - column < self.layer["sliding_window"]

    def rotate(self, heads: Array, positions: np.ndarray[Any, Any]) -> Array:
        half = heads.shape[-1] // 2
        scaling = self.layer.get("rope_scaling") or self.layer.get("rope_parameters") or {}
        theta = scaling.get("rope_theta") or self.layer.get("rope_theta") or 10000.0
        places = positions / scaling["factor"] if scaling.get("rope_type") == "linear" else positions
        turn = np.exp(1j * places[:, None, None] * theta ** (-np.arange(half) / half))
        turned = (heads[..., :half] + 1j * heads[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    def to_target(self, x: Array) -> Array:
        matrix = self.tensors.get("lm_head.weight")
        logits = x @ (self.target.output if matrix is None else matrix).T * self.said("output_multiplier", 1.0)
        cap = self.said("final_logit_softcapping")
        if cap:
            logits = np.tanh(logits / cap) * cap
        if "d2t" not in self.tensors:
            return logits
        found = np.full((len(x), len(self.target.output)), -np.inf)
        found[:, np.arange(logits.shape[1]) + self.tensors["d2t"]] = logits
        return found

    def linear(self, x: Array, name: str) -> Array:
        product: Array = x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0.0)
        return product

    def norm(self, x: Array, name: str) -> Array:
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + self.layer["rms_norm_eps"])
        normed: Array = x / scale * self.tensors[f"{name}.weight"]
        return normed
