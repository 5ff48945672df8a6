"""A GGUF file as a model: its configuration, its tensors under the names of a checkpoint, its digest.

Quantised numbers become float32 by the gguf package, a piece of a tensor at a time, and then the type that is asked
for: beside the model itself there are never more than a few megabytes of float32 in memory, and the file is mapped.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from blake3 import blake3
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from outrider.engine.models.checkpoints import FolderCheckpoint
from outrider.engine.models.config import ModelConfig, eos_token_ids_in
from outrider.engine.models.json_keys import JsonKeys
from outrider.engine.models.progress import Progress
from outrider.engine.models.rope import DividedRope, LongRope, Rope
from outrider.engine.models.weights import check_numbers, expected_shapes, hash_bytes
from outrider.engine.ops import Ops, Weight
from outrider.engine.ops.blocks import KINDS
from outrider.engine.ops.native import NativeOps
from outrider.errors import ModelRefused
from outrider.model_files.gguf.config import LONG_FACTORS, SHORT_FACTORS, architecture_of, json_config, spelled
from outrider.model_files.gguf.header import GgufFile, TensorPlace

PIECE_NUMBERS = 1 << 20
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
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
# Where a family norms what attention and MLP give.
OF_OUTPUTS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
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
    def has_blocks(self) -> bool:
        return any(place.type.name in KINDS for place in self.file.tensors.values())

    def load(self, device: torch.device, dtype: torch.dtype | None, ops: Ops) -> dict[str, Weight]:
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
    places = {_gguf_name(name, config): shape for name, shape in expected_shapes(config).items()}
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
) -> dict[str, Weight]:
    """All tensors of the model on the device, by checkpoint name: matrices in dtype, vectors in float32.

    Without a dtype matrices are kept in blocks, or in bfloat16 or float32 where the file has others. The rows of
    queries and keys are put back from the order in which llama.cpp rotates a Llama's.
    """
    tensors, is_permuted = dict[str, Weight](), architecture_of(file) == "llama"
    data = {part: np.memmap(part, np.uint8, "r") for part in {place.file for place in file.tensors.values()}}
    with Progress("reading weights", "", sum(place.size for place in file.tensors.values())) as progress:
        for name in expected_shapes(config):
            place = file.tensors[_gguf_name(name, config)]
            progress.file = place.file.name
            heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2], 0)
            if dtype is None and len(place.shape) > 1 and place.type.name in KINDS and isinstance(ops, NativeOps):
                stored = data[place.file][place.offset : place.offset + place.size].reshape(place.shape[0], -1)
                matrix = ops.blocks(place.type.name, place.shape[0], place.shape[1])
                swapped = config.head_dim if heads and is_permuted else 0
                faults = ops.fill(matrix, torch.from_numpy(np.array(stored)), 0, swapped)
                if faults:
                    raise _refuse(file, place.name, f"holds {faults} scales that are NaN or infinity")
                tensors[name] = matrix
                progress.done_bytes += place.size
                continue
            kept = dtype or (torch.bfloat16 if place.type.name == "BF16" else torch.float32)
            tensor = _widened(data[place.file], place, kept if len(place.shape) > 1 else torch.float32)
            if heads and is_permuted:
                halves = tensor.view(heads, config.head_dim // 2, 2, -1)
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
            check_numbers(place.file, place.name, tensor)
            tensors[name] = tensor.to(device)
            progress.done_bytes += place.size
    return tensors


def gguf_hash(file: GgufFile) -> str:
    """Thirty-two hexadecimal digits that name a model: BLAKE3 over the file or its parts, whatever their names."""
    digest = blake3(max_threads=blake3.AUTO)
    with Progress("hashing weights", "", sum(part.stat().st_size for part in file.parts)) as progress:
        for part in file.parts:
            hash_bytes(digest, part, progress)
    return digest.hexdigest()[:32]


def _widened(data: "np.memmap[tuple[int, ...], np.dtype[np.uint8]]", place: TensorPlace, dtype: torch.dtype) -> Tensor:
    """One tensor on the CPU; pieces of it, whole rows, are float32 for a moment."""
    rows, row_bytes = place.size // _row_bytes(place), _row_bytes(place)
    stored = data[place.offset : place.offset + place.size].reshape(rows, row_bytes)
    made = torch.empty(rows, place.shape[-1], dtype=dtype)
    step = max(1, PIECE_NUMBERS // place.shape[-1])
    kind = GGMLQuantizationType(place.type_id)
    for first in range(0, rows, step):
        piece = np.array(stored[first : first + step])
        # A block whose scale is no number is what the file says, and no reason for a warning.
        with np.errstate(all="ignore"):
            made[first : first + step] = torch.from_numpy(np.asarray(dequantize(piece, kind), np.float32))
    return made.view(place.shape)


def _numbers(file: GgufFile, name: str) -> list[float]:
    place = file.tensors[name]
    found: list[float] = _widened(np.memmap(place.file, np.uint8, "r"), place, torch.float32).flatten().tolist()
    return found


def _row_bytes(place: TensorPlace) -> int:
    return place.shape[-1] // place.type.block_len * place.type.block_bytes


def _gguf_name(name: str, config: ModelConfig) -> str:
    """Name of a checkpoint's tensor in a file."""
    stem, _, kind = name.rpartition(".")
    found, in_layer = _LAYER.fullmatch(stem), IN_LAYER | (OF_OUTPUTS if config.family.norms_outputs else {})
    return f"blk.{found[1]}.{in_layer[found[2]]}.{kind}" if found else f"{OUTSIDE[stem]}.{kind}"


def _refuse(file: GgufFile, name: str, fault: str) -> ModelRefused:
    return ModelRefused(f"{file.path}: the tensor {name} {fault}", file=file.path, tensor=name)
