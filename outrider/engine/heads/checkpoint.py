"""From the folder of a drafting head to the head: which layout it has, and what is refused by name.

Only config.json and the headers of safetensors files are read here. Every fault is found before anything is loaded, and
is one sentence (outrider.errors.ModelRefused).
"""

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from outrider.engine.heads.block_layouts import read_dflash
from outrider.engine.heads.chain_layouts import CHAIN_LAYOUTS
from outrider.engine.heads.head import Head, TargetParts
from outrider.engine.heads.layouts import LAYER_CONFIG, bare, read_eagle1, read_eagle3, read_kangaroo, read_mtp
from outrider.engine.models.json_keys import FLOAT32_MAX, JsonKeys, read_json
from outrider.engine.models.weights import stored_tensors, weight_files
from outrider.engine.ops import Ops
from outrider.errors import ModelRefused
from outrider.model_files.drafter_layouts import DSPARK, NOT_SERVED, P_EAGLE, is_dflash, refused_drafter
from outrider.model_files.safetensors_header import StoredTensor

# What a head's file is called that lies beside its model.
HEAD_FILES = ("medusa_lm_head.safetensors", "hydra_lm_head.safetensors")
PICKLED = (".bin", ".pt", ".pth")


class HeadCheckpoint(Protocol):
    """A head that fits its target, and can be loaded."""

    @property
    def method(self) -> str:
        """Name of the method; see HeadFacts."""

    @property
    def folder(self) -> Path: ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Taps of the head; see HeadFacts."""

    @property
    def notes(self) -> tuple[str, ...]:
        """A line for each switch that was found or has its default, for instance "rope_theta: 10000 (default)"."""

    def load(self, target: TargetParts, device: torch.device, dtype: torch.dtype, ops: Ops) -> tuple[Head, str]:
        """Reads the tensors, matrices in dtype and vectors in float32. Raises ModelRefused about their values.

        Returns the head and the hash of its files; see outrider.engine.models.weights.read_tensors.
        """


Reader = Callable[[Path, Mapping[str, Any], Mapping[str, StoredTensor], TargetParts], HeadCheckpoint]
"""Reads a head of one layout: its folder, config.json, its tensors by their names, the target. Raises ModelRefused."""


class Layout(NamedTuple):
    """A layout of files, with the test that recognises it and its reader."""

    detects: Callable[[Mapping[str, Any], Collection[str]], bool]
    """Test of config.json and the names of the tensors."""
    read: Reader
    is_rotary: bool = False
    """Whether its heads have positions, so that there is a theta to override."""


def read_head(folder: Path, target: TargetParts, theta: float | None = None) -> HeadCheckpoint:
    """The head of a folder for this target; nothing large is read. Raises ModelRefused with one sentence.

    theta replaces the base of the head's rotary embedding, which some publishers declare wrongly.
    """
    config = read_json(folder / "config.json")
    if config.get("quantization_config") is not None:
        keys = JsonKeys(folder / "config.json", config)
        raise keys.refuse("quantization_config", "is set, but only unquantized weights are served")
    refused = refused_drafter(config, is_head=True)
    if refused is not None:
        raise ModelRefused(f"{folder} holds {refused}", folder=folder)
    stored = {tensor.name: tensor for tensor in stored_tensors(head_files(folder))}
    layout = next(layout for layout in LAYOUTS if layout.detects(config, stored.keys()))
    if theta is not None:
        if not 0 < theta <= FLOAT32_MAX:
            raise ModelRefused(f"theta is {theta:g}, but must be a positive number", theta=theta)
        config = with_theta(config, theta)
    checkpoint = layout.read(folder, config, stored, target)
    if theta is not None and not layout.is_rotary:
        fault = f"({checkpoint.method}) has no rotary embedding, so theta must be left out"
        raise ModelRefused(f"{folder} {fault}", folder=folder, theta=theta)
    return checkpoint


def head_files(folder: Path) -> list[Path]:
    """The safetensors files of a head: as of a model, or the only one, whatever its name. Raises ModelRefused."""
    if not folder.is_dir():
        raise ModelRefused(f"{folder} is not a folder", folder=folder)
    names = sorted(path.name for path in folder.iterdir())
    found = [name for name in names if name.endswith(".safetensors")]
    if not found:
        pickled = next((name for name in names if name.endswith(PICKLED)), None)
        if pickled is None:
            raise ModelRefused(f"{folder} has no safetensors files", folder=folder)
        advice = f"`outrider convert-head {folder} OUT` writes what is in it as safetensors"
        raise ModelRefused(f"{folder / pickled} is pickled, which can run code: {advice}", file=folder / pickled)
    own = [name for name in found if name in HEAD_FILES]
    is_alone = len(found) == 1 and "model.safetensors.index.json" not in names
    return [folder / (own or found)[0]] if own or is_alone else weight_files(folder)


def with_theta(config: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """A head's config.json with another base of its rotary embedding, wherever it had one."""
    changed = dict(config) | {"rope_theta": theta}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(changed.get(name), dict):
            changed[name] = {key: value for key, value in changed[name].items() if key != "rope_theta"}
    if isinstance(config.get(LAYER_CONFIG), dict):
        changed[LAYER_CONFIG] = with_theta(config[LAYER_CONFIG], theta)
    return changed


