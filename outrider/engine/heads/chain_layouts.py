"""The files of MLP speculators, Medusa, BPD and Hydra: which tensors they hold, under which names, and what is refused.

A checkpoint is a folder with config.json and safetensors. Everything is checked against the target before a tensor is
read: what is missing, misshapen or never read refuses the whole, because a head that is wrong in silence only
guesses badly. Keys have the defaults that their authors' code gives them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.engine.heads.chains import (
    BlockHeads,
    BlockParts,
    Branch,
    Cell,
    MlpSpeculator,
    PrefixConfig,
    PrefixLayer,
    ReluBlock,
    SiluBlock,
)
from outrider.engine.heads.head import Head, TargetParts
from outrider.engine.models.json_keys import JsonKeys, read_json
from outrider.engine.models.rope_keys import read_rope
from outrider.engine.models.transformer import Linear
from outrider.engine.models.weights import check_tensors, read_tensors
from outrider.engine.ops import Ops, Weight
from outrider.engine.ops.blocks import are_same, unpacked
from outrider.errors import ModelRefused
from outrider.model_files.safetensors_header import StoredTensor

Stored = Mapping[str, StoredTensor]
Shapes = dict[str, tuple[int, ...]]
Build = Callable[[dict[str, Tensor], TargetParts, Ops], Head]

# Far above any head's: what is refused is a number that alone would fill the memory with names.
MAX_HEADS = MAX_BLOCKS = 64
# Hydra's spelling.
PREFIX = "prefix_embeding_layer."
SOURCE = "config.json with this target"
# Snowflake's speculators have the same type, and only the first of its two kinds has these cells.
SPECULATORS = ("MLPSpeculatorPreTrainedModel", "ArcticMLPSpeculatorPreTrainedModel")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainCheckpoint:
    """A head that was found sound, before it is read."""

    method: str
    folder: Path
    notes: tuple[str, ...]
    """A line for each flag that was found or that has its default."""
    taps: tuple[int, ...]
    """Taps of the head; see HeadFacts."""
    stored: Stored
    """The tensors to read, by the names that `build` has for them."""
    build: Build

    def load(self, target: TargetParts, device: torch.device, dtype: torch.dtype, ops: Ops) -> tuple[Head, str]:
        """Reads the tensors, matrices in dtype; raises ModelRefused where their values do not fit."""
        files = sorted({tensor.file for tensor in self.stored.values()})
        config = read_json(self.folder / "config.json")
        tensors, digest = read_tensors(config, files, self.stored, device, dtype)
        head = self.build(tensors, target, ops)
        if tensors:
            raise ValueError(f"nothing reads {', '.join(sorted(tensors))}")
        return head, digest


def read_mlp_speculator(
    folder: Path, config: Mapping[str, Any], stored: Stored, target: TargetParts
) -> ChainCheckpoint:
    """IBM's accelerators, "model_type": "mlp_speculator". Raises ModelRefused."""
    keys = JsonKeys(folder / "config.json", dict(config))
    named = config.get("architectures") or []
    if any(name not in SPECULATORS for name in (named if isinstance(named, list) else [named])):
        raise keys.refuse("architectures", f"is {named!r}, but only the cells of {SPECULATORS[0]} are known")
    _agree(keys, emb_dim=target.hidden_size, vocab_size=target.vocab_size)
    count, is_tied = keys.integer("n_predict", 3, maximum=MAX_HEADS), keys.flag("tie_weights")
    inner_dim, scales_input = keys.integer("inner_dim", 0, minimum=0), keys.flag("scale_input")
    size = inner_dim or target.hidden_size
    stored = _stripped(folder, stored, "speculator.")
    shapes: Shapes = {}
    originals: dict[str, str] = {}
    for index in range(count):
        first = index if not is_tied else 0
        for name, original, shape in (
            (f"emb.{index}.weight", f"emb.{first}.weight", (target.vocab_size, size)),
            (f"proj.{index}.weight", f"proj.{max(first, min(index, 1))}.weight", (size, size)),
            (f"head.{index}.weight", f"head.{first}.weight", (target.vocab_size, size)),
            (f"ln.{index}.weight", f"ln.{first}.weight", (size,)),
            (f"ln.{index}.bias", f"ln.{first}.bias", (size,)),
        ):
            shapes[name], originals[name] = shape, original
    shapes["proj.0.weight"] = (size, target.hidden_size)
    required = {name: shapes[name] for name in originals.values()}
    check_tensors(folder, stored, required, shapes, SOURCE)

    def build(tensors: dict[str, Tensor], target: TargetParts, ops: Ops) -> Head:
        kept = {name: tensors.pop(name) for name in required}
        for name in [name for name in tensors if name in shapes]:
            if not torch.equal(tensors.pop(name), kept[originals[name]]):
                raise stored[name].refuse(f"differs from {originals[name]}, but tie_weights makes them one")
        names = ("emb.{}.weight", "proj.{}.weight", "ln.{}.weight", "ln.{}.bias", "head.{}.weight")
        products = {name: ops.stack([kept[name]]) for name in required if name.startswith(("proj", "head"))}
        parts: dict[str, Any] = kept | products
        cells = [Cell(*(parts[originals[name.format(index)]] for name in names)) for index in range(count)]
        return MlpSpeculator(cells, scales_input, target, ops)

    return ChainCheckpoint(
        method="mlp_speculator",
        folder=folder,
        notes=_notes(keys, n_predict=count, inner_dim=inner_dim, tie_weights=is_tied, scale_input=scales_input),
        taps=(target.num_layers,),
        stored=stored,
        build=build,
    )


