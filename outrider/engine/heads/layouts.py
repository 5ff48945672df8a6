"""The layouts of feature heads: what each publisher calls its tensors and switches, and what they mean.

A switch that its tensors show too must agree with them; where config.json does not have it, the tensors decide.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.engine.heads.feature_checkpoint import (
    OFFSETS,
    REACHABLE,
    FeatureCheckpoint,
    FeatureFiles,
    StoredHead,
    check_feature_head,
)
from outrider.engine.heads.feature_head import Fuse
from outrider.engine.heads.head import TargetParts
from outrider.engine.models.json_keys import JsonKeys
from outrider.errors import ModelRefused
from outrider.model_files.safetensors_header import StoredTensor

LAYER_CONFIG, EAGLE_CONFIG = "transformer_layer_config", "eagle_config"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Of transformers' Llama and Qwen 3: speculators writes only what differs from the defaults.
DEFAULT_NUM_HEADS = 32
# Models whose layers are those of `FeatureHead`; speculators names the kind of layer by them.
LAYER_KINDS = ("llama", "qwen2", "qwen3", "mimo")

# Beginnings of names, and what they become. The longest one that fits is meant.
OUTER = {"embed_tokens.": "embedding.", "lm_head.": "head.", "norm.": "out_norm.", "d2t": OFFSETS, "t2d": REACHABLE}
LAYER = {f"{name}.": f"layer.{name}." for name in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")}
PAIR = OUTER | {
    "fc.": "fuse.",
    "fusion_fc.": "fuse.",
    # HASS and speculators; its relatives with three norms; NVIDIA.
    "embedding_layernorm.": "embedding_norm.",
    "hidden_states_layernorm.": "state_norm.",
    "pre_lm_head_layernorm.": "out_norm.",
    "embed_layernorm.": "embedding_norm.",
    "hidden_layernorm.": "layer.input_layernorm.",
    "lm_head_layernorm.": "out_norm.",
    "enorm.": "embedding_norm.",
    "hnorm.": "state_norm.",
}
WIDE = OUTER | {"fc.": "features.", "fc_norm.": "features.norms.", "input_norm.": "features.norm."}
WIDE_LAYER = LAYER | {"input_layernorm.": "embedding_norm.", "hidden_norm.": "state_norm."}
MTP_LAYER = LAYER | {
    "token_layernorm.": "embedding_norm.",
    "hidden_layernorm.": "state_norm.",
    "input_proj.": "fuse.",
    "final_layernorm.": "out_norm.",
}
ADAPTER = {"norm.": "out_norm."} | {f"layers.0.{name}": f"layer.{name}" for name in ("self_attn.", "input_layernorm.")}
# Of all checkpoints that there are; no config.json says it.
DEFAULT_EXIT_LAYER = 2
NORMS = frozenset({"embedding_norm.weight", "state_norm.weight", "out_norm.weight"})


def bare(name: str) -> str:
    """A tensor's name without the "model." that some publishers put before it."""
    return name.removeprefix("model.")


def layer_of(names: Collection[str]) -> str:
    """Prefix of the names of a head's one layer."""
    places = ("midlayer.", "transformer.", "mtp_layers.0.", "layers.0.")
    return next((place for place in places if any(bare(name).startswith(place) for name in names)), "layers.0.")


