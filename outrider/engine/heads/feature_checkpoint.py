"""A feature head's files under the names of `feature_tensors`: checked against the target, then read.

What a layout's reader found goes through one check, so that every layout refuses the same faults in the same words.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.engine.heads.block_head import BlockHeadConfig
from outrider.engine.heads.feature_head import FeatureHead, FeatureHeadConfig, Fuse, feature_tensors
from outrider.engine.heads.head import Head, TargetParts
from outrider.engine.models.json_keys import JsonKeys
from outrider.engine.models.rope_keys import read_rope
from outrider.engine.models.weights import FILE_DTYPES, read_tensors
from outrider.engine.ops import Ops
from outrider.engine.ops.blocks import are_same
from outrider.errors import ModelRefused
from outrider.model_files.safetensors_header import StoredTensor

# What transformers gives a Llama whose config.json does not say.
DEFAULT_CONTEXT_LEN, DEFAULT_EPSILON = 2048, 1e-6
OFFSETS, REACHABLE = "d2t", "t2d"
OFFSET_DTYPES, REACHABLE_DTYPES = ("I64", "I32"), ("BOOL", "U8")
TOGETHER = (
    tuple(f"layer.self_attn.{name}_proj.bias" for name in "qkv"),
    ("layer.self_attn.q_norm.weight", "layer.self_attn.k_norm.weight"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredHead:
    """Files of a head that reads features, in any layout; nothing of them is checked against the target."""

    folder: Path
    config: Mapping[str, Any]
    """config.json, as it is to be understood."""
    keys: JsonKeys
    """Keys with the sizes of its layer."""
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]
    """Tensors by the names that are checked, and d2t and t2d; unknown ones have names that are never read."""
    spelling: Mapping[str, str]
    """Beginnings of those names in the layout."""
    method: str
    taps: tuple[int, ...]
    notes: tuple[str, ...] = ()

    def spelled(self, name: str) -> str:
        """Name of a tensor in the layout."""
        begun = max((each for each in self.spelling if name.startswith(each)), key=len, default="")
        return f"{self.spelling.get(begun, '')}{name.removeprefix(begun)}"

    def lacking(self, name: str) -> ModelRefused:
        spelled = self.spelled(name)
        return ModelRefused(f"{self.folder} lacks the tensor {spelled}", folder=self.folder, tensor=spelled)

    def shape(self, name: str, num_dims: int = 2) -> tuple[int, ...]:
        """Shape of a tensor that must be there; raises ModelRefused."""
        if name not in self.tensors:
            raise self.lacking(name)
        shape = self.tensors[name].shape
        if len(shape) != num_dims:
            raise self.tensors[name].refuse(f"has the shape {list(shape)}, but must have {num_dims} dimensions")
        return shape


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureFiles(StoredHead):
    """Files of a head of one layer."""

    fuse: Fuse
    needed: frozenset[str] = frozenset()
    """Tensors that this head must have, though others need not."""
    normed_residual: bool = False
    feeds_normed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureCheckpoint:
    """A head that reads features and fits its target; see outrider.engine.heads.checkpoint.HeadCheckpoint."""

    files: StoredHead
    law: FeatureHeadConfig | BlockHeadConfig
    draft_vocab_size: int
    notes: tuple[str, ...]
    make: Callable[..., Head] = FeatureHead
    """Makes it of its settings and tensors, the target's parts and operations."""

    @property
    def method(self) -> str:
        return self.law.method

    @property
    def folder(self) -> Path:
        return self.files.folder

    @property
    def taps(self) -> tuple[int, ...]:
        return self.law.taps

    def load(self, target: TargetParts, device: torch.device, dtype: torch.dtype, ops: Ops) -> tuple[Head, str]:
        """A tensor of the head's that is the target's, bit by bit, is dropped for the target's."""
        read, digest = read_tensors(self.files.config, self.files.files, self.files.tensors, device, dtype)
        vocabulary = {name: read.pop(name).cpu() for name in (OFFSETS, REACHABLE) if name in read}
        # The target's id of every id of the head's.
        places, vocab_size = torch.arange(self.draft_vocab_size), target.vocab_size
        offsets, reachable = vocabulary.get(OFFSETS), vocabulary.get(REACHABLE)
        ids = places if offsets is None else places + offsets.long()
        if not bool((ids.diff() > 0).all()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
            fault = f"does not lead to rising ids below {vocab_size}: it must hold offsets, so that i means i + d2t[i]"
            raise self.files.tensors[OFFSETS].refuse(fault)
        is_whole = self.draft_vocab_size == vocab_size
        # Heads of the whole vocabulary come with zeros, too.
        is_map = reachable is not None and not (is_whole and not reachable.any())
        if reachable is not None and is_map and not torch.equal(reachable.nonzero()[:, 0], ids):
            raise self.files.tensors[REACHABLE].refuse(f"marks other ids than the {len(ids)} of the head")
        kept = {} if is_whole else {"target_ids": ids.to(device)}
        for name, tensor in read.items():
            shared = {"embedding.weight": target.embedding, "head.weight": target.output}.get(name)
            if not are_same(tensor, shared):
                kept[name] = tensor
        return self.make(self.law, kept, target, ops), digest


def check_feature_head(files: FeatureFiles, target: TargetParts) -> FeatureCheckpoint:
    """The head of these files on this target; raises ModelRefused about anything that does not fit."""
    notes = list(files.notes)
    law, intermediate_size = _read_law(files, target, notes)
    is_narrow = law.hidden_size != target.hidden_size
    if is_narrow and "features.weight" not in files.tensors:
        fault = f"is {law.hidden_size}, but the target's is {target.hidden_size}, and no tensor leads to the head's"
        raise files.keys.refuse("hidden_size", fault)
    draft_vocab_size = draft_vocabulary(files, target, law.hidden_size)
    sizes = law, intermediate_size, target.hidden_size, target.vocab_size, draft_vocab_size
    required, optional = feature_tensors(*sizes)
    required |= {name: optional[name] for name in files.needed}
    check_head_tensors(files, target, required, optional)
    notes += of_whose_vocabulary(files, target, draft_vocab_size)
    return FeatureCheckpoint(files=files, law=law, draft_vocab_size=draft_vocab_size, notes=tuple(notes))


def of_whose_vocabulary(files: StoredHead, target: TargetParts, draft_vocab_size: int) -> list[str]:
    """Notes about a head's matrices and ids. Raises ModelRefused about tensors that say which ids it knows."""
    kinds = ((OFFSETS, OFFSET_DTYPES, draft_vocab_size), (REACHABLE, REACHABLE_DTYPES, target.vocab_size))
    for name, dtypes, length in kinds:
        tensor = files.tensors.get(name)
        if tensor is None:
            continue
        if tensor.shape != (length,):
            raise tensor.refuse(f"has the shape {list(tensor.shape)}, but must have {[length]}")
        if tensor.dtype not in dtypes:
            raise tensor.refuse(f"has the type {tensor.dtype}, but must have one of {', '.join(dtypes)}")
    matrices = {"embed_tokens": "embedding.weight", "lm_head": "head.weight"}
    notes = [
        f"{called}: {'of the head' if name in files.tensors else 'of the target'}" for called, name in matrices.items()
    ]
    return [*notes, f"vocabulary: {draft_vocab_size} of {target.vocab_size} ids"]


def _read_law(files: FeatureFiles, target: TargetParts, notes: list[str]) -> tuple[FeatureHeadConfig, int]:
    """Settings of the head, and the size inside the multilayer perceptron."""
    keys = files.keys
    activation = keys.values.get("hidden_act", "silu")
    if activation != "silu":
        raise keys.refuse("hidden_act", f'is {activation!r}, but must be "silu"')
    if keys.flag("use_sliding_window"):
        raise keys.refuse("use_sliding_window", "is true, but heads with windows are not served")
    for name, wanted in (("vocab_size", target.vocab_size), ("target_hidden_size", target.hidden_size)):
        source = keys if keys.values.get(name) is not None else JsonKeys(keys.path, dict(files.config))
        if source.integer(name, wanted) != wanted:
            raise source.refuse(name, f"is {source.values[name]}, but the target has {wanted}")

    def size(key: str, name: str, unit: int = 1) -> int:
        # Files that leave out what is a default of somebody's leave it to the tensors.
        notes.extend([] if keys.values.get(key) is not None else [f"{key}: {files.shape(name)[0] // unit} (tensors)"])
        return keys.integer(key, max(files.shape(name)[0] // unit, 1))

    num_heads = keys.integer("num_attention_heads")
    head_dim = size("head_dim", "layer.self_attn.q_proj.weight", num_heads)
    num_kv_heads = size("num_key_value_heads", "layer.self_attn.k_proj.weight", head_dim)
    if num_heads % num_kv_heads:
        raise keys.refuse("num_key_value_heads", f"is {num_kv_heads}, which does not divide {num_heads}")
    if head_dim % 2:
        raise keys.refuse("head_dim", f"is {head_dim}, but rotary embeddings need an even number")
    max_positions = keys.integer("max_position_embeddings", DEFAULT_CONTEXT_LEN)
    rope = read_rope(keys, max_positions, head_dim)
    context_len = min(rope.context_len(max_positions), target.context_len)
    places = (keys.values, keys.values.get("rope_scaling"), keys.values.get("rope_parameters"))
    is_given = any(isinstance(place, dict) and place.get("rope_theta") is not None for place in places)
    notes += [
        f"rope_theta: {rope.theta:g}{'' if is_given else ' (default)'}",
        f"rope_scaling: {type(rope).__name__}",
        f"taps: {', '.join(map(str, files.taps))}",
        f"context: {context_len} positions",
    ]
    law = FeatureHeadConfig(
        method=files.method,
        taps=files.taps,
        hidden_size=size("hidden_size", "layer.self_attn.o_proj.weight"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_epsilon=keys.number("rms_norm_eps", DEFAULT_EPSILON),
        rope=rope,
        context_len=context_len,
        fuse=files.fuse,
        normed_residual=files.normed_residual,
        feeds_normed=files.feeds_normed,
    )
    return law, 0 if files.fuse is Fuse.OWN else size("intermediate_size", "layer.mlp.gate_proj.weight")


def draft_vocabulary(files: StoredHead, target: TargetParts, hidden_size: int) -> int:
    """Number of ids that a head of this width knows. Raises ModelRefused."""
    keys = JsonKeys(files.keys.path, dict(files.config))
    given = keys.integer("draft_vocab_size", 0, minimum=0) or None
    if "head.weight" not in files.tensors:
        # Where the widths differ the target's matrix would not do either.
        if given not in (None, target.vocab_size) or hidden_size != target.hidden_size:
            raise files.lacking("head.weight")
        return target.vocab_size
    found = files.shape("head.weight")[0]
    if not 1 <= found <= target.vocab_size:
        fault = f"has {found} rows, but the target has {target.vocab_size} ids"
        raise files.tensors["head.weight"].refuse(fault)
    if given not in (None, found):
        raise keys.refuse("draft_vocab_size", f"is {given}, but {files.spelled('head.weight')} has {found} rows")
    return found


Shapes = Mapping[str, tuple[int, ...]]


def check_head_tensors(files: StoredHead, target: TargetParts, required: Shapes, optional: Shapes) -> None:
    """Raises ModelRefused unless a head has the tensors that it must have, and besides them only optional ones."""
    width = optional.get("embedding.weight")
    if width is not None and width[1] != target.hidden_size:
        # The target cannot lend it; nor the other matrix, which is there already.
        required = {**required, "embedding.weight": width}
    stored = {name: tensor for name, tensor in files.tensors.items() if name not in (OFFSETS, REACHABLE)}
    for name, tensor in stored.items():
        wanted = required.get(name, optional.get(name))
        if wanted is None:
            raise tensor.refuse("is no tensor of this layout")
        if tensor.shape != wanted:
            fault = f"has the shape {list(tensor.shape)}, but config.json and the target ask for {list(wanted)}"
            raise tensor.refuse(fault)
        if tensor.dtype not in FILE_DTYPES:
            raise tensor.refuse(f"has the type {tensor.dtype}, but must have one of {', '.join(FILE_DTYPES)}")
    missing = sorted(required.keys() - stored.keys())
    tap_norms = tuple(name for name in optional if name.startswith("features.norms."))
    for group in (*TOGETHER, tap_norms):
        missing += [name for name in group if name not in stored] if any(name in stored for name in group) else []
    if missing:
        raise files.lacking(missing[0])