def read_medusa(folder: Path, config: Mapping[str, Any], stored: Stored, target: TargetParts) -> ChainCheckpoint:
    """The Medusa authors' heads with matrices of their own, and those that share the target's. Raises ModelRefused."""
    keys = JsonKeys(folder / "config.json", dict(config))
    if any(name.startswith("model.") for name in stored):
        advice = "put the model and its heads into folders of their own"
        raise ModelRefused(
            f"{folder} holds a whole model with Medusa heads in it, which fit no other model: {advice}", folder=folder
        )
    stored = _stripped(folder, stored, "medusa_head.")
    num_layers = keys.integer("medusa_num_layers", 1, maximum=MAX_BLOCKS)
    # "medusa_num_heads" says 2 in files that hold 5, so the names are counted; of none, the first is found missing.
    indices = {match[1] for match in map(re.compile(r"(\d+)\.").match, stored) if match}
    count = min(max(len(indices), 1), MAX_HEADS)
    h, vocab_size = target.hidden_size, target.vocab_size
    outputs = [f"{index}.{num_layers}.weight" for index in range(count)]
    has_own = any(name in stored for name in outputs)
    required: Shapes = dict.fromkeys(outputs, (vocab_size, h)) if has_own else {}
    for name in (f"{index}.{layer}.linear" for index in range(count) for layer in range(num_layers)):
        required |= _linear(name, h, h)
    check_tensors(folder, stored, required, {}, SOURCE)

    def build(tensors: dict[str, Tensor], target: TargetParts, ops: Ops) -> Head:
        branches = []
        for index in range(count):
            blocks = [
                SiluBlock(Linear.take(ops, tensors, f"{index}.{layer}.", "linear")) for layer in range(num_layers)
            ]
            output = Linear.take(ops, tensors, f"{index}.", str(num_layers)) if has_own else None
            branches.append(Branch(blocks, output))
        return BlockHeads(BlockParts(method="medusa", tap=target.num_layers, branches=branches), target, ops)

    counted = f"{count} heads in the file, medusa_num_heads is {config.get('medusa_num_heads')}"
    matrices = "their own" if has_own else "the target's"
    return ChainCheckpoint(
        method="medusa",
        folder=folder,
        notes=(*_notes(keys, medusa_num_layers=num_layers), counted, f"the heads' output matrices are {matrices}"),
        taps=(target.num_layers,),
        stored=stored,
        build=build,
    )