@dataclass(slots=True)
class HeadReading:
    """One head's files while its layout is read; gathers the notes."""

    folder: Path
    config: Mapping[str, Any]
    files: tuple[Path, ...]
    names: Mapping[str, str]
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, folder: Path, config: Mapping[str, Any], stored: Mapping[str, StoredTensor], names: Mapping[str, str]
    ) -> "HeadReading":
        """Gives every tensor the name of `feature_tensors`; raises ModelRefused where two would have the same."""
        files = tuple(sorted({tensor.file for tensor in stored.values()}))
        reading = cls(folder, config, files, names)
        for name, tensor in stored.items():
            begun = max((each for each in names if bare(name).startswith(each)), key=len, default=None)
            # Nothing reads a name with a space, so the check of the tensors refuses it.
            known = f"unknown {name}" if begun is None else names[begun] + bare(name).removeprefix(begun)
            if known in reading.tensors:
                raise tensor.refuse(f"is the same tensor as {reading.tensors[known].name}")
            reading.tensors[known] = tensor
        return reading

    @property
    def keys(self) -> JsonKeys:
        return JsonKeys(self.folder / "config.json", dict(self.config))

    def inside(self, name: str) -> JsonKeys:
        """An object inside config.json; empty where there is none."""
        values = self.config.get(name) or {}
        if not isinstance(values, dict):
            raise self.keys.refuse(name, f"is {values!r}, but must be an object")
        return JsonKeys(self.folder / "config.json", values, f"{name}.")

    def layer_keys(self) -> JsonKeys:
        """Keys of a model with one such layer, in speculators' files. Raises ModelRefused for layers of other kinds."""
        inner = self.inside(LAYER_CONFIG)
        kind = inner.values.get("model_type", "llama")
        if kind not in LAYER_KINDS:
            fault = f"is {kind!r}, whose layers a head does not have here: it must be one of {', '.join(LAYER_KINDS)}"
            raise inner.refuse("model_type", fault)
        if inner.values.get("num_attention_heads") is not None:
            return inner
        self.notes.append(f"num_attention_heads: {DEFAULT_NUM_HEADS} (default)")
        return JsonKeys(inner.path, inner.values | {"num_attention_heads": DEFAULT_NUM_HEADS}, inner.prefix)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def switch(self, sources: Sequence[JsonKeys], name: str, default: bool = False) -> bool:
        """A switch from the first object that has it."""
        source = next((keys for keys in sources if keys.values.get(name) is not None), None)
        value = default if source is None else source.flag(name)
        self.notes.append(f"{name}: {str(value).lower()}{' (default)' if source is None else ''}")
        return value

    def agreed(self, sources: Sequence[JsonKeys], name: str, found: bool) -> bool:
        """A switch that tensors show too; raises ModelRefused where it says otherwise than they do."""
        source = next((keys for keys in sources if keys.values.get(name) is not None), None)
        if source is not None and source.flag(name) != found:
            holding = "hold what it would switch on" if found else "do not hold what it switches on"
            raise source.refuse(name, f"is {str(not found).lower()}, but the files {holding}")
        self.notes.append(f"{name}: {str(found).lower()}{' (tensors)' if source is None else ''}")
        return found

    def boundaries(self, source: JsonKeys, name: str, shift: int, num_layers: int) -> tuple[int, ...]:
        """Boundaries of a target of so many layers that a list of ids means, each with the shift added to it."""
        ids = source.values.get(name)
        if not isinstance(ids, list) or not ids or not all(type(each) is int and each >= 0 for each in ids):
            raise source.refuse(name, f"is {ids!r}, but must be a list of layers")
        taps = tuple(each + shift for each in ids)
        if max(taps) > num_layers:
            raise source.refuse(name, f"is {ids!r}, but the target has {num_layers} layers")
        if num_layers in taps:
            fault = (
                f"is {ids!r}, but nobody can tell what was read behind layer {num_layers}, the last: before or after"
            )
            raise source.refuse(name, f"{fault} the final norm")
        self.notes.append(f"{name}: {ids}, {'outputs of layers' if shift else 'boundaries'}")
        return taps

    def files_of(self, keys: JsonKeys, method: str, taps: tuple[int, ...]) -> StoredHead:
        """Files that are still to be checked against the target."""
        return StoredHead(**self._facts(keys, method, taps))

    def _facts(self, keys: JsonKeys, method: str, taps: tuple[int, ...]) -> dict[str, Any]:
        return {
            "folder": self.folder,
            "config": self.config,
            "keys": keys,
            "files": self.files,
            "tensors": self.tensors,
            "spelling": {after: before for before, after in reversed(list(self.names.items()))},
            "method": method,
            "taps": taps,
            "notes": tuple(self.notes),
        }

    def found(
        self,
        keys: JsonKeys,
        method: str,
        taps: tuple[int, ...],
        fuse: Fuse,
        needed: Collection[str],
        *,
        normed_residual: bool = False,
        feeds_normed: bool = False,
    ) -> FeatureFiles:
        """Files of a feature head that are still to be checked against the target."""
        return FeatureFiles(
            **self._facts(keys, method, taps),
            fuse=fuse,
            needed=frozenset(needed),
            normed_residual=normed_residual,
            feeds_normed=feeds_normed,
        )


def one_layer(stored: Mapping[str, StoredTensor]) -> None:
    """Raises ModelRefused for a head of several layers, or one whose attention has latent keys."""
    for name, tensor in stored.items():
        layer = re.match(r"(mtp_)?layers\.(\d+)\.", bare(name))
        if layer and int(layer[2]) > 0:
            what = "module for multi-token prediction" if layer[1] else "layer"
            raise tensor.refuse(f"belongs to a second {what}, but only heads of one are served")
        if ".kv_a_proj_with_mqa." in name:
            raise tensor.refuse("belongs to latent attention (MLA), which is not served")