def refuse(reason: str) -> Reader:
    """The reader of a layout that is known and not served."""

    def read(
        folder: Path, config: Mapping[str, Any], stored: Mapping[str, StoredTensor], target: TargetParts
    ) -> NoReturn:
        raise ModelRefused(f"{folder} holds {reason}", folder=folder)

    return read


def says(fits: Callable[[Mapping[str, Any]], bool]) -> Callable[[Mapping[str, Any], Collection[str]], bool]:
    """A test for a layout that is known by config.json alone."""
    return lambda config, _: fits(config)


def is_type(*names: str) -> Callable[[Mapping[str, Any], Collection[str]], bool]:
    """A test for checkpoints that name their kind for speculators."""
    return lambda config, _: config.get("speculators_model_type") in names


def names_match(pattern: str) -> Callable[[Mapping[str, Any], Collection[str]], bool]:
    """Whether the name of some tensor, without "model." before it, matches."""
    compiled = re.compile(pattern)
    return lambda _, names: any(compiled.match(bare(name)) for name in names)


def _has_other_cells(config: Mapping[str, Any], names: Collection[str]) -> bool:
    architectures = config.get("architectures")
    stated = (config.get("model_type"), *(architectures if isinstance(architectures, list) else ()))
    return any(word in str(each).lower() for each in stated for word in ("gumiho", "arctic", "mlpvariant"))


def _is_attention_alone(config: Mapping[str, Any], names: Collection[str]) -> bool:
    parts = ("layers.0.self_attn.", "layers.0.input_layernorm.", "norm.")
    return bool(names) and all(bare(name).startswith(parts) for name in names)


PARD = "a PARD draft, which is a model of its own: name it with --draft"
GATED = "an MTP layer of Qwen3-Next or Qwen3.5, whose attention is gated and whose norms are centred at zero"
LATENT = "an MTP layer of DeepSeek-V3 or GLM-4.5, which has latent attention (MLA) and experts, which are not served"

# The first that detects a checkpoint reads it.
LAYOUTS: tuple[Layout, ...] = (
    Layout(
        names_match(r"(_orig_mod|_fsdp_wrapped_module|module)\.|.*\b_flat_param"),
        refuse("a training run's state, with names of its wrappers: export the head first"),
    ),
    Layout(is_type("eagle"), read_eagle1, is_rotary=True),
    Layout(is_type("eagle3"), read_eagle3, is_rotary=True),
    Layout(is_type("mtp"), read_mtp, is_rotary=True),
    Layout(says(is_dflash), read_dflash, is_rotary=True),
    Layout(
        lambda config, _: config.get("speculators_model_type") is not None,
        refuse("a speculators_model_type that is not served: it must be one of eagle, eagle3, mtp, dflash"),
    ),
    *(Layout(says(fits), read) for fits, read in CHAIN_LAYOUTS),
    Layout(names_match(r"mask_hidden$"), refuse(f"{P_EAGLE}: {NOT_SERVED}")),
    Layout(names_match(r"markov_head\."), refuse(f"{DSPARK}: {NOT_SERVED}")),
    Layout(lambda config, _: config.get("pard_token") is not None, refuse(PARD)),
    Layout(_has_other_cells, refuse("a Gumiho or Arctic speculator, whose cells are others than their names say")),
    Layout(names_match(r"mtp_layers\."), read_mtp, is_rotary=True),
    Layout(names_match(r"mtp\.(pre_fc_norm|fc|norm|layers)"), refuse(GATED)),
    Layout(names_match(r"layers\.\d+\.(enorm|eh_proj)\."), refuse(LATENT)),
    Layout(names_match(r"midlayer\.|layers\.0\.hidden_norm\.|d2t$"), read_eagle3, is_rotary=True),
    Layout(names_match(r"fc\.weight$"), read_eagle1, is_rotary=True),
    Layout(_is_attention_alone, read_kangaroo, is_rotary=True),
    Layout(lambda _, __: True, refuse("no drafting head of a layout that is known here")),
)