def read_vllm_medusa(folder: Path, config: Mapping[str, Any], stored: Stored, target: TargetParts) -> ChainCheckpoint:
    """Medusa heads as vLLM names them, "model_type": "medusa"; they may know some tokens only. Raises ModelRefused."""
    keys = JsonKeys(folder / "config.json", dict(config))
    _agree(keys, hidden_size=target.hidden_size, vocab_size=target.vocab_size)
    if config.get("logit_scale") not in (None, 1):
        raise keys.refuse("logit_scale", f"is {config['logit_scale']!r}, but only logits without a scale are served")
    h, vocab_size = target.hidden_size, target.vocab_size
    flags = {
        "num_heads": keys.integer("num_heads", 5, maximum=MAX_HEADS),
        "num_hidden_layers": keys.integer("num_hidden_layers", 1, maximum=MAX_BLOCKS),
        "truncated_vocab_size": keys.integer("truncated_vocab_size", vocab_size, maximum=vocab_size),
        "medusa_fc_bias": keys.flag("medusa_fc_bias"),
        "original_lm_head": keys.flag("original_lm_head"),
    }
    count, num_layers, num_known = flags["num_heads"], flags["num_hidden_layers"], flags["truncated_vocab_size"]
    stored = _stripped(folder, stored, "medusa_heads.")
    has_map = num_known < vocab_size
    if ("token_map" in stored) != has_map:
        found = "has no token_map" if has_map else "has a token_map"
        raise keys.refuse("truncated_vocab_size", f"is {num_known} of {vocab_size} tokens, but the file {found}")
    outputs = [f"lm_heads.{index}.weight" for index in range(count)]
    if flags["original_lm_head"]:
        # Where the file has none, the original is at hand.
        outputs = [name for name in stored if name in ("lm_head.weight", "lm_heads.0.weight")][:1]
    required: Shapes = {}
    for name in outputs:
        is_whole = name in stored and stored[name].shape[:1] == (vocab_size,)
        required[name] = (vocab_size if is_whole else num_known, h)
    for name in (f"blocks.{index}.layers.{layer}" for index in range(count) for layer in range(num_layers)):
        required |= _linear(name, h, h) if flags["medusa_fc_bias"] else {f"{name}.weight": (h, h)}
    check_tensors(folder, {name: each for name, each in stored.items() if name != "token_map"}, required, {}, SOURCE)
    if has_map and (stored["token_map"].shape != (num_known,) or stored["token_map"].dtype not in ("I32", "I64")):
        fault = f"is {stored['token_map'].dtype} {list(stored['token_map'].shape)}"
        raise stored["token_map"].refuse(f"{fault}, but must be I32 or I64 [{num_known}]")

    def build(tensors: dict[str, Tensor], target: TargetParts, ops: Ops) -> Head:
        ids = _token_ids(stored["token_map"], tensors.pop("token_map"), vocab_size) if has_map else None
        matrices = [tensors.pop(name) for name in outputs]
        if ids is not None:
            matrices = [
                matrix.index_select(0, ids) if matrix.shape[0] == vocab_size else matrix
                for matrix in matrices or [unpacked(target.output)]
            ]
        own = [Linear(ops.stack([matrix]), None) for matrix in matrices]
        branches = []
        for index in range(count):
            names = [str(layer) for layer in range(num_layers)]
            blocks = [SiluBlock(Linear.take(ops, tensors, f"blocks.{index}.layers.", name)) for name in names]
            branches.append(Branch(blocks, own[index % len(own)] if own else None))
        parts = BlockParts(method="medusa", tap=target.num_layers, branches=branches, target_ids=ids)
        return BlockHeads(parts, target, ops)

    return ChainCheckpoint(
        method="medusa",
        folder=folder,
        notes=(*_notes(keys, **flags), f"output matrices: {', '.join(outputs) or 'the target has it'}"),
        taps=(target.num_layers,),
        stored=stored,
        build=build,
    )


def read_bpd(folder: Path, config: Mapping[str, Any], stored: Stored, target: TargetParts) -> ChainCheckpoint:
    """Blockwise parallel decoding in a layout of our own, "drafter": "bpd". Raises ModelRefused."""
    keys = JsonKeys(folder / "config.json", dict(config))
    _agree(keys, hidden_size=target.hidden_size, vocab_size=target.vocab_size)
    count, inner_size = keys.integer("num_heads", maximum=MAX_HEADS), keys.integer("intermediate_size")
    h = target.hidden_size
    required: Shapes = {}
    for index in range(count):
        required |= _linear(f"heads.{index}.up", inner_size, h) | _linear(f"heads.{index}.down", h, inner_size)
    check_tensors(folder, stored, required, {"lm_head.weight": (target.vocab_size, h)}, SOURCE)
    has_own = "lm_head.weight" in stored

    def build(tensors: dict[str, Tensor], target: TargetParts, ops: Ops) -> Head:
        output = Linear.take(ops, tensors, "", "lm_head") if has_own else None
        branches = []
        for index in range(count):
            up, down = (Linear.take(ops, tensors, f"heads.{index}.", name) for name in ("up", "down"))
            branches.append(Branch([ReluBlock(up, down)], output))
        return BlockHeads(BlockParts(method="bpd", tap=target.num_layers, branches=branches), target, ops)

    matrix = "its own" if has_own else "the target's"
    return ChainCheckpoint(
        method="bpd",
        folder=folder,
        notes=(*_notes(keys, num_heads=count, intermediate_size=inner_size), f"the output matrix is {matrix}"),
        taps=(target.num_layers,),
        stored=stored,
        build=build,
    )


