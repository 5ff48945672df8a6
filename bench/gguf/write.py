"""Writes a model of Llama's shape as a GGUF file: in bfloat16, for llama.cpp's quantiser to read, or in any types."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from torch import Tensor

from outrider.engine.models.checkpoints import FolderCheckpoint, SizedCheckpoint
from outrider.engine.models.config import ModelConfig
from outrider.engine.models.gguf import IN_LAYER, OUTSIDE
from outrider.engine.models.sized import widen
from outrider.engine.models.weights import expected_shapes, load_tensors
from outrider.model_files.gguf.header import GgufFile
from outrider.model_files.gguf.tokenizer import CONTROL, MERGES, NORMAL, PRE, TOKENS, TYPES, UNUSED
from outrider.model_files.gguf.types import TYPES as TENSOR_TYPES

CPU = torch.device("cpu")
NAMES = {"model.layers": "blk"} | OUTSIDE | IN_LAYER


@dataclass(frozen=True, slots=True)
class WrittenWords:
    """A byte-level tokenizer as GGUF has it."""

    cut: str
    """Name of the pre-tokenizer."""
    tokens: list[str]
    types: list[int]
    merges: list[str]
    bos: int
    eos: int

    @classmethod
    def of_folder(cls, folder: Path, config: ModelConfig) -> Self:
        """Words of a tokenizer.json that cuts texts as GPT-2's does."""
        told = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        by_id = {token_id: token for token, token_id in told["model"]["vocab"].items()}
        special = {each["id"]: each["content"] for each in told["added_tokens"]}
        names = special | by_id
        ids = range(config.vocab_size)
        return cls(
            cut="gpt-2",
            tokens=[names.get(each, f"[PAD{each}]") for each in ids],
            types=[CONTROL if each in special else NORMAL if each in by_id else UNUSED for each in ids],
            merges=[" ".join(merge) for merge in told["model"]["merges"]],
            bos=min(config.eos_token_ids),
            eos=min(config.eos_token_ids),
        )

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Words of another GGUF file."""
        told = GgufFile.read(path).metadata
        bos, eos = (told[f"tokenizer.ggml.{side}_token_id"] for side in ("bos", "eos"))
        return cls(told[PRE], told[TOKENS], list(told[TYPES]), told[MERGES], bos, eos)


def write_model(checkpoint: FolderCheckpoint, words: WrittenWords, file: Path) -> None:
    """Writes the file, a tensor at a time: matrices in bfloat16, vectors in float32."""
    stored = (tensor.contiguous().view(torch.uint8) for tensor in tensors_of(checkpoint))
    write_file(checkpoint.config, words, file, plain_types(checkpoint.config, GGMLQuantizationType.BF16), stored)


def plain_types(config: ModelConfig, kind: GGMLQuantizationType) -> Mapping[str, GGMLQuantizationType]:
    """One type for all matrices, and float32 for vectors; by checkpoint names."""
    shapes = expected_shapes(config)
    return {name: GGMLQuantizationType.F32 if len(shape) == 1 else kind for name, shape in shapes.items()}


def write_file(
    config: ModelConfig,
    words: WrittenWords,
    file: Path,
    types: Mapping[str, GGMLQuantizationType],
    stored: Iterable[Tensor],
) -> None:
    """Writes the file, a tensor at a time: types by checkpoint names, and bytes in the order of expected_shapes.

    Of a matrix they are uint8 [rows, bytes], and are put into the order in which llama.cpp rotates.
    """
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(config.context_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_rope_freq_base(config.ropes[0].theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words.cut)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    writer.add_token_merges(words.merges)
    writer.add_bos_token_id(words.bos)
    writer.add_eos_token_id(words.eos)
    writer.add_add_bos_token(False)
    for name, shape in expected_shapes(config).items():
        kind = TENSOR_TYPES[types[name]]
        size = math.prod(shape) // kind.block_len * kind.block_bytes
        writer.add_tensor_info(name_in_file(name), shape, np.dtype(np.float32), size, raw_dtype=types[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, rows in zip(types, stored, strict=True):
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        # llama.cpp rotates neighbours.
        turned = rows.view(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape) if heads else rows
        writer.write_tensor_data(turned.contiguous().numpy())
    writer.close()


def name_in_file(name: str) -> str:
    """Name of a checkpoint's tensor by llama.cpp's habit."""
    for own, theirs in NAMES.items():
        name = name.replace(own, theirs)
    return name


def tensors_of(checkpoint: FolderCheckpoint) -> Iterable[Tensor]:
    """Tensors in the order of expected_shapes; those of a sized model are made one by one."""
    if isinstance(checkpoint, SizedCheckpoint):
        made = widen(*small_of(checkpoint), checkpoint.config, checkpoint.seed, CPU, torch.bfloat16)
        return (tensor for _, tensor in made)
    loaded, _ = load_tensors(checkpoint.folder, checkpoint.config, CPU, torch.bfloat16)
    return (loaded[name] for name in expected_shapes(checkpoint.config))


def small_of(checkpoint: SizedCheckpoint) -> tuple[Mapping[str, Tensor], ModelConfig]:
    """The model inside, in float32."""
    small = ModelConfig.read(checkpoint.folder)
    return load_tensors(checkpoint.folder, small, CPU, torch.float32)[0], small