def read_eagle1(
    folder: Path, config: Mapping[str, Any], stored: Mapping[str, StoredTensor], target: TargetParts
) -> FeatureCheckpoint:
    """EAGLE 1 and 2, HASS: as their authors publish them, or as speculators once converted them."""
    one_layer(stored)
    is_speculators = "speculators_model_type" in config
    layer = {layer_of(stored) + name: known for name, known in LAYER.items()}
    reading = HeadReading.of(folder, config, stored, ({"fusion_fc.": "fuse."} if is_speculators else {}) | PAIR | layer)
    keys, sources = reading.keys, (reading.keys,)
    needed: set[str] = set()
    has_norm = reading.has("out_norm.weight")
    if is_speculators:
        keys = reading.layer_keys()
        reading.agreed(sources, "fusion_bias", reading.has("fuse.bias"))
        if reading.agreed(sources, "layernorms", has_norm):
            needed = {"embedding_norm.weight", "layer.input_layernorm.weight"}
    else:
        # Whatever "bias" says: its default is true, and heads without one leave it out all the same.
        reading.notes.append(f"bias: {str(reading.has('fuse.bias')).lower()} (tensors)")
    if reading.agreed(sources, "add_para_norm", reading.has("state_norm.weight")):
        needed |= {"embedding_norm.weight", "state_norm.weight"}
    reading.notes.append(f"input norm: {str(reading.has('layer.input_layernorm.weight')).lower()} (tensors)")
    # A state stands for what leaves the target's last norm; so what leaves the head's does, where it has one.
    reading.notes.append(f"last norm, and fed back from there: {str(has_norm).lower()} (tensors)")
    files = reading.found(keys, "eagle1", (target.num_layers,), Fuse.PAIR, needed, feeds_normed=has_norm)
    return check_feature_head(files, target)


def read_eagle3(
    folder: Path, config: Mapping[str, Any], stored: Mapping[str, StoredTensor], target: TargetParts
) -> FeatureCheckpoint:
    """EAGLE 3 and 3.1 of their authors, SpecForge, AngelSlim, speculators and NVIDIA's Model Optimizer."""
    one_layer(stored)
    layer = layer_of(stored)
    is_wide = f"{layer}hidden_norm.weight" in {bare(name) for name in stored}
    outer, inner = (WIDE, WIDE_LAYER) if is_wide else (PAIR, LAYER)
    reading = HeadReading.of(folder, config, stored, outer | {layer + name: known for name, known in inner.items()})
    keys = reading.layer_keys() if "speculators_model_type" in config else reading.keys
    if is_wide and keys.flag("tie_word_embeddings") and reading.has("embedding.weight"):
        reading.tensors.setdefault("head.weight", reading.tensors["embedding.weight"])
    sources = (reading.inside(EAGLE_CONFIG), reading.keys)
    reads_taps = reading.switch(sources, "use_aux_hidden_state", default=True)
    if reads_taps and not is_wide:
        raise ModelRefused(f"{folder} lacks the tensor {layer}hidden_norm.weight", folder=folder)
    needed = {"head.weight"} if reading.switch(sources, "has_lm_head") else set()
    if reading.switch(sources, "use_last_layernorm", default=True):
        needed.add("out_norm.weight")
    elif reading.has("out_norm.weight"):
        raise reading.tensors["out_norm.weight"].refuse("is there, though use_last_layernorm is false")
    if is_wide:
        taps = _taps(reading, target.num_layers) if reads_taps else (target.num_layers,)
        if not reads_taps and reading.has("features.weight"):
            raise reading.tensors["features.weight"].refuse("is there, though use_aux_hidden_state is false")
        # Both norms stand outside the layer, whatever the layer of a model would do.
        reading.agreed(sources, "use_input_layernorm_in_first_layer", found=True)
        reading.agreed(sources, "use_mtp_layernorm", found=False)
        before = reading.agreed(sources, "norm_before_fc", reading.has("features.norm.weight"))
        if reading.agreed(sources, "fc_norm", reading.has("features.norms.0.weight")) and before:
            raise reading.tensors["features.norms.0.weight"].refuse("is there beside norm_before_fc, which excludes it")
        needed |= {"embedding_norm.weight", "state_norm.weight"} | ({"features.weight"} if reads_taps else set())
    else:
        taps = (target.num_layers,)
        reading.agreed(sources, "norm_before_residual", found=False)
        reading.agreed(sources, "use_input_layernorm_in_first_layer", reading.has("layer.input_layernorm.weight"))
        if reading.agreed(sources, "use_mtp_layernorm", reading.has("state_norm.weight")):
            needed |= {"embedding_norm.weight", "state_norm.weight"}
    files = reading.found(
        keys,
        "eagle3",
        taps,
        Fuse.WIDE if is_wide else Fuse.PAIR,
        needed,
        normed_residual=is_wide and reading.switch(sources, "norm_before_residual"),
        # As for EAGLE 1, a state that stands for f is what leaves a norm.
        feeds_normed=reading.switch(sources, "norm_output", default=not is_wide and reading.has("out_norm.weight")),
    )
    return check_feature_head(files, target)


