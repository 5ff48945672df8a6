"""A GGUF file as a model: its configuration, its tensors under the names of a checkpoint, its digest.

Matrices are repacked into blocks as they are read, or become float32 by the gguf package, a piece at a time, and then
the type that is asked for: beside the model itself there are never more than a few megabytes in memory.
"""

import re
from collections import Counter
from dataclasses import dataclass, replace
from math import lcm, prod
from pathlib import Path
from typing import Self

import numpy as np
import structlog
import torch
from blake3 import blake3
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from outrider.engine.models.checkpoints import FolderCheckpoint
from outrider.engine.models.config import ModelConfig, eos_token_ids_in
from outrider.engine.models.json_keys import JsonKeys
from outrider.engine.models.reading import FileSpan, read_pieces
from outrider.engine.models.rope import DividedRope, LongRope, Rope
from outrider.engine.models.weights import check_numbers, expected_shapes, kept, packed_room, quantise_part
from outrider.engine.ops import Ops, Weight
from outrider.engine.ops.blocks import BlockMatrix
from outrider.engine.ops.native import NativeOps
from outrider.errors import ModelRefused
from outrider.model_files.gguf.config import LONG_FACTORS, SHORT_FACTORS, architecture_of, json_config, spelled
from outrider.model_files.gguf.header import GgufFile, TensorPlace
from outrider.model_files.gguf.types import KINDS, OUTPUTS, TensorType

log = structlog.get_logger()

