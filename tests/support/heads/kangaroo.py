"""Kangaroo's adapter: a tiny random one as its authors would write it, and its formulas in numpy and float64."""

import json
from pathlib import Path

import numpy as np
from support.heads.head_oracle import Array
from support.heads.tiny_heads import FLAT, GROUPS, HEAD_DIM, HEADS, HIDDEN, Json, random_tensors, write_head


def write_kangaroo(folder: Path, vocab_size: int, **config: object) -> Path:
    """For targets of the tiny models' hidden size."""
    query, key = HEADS * HEAD_DIM, GROUPS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "layers.0.self_attn.q_proj.weight": (query, HIDDEN),
        "layers.0.self_attn.k_proj.weight": (key, HIDDEN),
        "layers.0.self_attn.v_proj.weight": (key, HIDDEN),
        "layers.0.self_attn.o_proj.weight": (HIDDEN, query),
        "layers.0.input_layernorm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    keys: Json = FLAT | {"vocab_size": vocab_size, "rope_theta": 300.0} | config
    return write_head(folder, keys, random_tensors(shapes, 41))


def kangaroo_logits(folder: Path, tensors: dict[str, Array], output: Array, states: Array) -> Array:
    """Logits [tokens, V] after all tokens, of which states [tokens, H] enter the exit layer, by the file's tensors."""
    config = json.loads((folder / "config.json").read_text())

    def norm(x: Array, name: str) -> Array:
        normed: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * tensors[f"{name}.weight"]
        return normed

    x = norm(states, "layers.0.input_layernorm")
    half = HEAD_DIM // 2
    turn = np.exp(1j * np.outer(np.arange(len(x)), config["rope_theta"] ** (-np.arange(half) / half)))[:, None]
    query, key, value = (
        (x @ tensors[f"layers.0.self_attn.{name}_proj.weight"].T).reshape(len(x), -1, HEAD_DIM) for name in "qkv"
    )

    def rotate(heads: Array) -> Array:
        turned = (heads[..., :half] + 1j * heads[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    key, value = (np.repeat(each, HEADS // GROUPS, 1) for each in (rotate(key), value))
    scores = np.einsum("qhd,khd->hqk", rotate(query), key) / np.sqrt(HEAD_DIM)
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    attended = np.einsum("hqk,khd->qhd", weights, value).reshape(len(x), -1)
    x = states + attended @ tensors["layers.0.self_attn.o_proj.weight"].T
    logits: Array = norm(x, "norm") @ output.T
    return logits
