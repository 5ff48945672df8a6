"""Writes a pickled drafting head as safetensors, which is all that is ever loaded.

Heads of the EAGLE family are written in the layout of speculators, which says what other layouts leave to the code that
reads them; all others keep their names and their config.json. Nothing but tensors is unpickled.
"""

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from outrider.engine.heads.checkpoint import LAYOUTS, PICKLED, with_theta
from outrider.engine.heads.layouts import (
    EAGLE_CONFIG,
    LAYER_CONFIG,
    LAYER_IDS,
    bare,
    layer_of,
    read_eagle1,
    read_eagle3,
)
from outrider.engine.models.json_keys import FLOAT32_MAX, JsonKeys, read_json
from outrider.engine.models.rope_keys import read_rope
from outrider.errors import InvalidRequest, ModelRefused

Json = Mapping[str, Any]

# Of a layer, in the words of a model with one such layer.
LAYER_KEYS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "vocab_size",
    "original_max_position_embeddings", "partial_rotary_factor", "attention_bias", "mlp_bias", "tie_word_embeddings",
    "use_sliding_window",
)  # fmt: skip
# Of a head; NVIDIA's are in an object of their own.
HEAD_KEYS = (
    "draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_output", "norm_before_fc", "fc_norm",
    "use_aux_hidden_state", "use_last_layernorm", "use_input_layernorm_in_first_layer", "use_mtp_layernorm",
    "has_lm_head", "add_para_norm",
)  # fmt: skip
# EAGLE 1 with three norms, before speculators gave them names.
RENAMED = {
    "fc.": "fusion_fc.",
    "layers.0.": "transformer.",
    "embed_layernorm.": "embedding_layernorm.",
    "hidden_layernorm.": "transformer.input_layernorm.",
    "lm_head_layernorm.": "pre_lm_head_layernorm.",
}


@dataclass(frozen=True, slots=True)
class Converted:
    """Facts about the files that were written."""

    layout: str
    """"speculators eagle", "speculators eagle3", or "unchanged"."""
    tensors: int
    bytes: int
    theta: float | None
    """Base of the rotary embedding as it was written; None for a layout that is unchanged."""


def convert_head(folder: Path, out: Path, theta: float | None = None) -> Converted:
    """Writes the head of a folder with pickled weights to an empty or new folder.

    theta replaces the base of the rotary embedding that config.json states. Raises ModelRefused for what cannot be
    converted, and InvalidRequest for a theta or an output folder that cannot be.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidRequest("OUT", str(out), "a folder that is empty, or not there yet")
    if theta is not None and not 0 < theta <= FLOAT32_MAX:
        raise InvalidRequest("--theta", theta, "a positive number")
    config, tensors = read_json(folder / "config.json"), unpickled(folder)
    reader = next(layout.read for layout in LAYOUTS if layout.detects(config, tensors.keys()))
    layout, written = "unchanged", None
    if reader in (read_eagle1, read_eagle3) and "speculators_model_type" not in config:
        layout = "speculators eagle" if reader is read_eagle1 else "speculators eagle3"
        stated = config if theta is None else with_theta(config, theta)
        eagle = stated.get(EAGLE_CONFIG) or {}
        ids = eagle.get(LAYER_IDS) or [] if isinstance(eagle, dict) else None
        if not isinstance(ids, list) or not all(type(each) is int for each in ids):
            raise JsonKeys(folder / "config.json", config).refuse(EAGLE_CONFIG, "must be an object with ids of layers")
        tensors, described = _as_eagle1(tensors) if reader is read_eagle1 else _as_eagle3(tensors, stated, eagle)
        kind = "qwen3" if any(name.endswith("q_norm.weight") for name in tensors) else "llama"
        layer = {key: stated[key] for key in LAYER_KEYS if stated.get(key) is not None}
        # Only the base is wanted, which depends on neither number.
        written = read_rope(JsonKeys(folder / "config.json", layer), 1, 4).theta
        layer = {"model_type": kind, "num_hidden_layers": 1, **layer, "rope_theta": written}
        kept = {key: value for key, value in {**stated, **eagle}.items() if key in HEAD_KEYS and value is not None}
        config = described | kept | {LAYER_CONFIG: layer}
    elif theta is not None:
        raise InvalidRequest("--theta", theta, "left out for a head that is not converted to another layout")
    out.mkdir(parents=True, exist_ok=True)
    # Copies, because tensors that share their memory cannot be written.
    held = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    try:
        save_file(held, out / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise InvalidRequest("OUT", str(out), f"a folder that can be written: {error}") from None
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    size = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
    return Converted(layout, len(held), size, written)


def unpickled(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's pickled weights, without rotary frequencies. Raises ModelRefused."""
    if not folder.is_dir():
        raise ModelRefused(f"{folder} is not a folder", folder=folder)
    found = sorted(path for path in folder.iterdir() if path.name.endswith(PICKLED))
    # Beside a model's own files a training run leaves others.
    files = [path for path in found if path.name.startswith("pytorch_model")] or found
    if not files:
        raise ModelRefused(f"{folder} has no {', '.join(PICKLED)} to convert", folder=folder)
    if len(files) > 1 and not files[0].name.startswith("pytorch_model"):
        names = ", ".join(path.name for path in files)
        raise ModelRefused(f"{folder} has {names}, and nobody can tell which one is the head", folder=folder)
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            held = torch.load(file, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError, KeyError) as error:
            message = f"{file} is damaged, or holds more than tensors, which could run code"
            raise ModelRefused(message, file=file) from error
        if not isinstance(held, dict) or not all(isinstance(each, Tensor) for each in held.values()):
            raise ModelRefused(f"{file} does not hold tensors by their names", file=file)
        twice = sorted(tensors.keys() & held.keys())
        if twice:
            raise ModelRefused(f"{file} holds {twice[0]}, which another file holds too", file=file)
        tensors |= {name: tensor for name, tensor in held.items() if not name.endswith("rotary_emb.inv_freq")}
    return tensors


def _as_eagle1(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors under the layout's names, and what its config says of them."""
    renamed = {}
    for name, tensor in tensors.items():
        begun = next((each for each in RENAMED if bare(name).startswith(each)), "")
        renamed[RENAMED.get(begun, "") + bare(name).removeprefix(begun)] = tensor
    return renamed, {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": "eagle",
        "speculators_config": _proposals("eagle"),
        "fusion_bias": "fusion_fc.bias" in renamed,
        "layernorms": "pre_lm_head_layernorm.weight" in renamed,
    }


def _as_eagle3(tensors: Mapping[str, Tensor], config: Json, eagle: Json) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors under the layout's names, and what its config says of them."""
    layer = layer_of(tensors)
    renamed = {
        f"layers.0.{bare(name).removeprefix(layer)}" if bare(name).startswith(layer) else bare(name): tensor
        for name, tensor in tensors.items()
    }
    # Speculators counts boundaries; the nested ids are of layers whose outputs are read.
    ids = [each + 1 for each in eagle[LAYER_IDS]] if eagle.get(LAYER_IDS) else config.get(LAYER_IDS)
    return renamed, {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": _proposals("eagle3"),
        "norm_before_fc": "input_norm.weight" in renamed,
        "fc_norm": "fc_norm.0.weight" in renamed,
        **({} if ids is None else {LAYER_IDS: ids}),
    }


def _proposals(algorithm: str) -> dict[str, Any]:
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        "verifier": {"name_or_path": None, "architectures": []},
    }