PIECE_NUMBERS = 1 << 18
ROPE_FACTORS = "rope_freqs.weight"
# Divisors of a frequency; above any that a model was made with.
MAX_DIVISOR = 1e6
OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
IN_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
# Where a family norms what attention and MLP give.
OF_OUTPUTS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OF_GPT_OSS = {"self_attn": "attn_sinks", "post_attention_layernorm": "post_attention_norm"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufCheckpoint(FolderCheckpoint):
    """A GGUF file, which stands in the folder's place; its numbers are widened as they are loaded."""

    file: GgufFile

    @classmethod
    def of(cls, name: str, path: Path) -> Self:
        """Reads the header. Raises ModelRefused, also for tensors that are missing, unexpected or misshapen."""
        file = GgufFile.read(path)
        return cls(name, path, read_config(file), file=file)

    @property
    def block_dtype(self) -> str:
        return self.file.block_dtype

    def load(self, device: torch.device, dtype: torch.dtype | None, ops: Ops) -> tuple[dict[str, Weight], str]:
        return load_gguf(self.file, self.config, device, dtype, ops)

    def digest(self) -> str:
        return gguf_hash(self.file)


def read_config(file: GgufFile) -> ModelConfig:
    """The shape of the model, its tensors compared with it. Raises ModelRefused with one sentence."""
    keys = JsonKeys(file.path, json_config(file), spelled=spelled(file))
    if architecture_of(file) == "phi3" and SHORT_FACTORS in file.tensors:
        keys.values["rope_scaling"]["short_factor"] = _numbers(file, SHORT_FACTORS)
    config = ModelConfig.of(keys, eos_token_ids_in(keys) or frozenset())
    place = file.tensors.get(ROPE_FACTORS)
    if place is not None:
        rope = config.ropes[0]
        if set(config.ropes) != {Rope(theta=rope.theta)}:
            fault = "stands beside a scaling of the rotary embedding, and only one can be meant"
            raise _refuse(file, ROPE_FACTORS, fault)
        if place.shape != (config.head_dim // 2,):
            fault = f"has the shape {list(place.shape)}, but must have [{config.head_dim // 2}]"
            raise _refuse(file, ROPE_FACTORS, fault)
        factors = _numbers(file, ROPE_FACTORS)
        wrong = next((factor for factor in factors if not 1 <= factor <= MAX_DIVISOR), None)
        if wrong is not None:
            raise _refuse(file, ROPE_FACTORS, f"holds {wrong:g}, but a factor must be from 1 to {MAX_DIVISOR:g}")
        divided = DividedRope(theta=rope.theta, divisors=tuple(factors))
        config = replace(config, ropes=(divided,) * config.num_layers)
    places = {
        _gguf_name(name, config): _gguf_shape(name, shape, config) for name, shape in expected_shapes(config).items()
    }
    factors_of_phi = (SHORT_FACTORS, LONG_FACTORS) if isinstance(config.ropes[0], LongRope) else ()
    for name, tensor in file.tensors.items():
        if name not in places and name not in (ROPE_FACTORS, *factors_of_phi):
            raise _refuse(file, name, "is none that its configuration asks for")
        if name in places and tensor.shape != places[name]:
            fault = f"has the shape {list(tensor.shape)}, but its configuration asks for {list(places[name])}"
            raise _refuse(file, name, fault)
    missing = sorted(places.keys() - file.tensors.keys())
    if missing:
        more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
        message = f"{file.path} lacks the tensor {missing[0]}{more}"
        raise ModelRefused(message, file=file.path, tensor=missing[0])
    return config


def load_gguf(
    file: GgufFile, config: ModelConfig, device: torch.device, dtype: torch.dtype | None, ops: Ops
) -> tuple[dict[str, Weight], str]:
    """All tensors of the model by checkpoint name, matrices in dtype and vectors in float32; and the file's hash.

    Without a dtype matrices are kept in blocks, or as `beside_blocks` says where the file has others. The rows of
    queries and keys are put back from the order in which llama.cpp rotates a Llama's. The hash is thirty-two
    hexadecimal digits: BLAKE3 over the file or its parts, whatever their names.
    """
    tensors, names = dict[str, Weight](), {_gguf_name(name, config): name for name in expected_shapes(config)}
    places = [place for place in file.tensors.values() if place.name in names]
    in_heads = ("q_proj", "k_proj") if architecture_of(file) == "llama" else ()
    head_dims = {place.name: config.head_dim * (names[place.name].split(".")[-2] in in_heads) for place in places}
    spans: dict[Path, list[FileSpan]] = {}
    for place in places:
        # Whole blocks of rows, and of rows in another order whole heads.
        unit = _row_bytes(place) * lcm(OUTPUTS, head_dims[place.name] or 1)
        spans.setdefault(place.file, []).append(FileSpan(place.name, place.offset, place.size, unit))
    if dtype is None:
        others = Counter(place.type for place in places if len(place.shape) > 1 and place.type.name not in KINDS)
        for kind, count in others.items():
            log.info("matrices not kept as they are", type=kind.name, count=count, kept_in=str(beside_blocks(kind)))
    digest = blake3(max_threads=blake3.AUTO)
    for piece in read_pieces(file.stamps, spans, digest):
        place = file.tensors[piece.span.name]
        name, head_dim = names[place.name], head_dims[place.name]
        if not piece.first:
            tensors[name] = packed_room(ops, name, _matrix_shape(place)) or _room(place, device, dtype, ops)
        room, stored = tensors[name], piece.data.view(-1, _row_bytes(place))
        first_row = piece.first // _row_bytes(place)
        if isinstance(room, Tensor):
            _widen(room, place, stored, first_row, head_dim)
        elif isinstance(ops, NativeOps) and isinstance(room, BlockMatrix) and dtype is not None:
            rows = torch.empty(len(stored), room.num_inputs, dtype=dtype)
            _widen(rows, place, stored, 0, head_dim)
            quantise_part(ops, room, rows, first_row, (place.file, place.name))
        elif isinstance(ops, NativeOps) and isinstance(room, BlockMatrix):
            faults = ops.fill(room, stored, first_row, head_dim)
            if faults:
                fault = f"holds {faults} scales that are NaN or infinity, so nothing can be computed with it"
                raise _refuse(file, place.name, fault)
        if piece.is_last:
            tensors[name] = kept(ops, name, room)
    return tensors, digest.hexdigest()[:32]


def beside_blocks(kind: TensorType) -> torch.dtype:
    """Type in memory of a matrix that has no blocks here: exact for plain numbers, rounded for rare types."""
    return torch.float32 if kind.memory_bits == 32 else torch.bfloat16


def _room(place: TensorPlace, device: torch.device, dtype: torch.dtype | None, ops: Ops) -> Weight:
    """Memory for a tensor, with nothing in it yet."""
    if len(place.shape) == 1 or place.name.endswith(".bias"):
        return torch.empty(place.shape, dtype=torch.float32, device=device)
    num_outputs, num_inputs = _matrix_shape(place)
    if dtype is None and place.type.name in KINDS and isinstance(ops, NativeOps):
        return ops.blocks(place.type.name, num_outputs, num_inputs)
    return torch.empty(num_outputs, num_inputs, dtype=dtype or beside_blocks(place.type), device=device)


def _matrix_shape(place: TensorPlace) -> tuple[int, ...]:
    """Outputs and inputs of a matrix: experts stand below each other."""
    return (prod(place.shape[:-1]), place.shape[-1]) if len(place.shape) > 1 else place.shape


def _widen(room: Tensor, place: TensorPlace, stored: Tensor, first_row: int, head_dim: int) -> None:
    """Puts rows as the file has them, uint8 [rows, bytes], into their room; of heads of so many in another order."""
    # A number of a vector is a row, too.
    rows, length = room.view(len(room), -1), place.shape[-1]
    first = first_row * length // rows.shape[1]
    for some in torch.split(stored, max(1, PIECE_NUMBERS // length)):
        part = _widened(some, place).to(device=room.device, dtype=room.dtype).view(-1, rows.shape[1])
        check_numbers(place.file, place.name, part)
        index = torch.arange(first, first + len(part))
        if head_dim:
            # Neighbours are pairs there, and here halves.
            within = index % head_dim
            index += within % 2 * (head_dim // 2) + within // 2 - within
        rows.index_copy_(0, index.to(room.device), part)
        first += len(part)


def gguf_hash(file: GgufFile) -> str:
    """The hash that `load_gguf` gives with the weights of a file, for who does not want these."""
    digest = blake3(max_threads=blake3.AUTO)
    for _ in read_pieces(file.stamps, {}, digest):
        pass
    return digest.hexdigest()[:32]


def _widened(stored: Tensor, place: TensorPlace) -> Tensor:
    """Numbers float32 [rows, inputs] of rows of a tensor as the file has them, uint8 [rows, bytes]."""
    # A block whose scale is no number is what the file says, and no reason for a warning.
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.asarray(dequantize(stored.numpy(), GGMLQuantizationType(place.type_id)), np.float32))


def _numbers(file: GgufFile, name: str) -> list[float]:
    place = file.tensors[name]
    stored = np.fromfile(place.file, np.uint8, place.size, offset=place.offset)
    found: list[float] = _widened(torch.from_numpy(stored[None]), place).flatten().tolist()
    return found


def _row_bytes(place: TensorPlace) -> int:
    return place.type.row_bytes(place.shape[-1])


def _gguf_name(name: str, config: ModelConfig) -> str:
    """Name of a checkpoint's tensor in a file."""
    stem, _, kind = name.rpartition(".")
    # The sinks of a layer are a part of nothing else.
    kind = "weight" if kind == "sinks" else kind
    found, own = _LAYER.fullmatch(stem), OF_OUTPUTS if config.family.norms_outputs else {}
    in_layer = IN_LAYER | own | (OF_GPT_OSS if config.family.has_sinks else {})
    return f"blk.{found[1]}.{in_layer[found[2]]}.{kind}" if found else f"{OUTSIDE[stem]}.{kind}"


def _gguf_shape(name: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    """Shape of a checkpoint's tensor in a file, in which experts are a dimension of their own."""
    found = _LAYER.fullmatch(name)
    experts = config.experts_of(int(found[1])) if found and ".experts." in name else None
    if experts is None or name.endswith(".bias"):
        return shape
    return experts.num_experts, shape[0] // experts.num_experts, shape[1]


def _refuse(file: GgufFile, name: str, fault: str) -> ModelRefused:
    return ModelRefused(f"{file.path}: the tensor {name} {fault}", file=file.path, tensor=name)
