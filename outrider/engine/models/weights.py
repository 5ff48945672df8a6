"""From the name of a model to its tensors: a folder or the snapshot of a hub id, read as safetensors only.

Pickled weights can run code, and stay closed. What was downloaded once is used without network. Everything that can be
wrong is found in the files' headers, before anything large is allocated, and is one sentence that says what to do.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from blake3 import blake3
from torch import Tensor

from outrider.engine.models.config import ModelConfig
from outrider.engine.models.experts import EXPERTS, ROUTER, ExpertRooms, file_shapes
from outrider.engine.models.json_keys import JsonKeys, read_json
from outrider.engine.models.reading import FileSpan, read_pieces
from outrider.engine.ops import Ops, Weight
from outrider.engine.ops.blocks import BlockMatrix
from outrider.engine.ops.native import NativeOps
from outrider.errors import ModelRefused
from outrider.model_files.gguf.files import IGNORED, HubName, cached_gguf, fetch_file, fetch_gguf, gguf_in, part_names
from outrider.model_files.gguf.header import BLOCK_DTYPES
from outrider.model_files.gguf.types import OUTPUTS
from outrider.model_files.safetensors_header import BLOCKS, ITEM_BITS, SCALES, StoredTensor, read_header
from outrider.model_files.stamp import Stamp

# How weights are kept in memory, and the type in which they are read for that; None as they are in the file, in blocks.
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int8": torch.bfloat16,
    "int4": torch.bfloat16,
    **dict.fromkeys(BLOCK_DTYPES),
}
KV_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
"""Types of keys and values on the CPU."""
# What goes with blocks, in a head for instance, is read as this.
BESIDE_BLOCKS = torch.bfloat16
AUTO = "auto"
"""Stands for what keeps a model's blocks, where it has some and the CPU computes with them; elsewhere for bfloat16."""
PACKED_BITS = {"int8": 8, "int4": 4}
NUMERICS = {"int4": "int4.2"}
"""Names in the numerics id of types whose numbers were made by other rules in earlier versions."""
FILE_DTYPES = ("BF16", "F16", "F32")
BYTES = ("U8",)
TORCH_DTYPES = {
    **{"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32},
    **{"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool},
}
EMBEDDING = "model.embed_tokens.weight"
# What a hub is asked for first.
PATTERNS = ["*.json", "*.safetensors", "*.jinja"]

Shapes = Mapping[str, tuple[int, ...]]

# Names of matrices and norms that some families have.
STACKED_HEADS, STACKED_GATE = "qkv_proj", "gate_up_proj"
NORM_BEHIND, NORM_BEFORE_MLP = "post_attention_layernorm", "pre_feedforward_layernorm"
NORM_AFTER_MLP = "post_feedforward_layernorm"
# A vector that has no layer of its own.
SINKS = "self_attn.sinks"


def resolve(name_or_path: str) -> Path:
    """The local folder or GGUF file of a model: the path itself, or a hub id's snapshot, downloaded when not cached.

    A hub id is `org/name` or `org/name@revision`, and may have `:FILE.gguf` after it; safetensors go first where a
    place has both. Raises ModelRefused when there is none of these, when a folder has no safetensors weights, and when
    it has several GGUF files instead.
    """
    path = Path(name_or_path).expanduser()
    # Path's own questions raise where a name is too long for the file system.
    gguf = gguf_in(path)
    if gguf is None and not os.path.isdir(path):
        if path.is_absolute() or name_or_path.startswith((".", "~")) or os.path.exists(path):
            raise ModelRefused(f"{name_or_path} is not a folder and not a .gguf file", model=name_or_path)
        path = _cached(name_or_path) or _downloaded(name_or_path)
        gguf = gguf_in(path)
    if gguf is None:
        weight_files(path)
    return gguf or path


def _cached(name: str) -> Path | None:
    hub = HubName.parse(name)
    try:
        if hub.file is not None:
            return cached_gguf(name, huggingface_hub.snapshot_download)
        folder = _snapshot(hub, local_files_only=True)
    except huggingface_hub.errors.LocalEntryNotFoundError:
        return None
    except huggingface_hub.errors.HFValidationError:
        raise ModelRefused(f"{name} is neither a folder nor the id of a model on the hub", model=name) from None
    try:
        # A download that broke off leaves a folder too.
        return gguf_in(folder) or (folder if weight_files(folder) else None)
    except ModelRefused:
        return None


def _downloaded(name: str) -> Path:
    hub = HubName.parse(name)
    try:
        if hub.file is not None:
            return fetch_file(hub, huggingface_hub.snapshot_download)
        folder = _snapshot(hub, local_files_only=False)
        has_safetensors = any(folder.glob("*.safetensors"))
        return folder if has_safetensors else fetch_gguf(name, huggingface_hub.snapshot_download) or folder
    except huggingface_hub.errors.GatedRepoError as error:
        advice = "accept its conditions on its page and set HF_TOKEN to a token of that account"
        raise ModelRefused(f"{name} is a gated model of the hub: {advice}", model=name) from error
    except huggingface_hub.errors.RepositoryNotFoundError as error:
        advice = "check the id, or set HF_TOKEN if the model is private"
        raise ModelRefused(f"{name} is neither a folder here nor a model of the hub: {advice}", model=name) from error
    except huggingface_hub.errors.RevisionNotFoundError as error:
        raise ModelRefused(f"{name} names a revision that the hub does not have", model=name) from error
    except huggingface_hub.errors.LocalEntryNotFoundError as error:
        is_offline = isinstance(error.__cause__, huggingface_hub.errors.OfflineModeIsEnabled)
        reason = "HF_HUB_OFFLINE forbids to download it" if is_offline else "the hub cannot be reached"
        where = "on a machine with network and copy its cache here, or set HF_HOME to where the cache is"
        message = f"{name} is neither a folder here nor downloaded, and {reason}: run `{hub.command}` {where}"
        raise ModelRefused(message, model=name) from error
    except (OSError, ValueError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(". ")
        message = f"{name} is not a folder here, and downloading it as a hub id failed: {reason}"
        raise ModelRefused(message, model=name) from error


def _snapshot(hub: HubName, local_files_only: bool) -> Path:
    kept: dict[str, Any] = {"allow_patterns": PATTERNS, "ignore_patterns": IGNORED}
    return Path(
        huggingface_hub.snapshot_download(
            hub.model_id, revision=hub.revision, local_files_only=local_files_only, **kept
        )
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, one or as many as its index names, in name order; raises ModelRefused.

    Without an index they are the parts that call themselves parts of one model.
    """
    index = folder / "model.safetensors.index.json"
    shards = sorted(path.name for path in folder.glob("model-*-of-*.safetensors"))
    # As in transformers the single file goes first where a folder has both; hf_models must not read another one.
    if (folder / "model.safetensors").is_file() or not (index.exists() or shards):
        names = ["model.safetensors"]
    elif index.exists():
        keys = JsonKeys(index, read_json(index))
        weight_map = keys.values.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise keys.refuse("weight_map", "must map tensor names to files")
        names = sorted({str(name) for name in weight_map.values()})
        # A name with a path could point anywhere on the machine.
        stray = next((name for name in names if Path(name).name != name or not name.endswith(".safetensors")), None)
        if stray is not None:
            raise keys.refuse("weight_map", f"names {stray!r}, which is not a safetensors file of this folder")
    else:
        names = part_names(shards[0])
        # Another number of parts is another model's, or what is left of an earlier one.
        stray = next((name for name in shards if name not in names), None)
        if stray is not None:
            message = f"{folder} has {shards[0]} and {stray}, but no {index.name} that says which are the model's"
            raise ModelRefused(message, file=index)
    missing = next((name for name in names if not (folder / name).is_file()), None)
    if missing is not None:
        pickled = any(path.suffix in (".bin", ".pt", ".pth") for path in folder.iterdir())
        reason = ", and pickled weights are not loaded because they can run code" if pickled else ""
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        reason = f"; what it has is {', '.join(others[:3])}" if others and not reason else reason
        raise ModelRefused(f"{folder} has no {missing}{reason}", file=folder / missing)
    return [folder / name for name in names]


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Checkpoint names of all tensors that the model needs, with their shapes."""
    hidden, query_size = config.hidden_size, config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    linears = [
        ("self_attn.o_proj", hidden, query_size, config.output_bias),
        ("mlp.down_proj", hidden, config.intermediate_size, config.mlp_bias),
    ]
    if config.family.is_stacked:
        linears += [
            (f"self_attn.{STACKED_HEADS}", query_size + 2 * kv_size, hidden, config.qkv_bias),
            (f"mlp.{STACKED_GATE}", 2 * config.intermediate_size, hidden, config.mlp_bias),
        ]
    else:
        linears += [
            ("self_attn.q_proj", query_size, hidden, config.qkv_bias),
            ("self_attn.k_proj", kv_size, hidden, config.qkv_bias),
            ("self_attn.v_proj", kv_size, hidden, config.qkv_bias),
            ("mlp.gate_proj", config.intermediate_size, hidden, config.mlp_bias),
            ("mlp.up_proj", config.intermediate_size, hidden, config.mlp_bias),
        ]
    norms = [("input_layernorm", hidden), ("post_attention_layernorm", hidden)]
    if config.family.norms_outputs:
        norms += [(NORM_BEFORE_MLP, hidden), (NORM_AFTER_MLP, hidden)]
    if config.qk_norm:
        norms += [("self_attn.q_norm", config.head_dim), ("self_attn.k_norm", config.head_dim)]
    for layer in range(config.num_layers):
        prefix, experts = f"model.layers.{layer}", config.experts_of(layer)
        if experts is not None:
            shapes |= {f"{prefix}.mlp.{name}.weight": shape for name, shape in experts.shapes(hidden).items()}
            shapes |= {f"{prefix}.mlp.{name}.bias": shape for name, shape in experts.biases(hidden).items()}
        for name, outputs, inputs, has_bias in linears:
            if experts is not None and name.startswith("mlp."):
                continue
            shapes[f"{prefix}.{name}.weight"] = (outputs, inputs)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (outputs,)
        shapes |= {f"{prefix}.{name}.weight": (size,) for name, size in norms}
        if config.family.has_sinks:
            shapes[f"{prefix}.{SINKS}"] = (config.num_heads,)
    return shapes


def stored_tensors(files: Sequence[Path]) -> list[StoredTensor]:
    """Tensors in the headers of a model's files, without the rotary frequencies of old files, which are computed anew.

    Raises ModelRefused for files that are truncated or otherwise unsound.
    """
    stored: dict[str, StoredTensor] = {}
    for found in (tensor for file in files for tensor in read_header(file)):
        if found.name in stored:
            raise found.refuse(f"is in {stored[found.name].file.name} too")
        stored[found.name] = found
    return [tensor for name, tensor in stored.items() if not name.endswith("rotary_emb.inv_freq")]


def check_tensors(
    folder: Path,
    stored: Mapping[str, StoredTensor],
    expected: Shapes,
    optional: Shapes,
    source: str = "config.json",
) -> None:
    """Raises ModelRefused unless the files hold all expected tensors, and besides them only optional ones.

    stored has the names of expected, which need not be those in the files. source is where the shapes come from.
    """
    for name, tensor in stored.items():
        wanted = expected.get(name, optional.get(name))
        if wanted is None:
            message = f"{tensor.file} holds the tensor {tensor.name}, which {source} does not ask for"
            raise ModelRefused(message, file=tensor.file, tensor=tensor.name)
        if tensor.shape != wanted:
            raise tensor.refuse(f"has the shape {list(tensor.shape)}, but {source} asks for {list(wanted)}")
        dtypes = BYTES if name.endswith((BLOCKS, SCALES)) else FILE_DTYPES
        if tensor.dtype not in dtypes:
            raise tensor.refuse(f"has the type {tensor.dtype}, but must have one of {', '.join(dtypes)}")
    missing = sorted(expected.keys() - stored.keys())
    if missing:
        more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
        raise ModelRefused(f"{folder} lacks the tensor {missing[0]}{more}", folder=folder, tensor=missing[0])


def as_it_is(_name: str, weight: Weight) -> Weight:
    """Keeps a tensor that has been read."""
    return weight


def packed_room(ops: Ops | None, name: str, shape: tuple[int, ...]) -> BlockMatrix | None:
    """Room for a matrix that is quantised as it is read; None for what is read whole."""
    if not isinstance(ops, NativeOps) or len(shape) != 2 or _stays(name):
        return None
    return ops.packed_room(*shape)


def quantise_part(ops: NativeOps, matrix: BlockMatrix, rows: Tensor, first_row: int, place: tuple[Path, str]) -> None:
    """Quantises rows into their room. Raises ModelRefused about the tensor of a file that is their place."""
    try:
        ops.quantise_rows(matrix, rows, first_row)
    except ModelRefused as error:
        check_numbers(*place, rows)
        raise ModelRefused(f"{place[0]}: of {place[1]} {error}", file=place[0], tensor=place[1]) from None


def kept(ops: Ops, name: str, weight: Weight) -> Weight:
    """What stays of a tensor that has been read, by its name: a matrix as products read it, others as they are."""
    return ops.quantised(weight) if isinstance(weight, Tensor) and weight.ndim > 1 and not _stays(name) else weight


def _stays(name: str) -> bool:
    # It is looked up, or decides (gpt-oss has another name for it), or is a bias, of which experts have a row each.
    return name == EMBEDDING or name.endswith((f".mlp.{ROUTER}.weight", ".mlp.router.weight", ".bias"))


def load_tensors(
    folder: Path,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    ops: Ops | None = None,
    native: NativeOps | None = None,
) -> tuple[dict[str, Any], str]:
    """All tensors of the model on the device, matrices in dtype and vectors (norms, biases) in float32; its model_hash.

    With compiled operations experts in MXFP4 stay in their blocks.

    Raises ModelRefused for missing, unexpected, misshapen or quantized tensors, before any is read. "lm_head.weight" of
    a tied model may be absent, and is used if it is there. With operations matrices are kept as these quantise them.
    """
    keep: Callable[[str, Weight], Weight] = as_it_is if ops is None else partial(kept, ops)
    # What other models of the same folder hold, a head's layers for instance, is theirs.
    family, files = config.family, weight_files(folder)
    own = [tensor for tensor in stored_tensors(files) if not tensor.name.startswith(family.foreign_tensors)]
    stored = {}
    for tensor in own:
        prefix, instead = next((each for each in family.prefixes if tensor.name.startswith(each[0])), ("", ""))
        stored[instead + tensor.name.removeprefix(prefix)] = tensor
    shapes = expected_shapes(config)
    experts = next((each for each in config.experts if each is not None), None)
    expected = file_shapes(shapes, experts, stored)
    check_tensors(folder, stored, expected, {"lm_head.weight": shapes["model.embed_tokens.weight"]})
    rooms = ExpertRooms(shapes, keep, experts, dtype, native)

    def arranged(name: str, tensor: Tensor) -> Weight:
        if rooms.take(name, tensor):
            return torch.empty(0)
        return keep(name, tensor + 1 if family.norms_from_zero and "norm" in name else tensor)

    config_json = read_json(folder / "config.json")
    tensors, digest = read_tensors(config_json, files, stored, device, dtype, arranged, ops)
    others = {name: tensor for name, tensor in tensors.items() if EXPERTS not in name and ".mlp.router." not in name}
    return others | rooms.tensors, digest


def read_tensors(
    config: Mapping[str, Any],
    files: Sequence[Path],
    stored: Mapping[str, StoredTensor],
    device: torch.device,
    dtype: torch.dtype,
    keep: Callable[[str, Tensor], Weight] = as_it_is,
    ops: Ops | None = None,
) -> tuple[dict[str, Any], str]:
    """Tensors by the names in stored: matrices in dtype, vectors in float32, integers in int64; and the files' hash.

    Parts of MXFP4 stay bytes.

    The hash is thirty-two hexadecimal digits: BLAKE3 over what config.json holds, or should hold, with sorted keys, so
    that only its meaning counts, and over each file with its name and size. What stays of a tensor is what `keep` makes
    of it, by its name in stored, as soon as it is read; operations quantise rows as they come. Raises ModelRefused for
    NaN and infinity, and NotReady when files are not those whose headers were read, or are written to meanwhile.
    """
    # Several names may mean one tensor of a file: it is in memory once.
    tensors, by_own_name = dict[str, Any](), {tensor.name: tensor for tensor in stored.values()}
    names = {tensor.name: name for name, tensor in stored.items()}
    spans: dict[Path, list[FileSpan]] = {}
    # Experts are put together first.
    rooms = {
        own_name: None if EXPERTS in names[own_name] else packed_room(ops, names[own_name], tensor.shape)
        for own_name, tensor in by_own_name.items()
    }
    for own_name, tensor in by_own_name.items():
        unit = ITEM_BITS[tensor.dtype] // 8 * (1 if rooms[own_name] is None else OUTPUTS * tensor.shape[1])
        spans.setdefault(tensor.file, []).append(FileSpan(own_name, tensor.start, tensor.size, unit))
    stamps = {file: Stamp.of(file) for file in files} | {tensor.file: tensor.stamp for tensor in stored.values()}
    digest = blake3(json.dumps(config, sort_keys=True).encode(), max_threads=blake3.AUTO)
    for piece in read_pieces(stamps, spans, digest, lambda file, size: f"\0{file.name}\0{size}\0".encode()):
        found = by_own_name[piece.span.name]
        numbers = piece.data.view(TORCH_DTYPES[found.dtype])
        room = rooms[found.name]
        if isinstance(ops, NativeOps) and room is not None:
            rows = numbers.to(dtype).view(-1, found.shape[1])
            quantise_part(ops, room, rows, piece.first // (numbers.itemsize * found.shape[1]), (found.file, found.name))
            tensors[found.name] = room
            continue
        if not piece.first:
            kept = dtype if len(found.shape) > 1 and not found.name.endswith("_bias") else torch.float32
            is_packed = found.name.endswith((BLOCKS, SCALES))
            kept = kept if numbers.is_floating_point() else torch.uint8 if is_packed else torch.int64
            tensors[found.name] = torch.empty(found.shape, dtype=kept, device=device)
        first = piece.first // numbers.itemsize
        part = tensors[found.name].view(-1)[first : first + len(numbers)].copy_(numbers)
        check_numbers(found.file, found.name, part)
        if piece.is_last:
            tensors[found.name] = keep(names[found.name], tensors[found.name])
    return {name: tensors[tensor.name] for name, tensor in stored.items()}, digest.hexdigest()[:32]


def check_numbers(file: Path, name: str, tensor: Tensor) -> None:
    """Raises ModelRefused for NaN and infinity, also where a number of the file is too large for its type in memory."""
    # NaN goes into both.
    low, high = torch.aminmax(tensor)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        found = f"NaN or infinity as {str(tensor.dtype).removeprefix('torch.')}"
        raise ModelRefused(f"{file}: {name} holds {found}, so nothing can be computed with it", file=file, tensor=name)


def model_hash(folder: Path) -> str:
    """The hash that `read_tensors` gives with the weights of a folder, for who does not want these.

    It is computed anew each time: what is remembered could be of other weights.
    """
    files = weight_files(folder)
    return read_tensors(read_json(folder / "config.json"), files, {}, torch.device("cpu"), torch.float32)[1]