def _taps(reading: HeadReading, num_layers: int) -> tuple[int, ...]:
    """Boundaries of the target. Speculators writes those; elsewhere ids are of layers, whose outputs are meant."""
    nested = reading.inside(EAGLE_CONFIG)
    source, shift = (nested, 1) if nested.values.get(LAYER_IDS) is not None else (reading.keys, 0)
    ids = source.values.get(LAYER_IDS)
    if shift and reading.config.get(LAYER_IDS) is not None:
        raise reading.keys.refuse(LAYER_IDS, f"stands inside {EAGLE_CONFIG} too, and counts otherwise there")
    if ids is None:
        if num_layers < 2:
            raise source.refuse(LAYER_IDS, "is missing, and a target of one layer has no boundary inside")
        deep = (2, num_layers // 2, num_layers - 3)
        taps = deep if num_layers >= 6 else (1, max(num_layers // 2, 1), num_layers - 1)
        reading.notes.append(f"{LAYER_IDS}: missing (default)")
        return taps
    return reading.boundaries(source, LAYER_IDS, shift, num_layers)


def read_mtp(
    folder: Path, config: Mapping[str, Any], stored: Mapping[str, StoredTensor], target: TargetParts
) -> FeatureCheckpoint:
    """The layer for multi-token prediction of MiMo, often beside the model itself, or as speculators has them."""
    own = {name: tensor for name, tensor in stored.items() if "mtp_layers." in name}
    # A folder that holds the target too: its other tensors are the target's.
    if any(bare(name).startswith("layers.0.") for name in stored):
        stored = own
    one_layer(own)
    names = OUTER | {f"mtp_layers.0.{name}": known for name, known in MTP_LAYER.items()}
    del names["norm."]
    reading = HeadReading.of(folder, config, stored, names)
    is_speculators = "speculators_model_type" in config
    keys = reading.layer_keys() if is_speculators else reading.keys
    count = reading.keys.integer("num_nextn_predict_layers", 1)
    if count != 1:
        raise reading.keys.refuse("num_nextn_predict_layers", f"is {count}, but only heads of one module are served")
    order = Fuse.PAIR if is_speculators else Fuse.REVERSED
    reading.notes.append(f"order: {'[embedding; state]' if is_speculators else '[state; embedding]'}")
    reading.notes.append("state: what leaves the final norm, of the target and of the head (default)")
    needed = NORMS | {"layer.input_layernorm.weight"}
    files = reading.found(keys, "mtp", (target.num_layers,), order, needed, feeds_normed=True)
    return check_feature_head(files, target)


def read_kangaroo(
    folder: Path, config: Mapping[str, Any], stored: Mapping[str, StoredTensor], target: TargetParts
) -> FeatureCheckpoint:
    """The adapter of Kangaroo, which goes on from the target's lower layers; `exit_layer` in config.json is ours."""
    reading = HeadReading.of(folder, config, stored, ADAPTER)
    keys = reading.keys
    exit_layer = keys.integer("exit_layer", DEFAULT_EXIT_LAYER)
    if exit_layer >= target.num_layers:
        raise keys.refuse("exit_layer", f"is {exit_layer}, but the target has {target.num_layers} layers")
    reading.notes.append(f"exit_layer: {exit_layer}{' (default)' if config.get('exit_layer') is None else ''}")
    return check_feature_head(reading.found(keys, "kangaroo", (exit_layer,), Fuse.OWN, set()), target)