def read_hydra(folder: Path, config: Mapping[str, Any], stored: Stored, target: TargetParts) -> ChainCheckpoint:
    """Hydra's heads, and Hydra++'s, which have a layer before them. Raises ModelRefused."""
    keys = JsonKeys(folder / "config.json", dict(config))
    kind = config.get("hydra_head_arch") or "mlp"
    if kind not in ("mlp", "prefix-mlp"):
        raise keys.refuse("hydra_head_arch", f'is {kind!r}, but must be "mlp" or "prefix-mlp"')
    flags = {
        "hydra_num_heads": keys.integer("hydra_num_heads", maximum=MAX_HEADS),
        "hydra_num_layers": keys.integer("hydra_num_layers", 1, maximum=MAX_BLOCKS),
        "grounded_heads": keys.flag("grounded_heads"),
        "hidden_state_offset": keys.integer("hidden_state_offset", 0, minimum=0, maximum=target.num_layers),
    }
    is_grounded, tap = bool(flags["grounded_heads"]), target.num_layers - flags["hidden_state_offset"]
    h, vocab_size, prefixed = target.hidden_size, target.vocab_size, kind == "prefix-mlp"
    # A Dropout stands before every block and matrix of a Hydra++, and is counted.
    places = [2 * layer + 1 if prefixed else layer for layer in range(flags["hydra_num_layers"])]
    outputs = [f"{index}.1" if prefixed else str(index) for index in range(flags["hydra_num_heads"])]
    # Of each block of a head its layers; only the first of a grounded one is wider than f.
    layers = [("linear", "res_connection") if is_grounded else ("linear",), *[("linear",)] * (len(places) - 1)]
    required: Shapes = {}
    for index, output in enumerate(outputs):
        required |= _linear(f"hydra_lm_head.{output}", vocab_size, h)
        for place, names in zip(places, layers, strict=True):
            width = (2 + index) * h if len(names) > 1 else h
            for name in names:
                required |= _linear(f"hydra_mlp.{index}.{place}.{name}", h, width)
    law = _prefix_law(keys, target) if prefixed else None
    if law is not None:
        required |= _prefix_shapes(keys, stored, law, h)
    # Whole modules were saved: the embedding that grounded heads read, and one of the layer, which nothing reads.
    copies = ("input_embed_fn.weight", f"{PREFIX}embed_tokens.weight") if prefixed else ("input_embed_fn.weight",)
    unread = copies[1:] if is_grounded else copies
    check_tensors(folder, stored, required, dict.fromkeys(copies, (vocab_size, h)), SOURCE)

    def build(tensors: dict[str, Tensor], target: TargetParts, ops: Ops) -> Head:
        branches = []
        for index, output in enumerate(outputs):
            blocks = [
                SiluBlock(Linear.take(ops, tensors, f"hydra_mlp.{index}.{place}.", *names), len(names) > 1)
                for place, names in zip(places, layers, strict=True)
            ]
            branches.append(Branch(blocks, Linear.take(ops, tensors, "hydra_lm_head.", output)))
        embedding: Weight | None = tensors.pop("input_embed_fn.weight", target.embedding) if is_grounded else None
        embedding = target.embedding if are_same(embedding, target.embedding) else embedding
        prefix = None if law is None else PrefixLayer(law, tensors, PREFIX, ops)
        parts = BlockParts(method="hydra", tap=tap, branches=branches, embedding=embedding, prefix=prefix)
        return BlockHeads(parts, target, ops)

    return ChainCheckpoint(
        method="hydra",
        folder=folder,
        notes=_notes(keys, hydra_head_arch=kind, **flags)
        + (() if law is None else _prefix_notes(keys, law))
        + tuple(f"nothing reads {name}" for name in unread if name in stored),
        taps=(tap,),
        stored={name: each for name, each in stored.items() if name not in unread},
        build=build,
    )


