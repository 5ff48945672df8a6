"""What MLP speculators, Medusa, BPD and Hydra compute, once more: numpy in float64, by the files' own names.

Nothing here knows the engine. Where authors write a formula in two ways, this is the other one.
"""

import json
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Tensors = dict[str, NDArray[np.float64]]

_erf = np.vectorize(math.erf)


def chain_logits(
    folder: Path, tensors: Tensors, embedding: Floats, output: Floats, features: Floats, own: list[int]
) -> Floats:
    """Logits [k, V] of the guesses after own [k]: the last committed token, then guesses.

    The tensors are those of the folder's file. features [n - 1, H] are f of the positions before that token; embedding
    and output are the target's.
    """
    config = json.loads((folder / "config.json").read_text())
    if config.get("model_type") == "mlp_speculator":
        return _speculator(config, tensors, features[-1], own)
    if config.get("model_type") == "medusa":
        return np.stack([_vllm(config, tensors, features[-1], index, output) for index in range(len(own))])
    if config.get("drafter") == "bpd":
        return np.stack([_bpd(tensors, features[-1], index, output) for index in range(len(own))])
    if "hydra_num_heads" in config:
        return _hydra(config, tensors, embedding, features, own)
    return np.stack([_medusa(config, tensors, features[-1], index, output) for index in range(len(own))])


def _speculator(config: dict[str, int], tensors: Tensors, f: Floats, own: list[int]) -> Floats:
    count = config["n_predict"]
    inner = config["inner_dim"] if config["inner_dim"] > 0 else config["emb_dim"]
    state_weight = 0.5 ** (0.5 / count)
    emb_weight = math.sqrt(1 - state_weight**2) * math.sqrt(inner / 2)
    state = _rms(f, 1e-6) / math.sqrt(2) if config.get("scale_input") else f
    logits = []
    for depth, token in enumerate(own):
        tied = bool(config["tie_weights"])
        index, between = (0 if tied else depth), (min(depth, 1) if tied else depth)
        mixed = tensors[f"speculator.proj.{between}.weight"] @ state * state_weight
        mixed = mixed + emb_weight * tensors[f"speculator.emb.{index}.weight"][token]
        normed = _rms(mixed, 1e-6) * tensors[f"speculator.ln.{index}.weight"] + tensors[f"speculator.ln.{index}.bias"]
        state = 0.5 * normed * (1 + _erf(normed / math.sqrt(2)))
        logits.append(tensors[f"speculator.head.{index}.weight"] @ state)
    return np.stack(logits)


def _medusa(config: dict[str, int], tensors: Tensors, y: Floats, index: int, output: Floats) -> Floats:
    depth = config["medusa_num_layers"]
    for layer in range(depth):
        y = y + _silu(_affine(tensors, f"{index}.{layer}.linear", y))
    return tensors.get(f"{index}.{depth}.weight", output) @ y


def _vllm(config: dict[str, int], tensors: Tensors, y: Floats, index: int, output: Floats) -> Floats:
    for layer in range(config["num_hidden_layers"]):
        y = y + _silu(_affine(tensors, f"blocks.{index}.layers.{layer}", y))
    matrix = tensors.get(f"lm_heads.{index}.weight")
    if config["original_lm_head"]:
        matrix = next((tensors[name] for name in ("lm_head.weight", "lm_heads.0.weight") if name in tensors), output)
    assert matrix is not None
    if "token_map" not in tensors:
        return matrix @ y
    logits = np.full(config["vocab_size"], -np.inf)
    for row, token in enumerate(tensors["token_map"].astype(int)):
        is_whole = len(matrix) == config["vocab_size"]
        logits[token] = matrix[token if is_whole else row] @ y
    return logits


def _bpd(tensors: Tensors, y: Floats, index: int, output: Floats) -> Floats:
    inner = np.maximum(_affine(tensors, f"heads.{index}.up", y), 0)
    return tensors.get("lm_head.weight", output) @ (y + _affine(tensors, f"heads.{index}.down", inner))


def _hydra(config: dict[str, int], tensors: Tensors, embedding: Floats, features: Floats, own: list[int]) -> Floats:
    prefixed = str(config["hydra_head_arch"]) == "prefix-mlp"
    base = _llama_layer(config, tensors, features)[-1] if prefixed else features[-1]
    embedding = tensors.get("input_embed_fn.weight", embedding)
    logits = []
    for depth in range(len(own)):
        y = base
        if config["grounded_heads"]:
            y = np.concatenate([base, *(embedding[token] for token in own[: depth + 1])])
        # Modules of a Sequential are numbered with those that have no tensors.
        places = range(1, 2 * config["hydra_num_layers"], 2) if prefixed else range(config["hydra_num_layers"])
        for place in places:
            name = f"hydra_mlp.{depth}.{place}"
            kept = _affine(tensors, f"{name}.res_connection", y) if f"{name}.res_connection.weight" in tensors else y
            y = kept + _silu(_affine(tensors, f"{name}.linear", y))
        logits.append(_affine(tensors, f"hydra_lm_head.{depth}.1" if prefixed else f"hydra_lm_head.{depth}", y))
    return np.stack(logits)


def _llama_layer(config: dict[str, int], tensors: Tensors, x: Floats) -> Floats:
    """All positions at once, numbered from 0, as the authors number them."""
    prefix, epsilon = "prefix_embeding_layer", config["rms_norm_eps"]
    layer = {name.removeprefix(f"{prefix}.layers.0."): tensor for name, tensor in tensors.items()}
    num_heads, num_groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = x.shape[1] // num_heads
    normed = _rms(x, epsilon) * layer["input_layernorm.weight"]
    query, key, value = (
        (normed @ layer[f"self_attn.{name}_proj.weight"].T).reshape(len(x), -1, size) for name in "qkv"
    )
    turned = config["rope_theta"] ** (-np.arange(size // 2) / (size // 2)) * np.arange(len(x))[:, None]
    query, key = _turn(query, turned), _turn(key, turned)
    rows = []
    for row in range(len(x)):
        heads = []
        for head in range(num_heads):
            group = head * num_groups // num_heads
            scores = key[: row + 1, group] @ query[row, head] / math.sqrt(size)
            weights = np.exp(scores - scores.max())
            heads.append(weights / weights.sum() @ value[: row + 1, group])
        rows.append(layer["self_attn.o_proj.weight"] @ np.concatenate(heads))
    x = x + np.stack(rows)
    normed = _rms(x, epsilon) * layer["post_attention_layernorm.weight"]
    inner = _silu(normed @ layer["mlp.gate_proj.weight"].T) * (normed @ layer["mlp.up_proj.weight"].T)
    return _rms(x + inner @ layer["mlp.down_proj.weight"].T, epsilon) * tensors[f"{prefix}.norm.weight"]


def _turn(heads: Floats, turned: Floats) -> Floats:
    first, second = np.split(heads, 2, axis=-1)
    cos, sin = np.cos(turned)[:, None], np.sin(turned)[:, None]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def _affine(tensors: Tensors, name: str, x: Floats) -> Floats:
    return tensors[f"{name}.weight"] @ x + tensors.get(f"{name}.bias", np.zeros(1))


def _silu(x: Floats) -> Floats:
    return x / (1 + np.exp(-x))


def _rms(x: Floats, epsilon: float) -> Floats:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon)
