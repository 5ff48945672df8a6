"""What feature heads compute, in numpy and float64, by the names in their files; it knows nothing of our loader.

Row after row, each with the keys and values of all rows before it: true rows first, then drafted ones, whose states are
what the row before them fed back.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array = NDArray[np.float64]


def read_tensors(folder: Path) -> dict[str, Array]:
    """All tensors of a folder's files in float64, but for those that hold ids."""
    return {
        name: tensor if tensor.dtype.kind in "iub" else tensor.astype(np.float64)
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@dataclass
class Target:
    """The target's two matrices, and what it knew at each token: boundaries [N + 1, tokens, H], the last one f."""

    embedding: Array
    output: Array
    boundaries: Array

    @property
    def num_layers(self) -> int:
        return self.boundaries.shape[0] - 1


@dataclass
class HeadOracle:
    """One head on one text; `family` is eagle1, eagle3, eagle3-pair, mtp or mtp-reversed, `layer` begins its names."""

    folder: Path
    target: Target
    family: str
    layer: str
    theta: float | None = None
    keys: list[Array] = field(init=False)
    values: list[Array] = field(init=False)

    def __post_init__(self) -> None:
        self.config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        self.of_layer: dict[str, Any] = self.config.get("transformer_layer_config", self.config)
        self.tensors = {name.removeprefix("model."): tensor for name, tensor in read_tensors(self.folder).items()}
        self.is_whole_model = "layers.1.mlp.up_proj.weight" in self.tensors

    def logits(self, token_ids: list[int], drafted: list[int]) -> Array:
        """[tokens - 1 + drafted, V]: of the rows of all tokens but the first, then of the drafted ones."""
        self.keys, self.values = [], []
        rows, state = [], np.zeros(0)
        for position in range(1, len(token_ids) + len(drafted)):
            is_true = position < len(token_ids)
            token = token_ids[position] if is_true else drafted[position - len(token_ids)]
            output, state = self.step(self.features(position - 1) if is_true else state, token, position)
            rows.append(self.to_target(output))
        return np.stack(rows)

    def switch(self, name: str, default: bool) -> bool:
        """A flag of config.json, in either place."""
        return bool(self.config.get("eagle_config", {}).get(name, self.config.get(name, default)))

    def features(self, token: int) -> Array:
        """The state after a token of the text."""
        last = self.target.num_layers
        if self.family != "eagle3" or not self.switch("use_aux_hidden_state", default=True):
            return self.target.boundaries[last, token]
        taps = [2, last // 2, last - 3]
        if "eagle_aux_hidden_state_layer_ids" in self.config:
            taps = self.config["eagle_aux_hidden_state_layer_ids"]
        elif "eagle_aux_hidden_state_layer_ids" in self.config.get("eagle_config", {}):
            taps = [each + 1 for each in self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
        parts = [self.target.boundaries[tap, token] for tap in taps]
        if self.switch("fc_norm", default="fc_norm.0.weight" in self.tensors):
            parts = [self.norm(part, f"fc_norm.{index}") for index, part in enumerate(parts)]
        joined = np.concatenate(parts)
        if self.switch("norm_before_fc", default=False):
            joined = self.norm(joined, "input_norm")
        return self.tensors["fc.weight"] @ joined

    def embed(self, token: int) -> Array:
        own = None if self.is_whole_model else self.tensors.get("embed_tokens.weight")
        return (self.target.embedding if own is None else own)[token]

    def step(self, state: Array, token: int, position: int) -> tuple[Array, Array]:
        """What the output matrix reads, and the next state."""
        return {"eagle1": self.step_eagle1, "eagle3": self.step_wide, "eagle3-pair": self.step_pair}.get(
            self.family, self.step_mtp
        )(state, self.embed(token), position)

    def step_eagle1(self, state: Array, embedded: Array, position: int) -> tuple[Array, Array]:
        if self.config.get("add_para_norm"):
            state = self.norm(state, "hidden_states_layernorm")
        if self.config.get("add_para_norm") or self.config.get("layernorms"):
            embedded = self.norm(embedded, "embedding_layernorm")
        fc = "fusion_fc" if "fusion_fc.weight" in self.tensors else "fc"
        x = self.linear(np.concatenate([embedded, state]), fc)
        x = self.block(x, self.maybe_norm(x, f"{self.layer}input_layernorm"), position)
        if self.config.get("layernorms"):
            x = self.norm(x, "pre_lm_head_layernorm")
        return x, x

    def step_wide(self, state: Array, embedded: Array, position: int) -> tuple[Array, Array]:
        normed = self.norm(state, f"{self.layer}hidden_norm")
        x = np.concatenate([self.norm(embedded, f"{self.layer}input_layernorm"), normed])
        x = self.block(normed if self.switch("norm_before_residual", default=False) else state, x, position)
        output = self.norm(x, "norm") if self.switch("use_last_layernorm", default=True) else x
        return output, output if self.switch("norm_output", default=False) else x

    def step_pair(self, state: Array, embedded: Array, position: int) -> tuple[Array, Array]:
        x = self.linear(np.concatenate([embedded, state]), "fc")
        x = self.block(x, self.norm(x, f"{self.layer}input_layernorm"), position)
        x = self.norm(x, "norm")
        return x, x

    def step_mtp(self, state: Array, embedded: Array, position: int) -> tuple[Array, Array]:
        halves = [
            self.norm(embedded, f"{self.layer}token_layernorm"),
            self.norm(state, f"{self.layer}hidden_layernorm"),
        ]
        if self.family == "mtp-reversed":
            halves.reverse()
        x = self.linear(np.concatenate(halves), f"{self.layer}input_proj")
        x = self.block(x, self.norm(x, f"{self.layer}input_layernorm"), position)
        x = self.norm(x, f"{self.layer}final_layernorm")
        return x, x

    def block(self, residual: Array, x: Array, position: int) -> Array:
        """Attention over all rows so far and the perceptron, both added."""
        head_dim = self.of_layer["head_dim"]
        query, key, value = (
            self.linear(x, f"{self.layer}self_attn.{name}_proj").reshape(-1, head_dim) for name in "qkv"
        )
        query = self.maybe_norm(query, f"{self.layer}self_attn.q_norm")
        key = self.maybe_norm(key, f"{self.layer}self_attn.k_norm")
        self.keys.append(self.rotate(key, position))
        self.values.append(value)
        keys, values = np.stack(self.keys), np.stack(self.values)
        query, attended = self.rotate(query, position), []
        for head in range(len(query)):
            group = head * key.shape[0] // len(query)
            scores = keys[:, group] @ query[head] / np.sqrt(head_dim)
            weights = np.exp(scores - scores.max())
            attended.append(weights @ values[:, group] / weights.sum())
        x = residual + self.linear(np.concatenate(attended), f"{self.layer}self_attn.o_proj")
        inner = self.norm(x, f"{self.layer}post_attention_layernorm")
        gate = self.linear(inner, f"{self.layer}mlp.gate_proj")
        inner = gate / (1 + np.exp(-gate)) * self.linear(inner, f"{self.layer}mlp.up_proj")
        return x + self.linear(inner, f"{self.layer}mlp.down_proj")

    def rotate(self, heads: Array, position: int) -> Array:
        half = heads.shape[1] // 2
        scaling = self.of_layer.get("rope_scaling") or self.of_layer.get("rope_parameters") or {}
        theta = self.theta or scaling.get("rope_theta") or self.of_layer.get("rope_theta") or 10000.0
        angles = [position * self.scaled(theta ** (-pair / half), scaling) for pair in range(half)]
        turn = np.exp(1j * np.array(angles))
        turned = (heads[:, :half] + 1j * heads[:, half:]) * turn
        return np.concatenate([turned.real, turned.imag], 1)

    def scaled(self, frequency: float, scaling: dict[str, Any]) -> float:
        """Llama 3's and linear scaling; none for an unscaled head."""
        if scaling.get("rope_type") == "linear":
            return frequency / scaling["factor"]
        if scaling.get("rope_type") != "llama3":
            return frequency
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * np.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        return frequency * (share + (1 - share) / scaling["factor"])

    def to_target(self, output: Array) -> Array:
        """Logits of all of the target's ids; -inf where the head has none."""
        own = None if self.is_whole_model else self.tensors.get("lm_head.weight")
        if own is None and self.family == "eagle3" and self.of_layer.get("tie_word_embeddings"):
            own = self.tensors.get("embed_tokens.weight")
        matrix = self.target.output if own is None else own
        logits = np.full(len(self.target.output), -np.inf)
        for index, logit in enumerate(matrix @ output):
            logits[index + (int(self.tensors["d2t"][index]) if "d2t" in self.tensors else 0)] = logit
        return logits

    def linear(self, x: Array, name: str) -> Array:
        product = self.tensors[f"{name}.weight"] @ x
        return product + self.tensors.get(f"{name}.bias", 0.0)

    def norm(self, x: Array, name: str) -> Array:
        epsilon = self.of_layer.get("rms_norm_eps", 1e-6)
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
        normed: Array = x / scale * self.tensors[f"{name}.weight"]
        return normed

    def maybe_norm(self, x: Array, name: str) -> Array:
        return self.norm(x, name) if f"{name}.weight" in self.tensors else x