def _prefix_law(keys: JsonKeys, target: TargetParts) -> PrefixConfig:
    """The layer's sizes are the target's where its authors saved them at all, so they are asked for."""
    num_heads = keys.integer("num_attention_heads")
    num_kv_heads = keys.integer("num_key_value_heads", num_heads)
    head_dim = keys.integer("head_dim", max(target.hidden_size // num_heads, 1))
    if num_heads % num_kv_heads:
        raise keys.refuse("num_key_value_heads", f"is {num_kv_heads}, which does not divide {num_heads}")
    if head_dim % 2:
        raise keys.refuse("head_dim", f"is {head_dim}, but rotary embeddings need an even number")
    if keys.values.get("hidden_act") not in (None, "silu"):
        raise keys.refuse("hidden_act", f'is {keys.values["hidden_act"]!r}, but must be "silu"')
    max_positions = keys.integer("max_position_embeddings", target.context_len)
    rope = read_rope(keys, max_positions, head_dim)
    return PrefixConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_epsilon=keys.number("rms_norm_eps", 1e-6),
        rope=rope,
        context_len=min(rope.context_len(max_positions), target.context_len),
    )


def _prefix_shapes(keys: JsonKeys, stored: Stored, law: PrefixConfig, h: int) -> Shapes:
    layer, query_size, kv_size = f"{PREFIX}layers.0.", law.num_heads * law.head_dim, law.num_kv_heads * law.head_dim
    gate = stored.get(f"{layer}mlp.gate_proj.weight")
    inner_size = keys.integer("intermediate_size", gate.shape[0] if gate is not None and gate.shape else 1)
    sizes = {
        "self_attn.q_proj": (query_size, h),
        "self_attn.k_proj": (kv_size, h),
        "self_attn.v_proj": (kv_size, h),
        "self_attn.o_proj": (h, query_size),
        "mlp.gate_proj": (inner_size, h),
        "mlp.up_proj": (inner_size, h),
        "mlp.down_proj": (h, inner_size),
        "input_layernorm": (h,),
        "post_attention_layernorm": (h,),
    }
    return {f"{layer}{name}.weight": shape for name, shape in sizes.items()} | {f"{PREFIX}norm.weight": (h,)}


def _prefix_notes(keys: JsonKeys, law: PrefixConfig) -> tuple[str, ...]:
    sizes = {"num_attention_heads": law.num_heads, "num_key_value_heads": law.num_kv_heads, "head_dim": law.head_dim}
    return (
        *_notes(keys, **sizes, rms_norm_eps=law.norm_epsilon),
        f"the layer's positions: {law.rope}, {law.context_len} of them",
    )


def _linear(name: str, num_outputs: int, num_inputs: int) -> Shapes:
    return {f"{name}.weight": (num_outputs, num_inputs), f"{name}.bias": (num_outputs,)}


def _agree(keys: JsonKeys, **sizes: int) -> None:
    """Raises ModelRefused where config.json has other sizes than the target."""
    for key, size in sizes.items():
        if keys.values.get(key) not in (None, size):
            raise keys.refuse(key, f"is {keys.values[key]!r}, but the target has {size}")


def _stripped(folder: Path, stored: Stored, prefix: str) -> dict[str, StoredTensor]:
    """The tensors without a prefix that some writers give them all, and some but a few."""
    found = {name.removeprefix(prefix): tensor for name, tensor in stored.items()}
    if len(found) < len(stored):
        raise ModelRefused(f"{folder} holds a tensor both with and without the prefix {prefix}", folder=folder)
    return found


def _token_ids(stored: StoredTensor, ids: Tensor, vocab_size: int) -> Tensor:
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= vocab_size:
        raise stored.refuse(f"names tokens from {lowest} to {highest}, but the target has 0 to {vocab_size - 1}")
    if len(set(ids.tolist())) < ids.shape[0]:
        raise stored.refuse("names a token twice")
    return ids


def _notes(keys: JsonKeys, **flags: object) -> tuple[str, ...]:
    return tuple(
        f"{key} is {value}{' by default' if keys.values.get(key) is None else ''}" for key, value in flags.items()
    )


Reader = Callable[[Path, Mapping[str, Any], Stored, TargetParts], ChainCheckpoint]
CHAIN_LAYOUTS: tuple[tuple[Callable[[Mapping[str, Any]], bool], Reader], ...] = (
    (lambda config: config.get("model_type") == "mlp_speculator", read_mlp_speculator),
    (lambda config: config.get("model_type") == "medusa", read_vllm_medusa),
    (lambda config: "hydra_num_heads" in config, read_hydra),
    (lambda config: "medusa_num_heads" in config, read_medusa),
    (lambda config: config.get("drafter") == "bpd", read_bpd),
)
"""Readers with the config.json that each belongs to; the first that fits."""
