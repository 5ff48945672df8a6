"""What is measured: the models' shapes, and on a CPU a small one of each kind, for a run that only has to run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from outrider.model_files.model_names import PRESETS, Shape, embedded_model


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of everything; rows, sessions and lengths are lists of what is tried."""

    shapes: Mapping[str, Shape]
    """Shapes of Llama 3.1 8B and Llama 3.2 1B, or small ones, under the same names."""
    vocab_size: int
    context_len: int
    memory_bytes: int
    """Bytes of a buffer whose bandwidth is measured."""
    matmul: int
    rotate_bytes: int
    """Weights are rotated over so many bytes, so that none is read from a cache."""
    linear_rows: tuple[int, ...]
    places: tuple[int, ...]
    """Numbers of rows in which a row is compared with itself alone."""
    attention: tuple[tuple[int, int, int], ...]
    """Lengths, sessions and rows of a session."""
    choose_rows: tuple[int, ...]
    graph_kernels: tuple[int, ...]
    step_rows: tuple[int, ...]
    eager_rows: tuple[int, ...]
    """Rows that are tried where the host has to launch every kernel, which takes long, at the first length alone."""
    step_lengths: tuple[int, ...]
    prompt_len: int
    kv_tokens: Mapping[str, int]
    eager_scores: int
    """The most rows times keys for which the operations in plain torch, which copy every row's keys, are timed."""
    repeats: int
    pair: tuple[str, str]
    """Names of a target and its draft, which guesses well."""
    pair_tokens: int
    """Tokens that the cache of each of them holds."""
    streams: tuple[int, ...]
    tree_streams: int
    """The most streams with trees, whose rows are many."""
    tokens: int
    """Tokens of an answer."""
    compared: int
    """Number of texts that are compared with those of plain decoding."""


LLAMA_VOCABULARY = 128_256
FULL = Sizes(
    shapes={"8b": PRESETS["target"]["8b"], "1b": PRESETS["target"]["1b"]},
    vocab_size=LLAMA_VOCABULARY,
    context_len=32768,
    memory_bytes=4 << 30,
    matmul=8192,
    rotate_bytes=200 << 20,
    linear_rows=(1, 4, 16, 32, 64, 128),
    places=(2, 4, 8, 16, 32, 64, 128, 512),
    attention=tuple((n, s, r) for n in (1024, 8192, 32768) for s in (1, 16, 64) for r in (1, 6, 32)),
    choose_rows=(1, 6, 32, 64),
    graph_kernels=(10, 100, 300),
    step_rows=(1, 2, 4, 6, 8, 16, 32, 64, 128, 256),
    eager_rows=(1, 6, 64),
    step_lengths=(128, 8192),
    prompt_len=2048,
    kv_tokens={"8b": 34 * 8192, "1b": 68 * 8192},
    eager_scores=1 << 22,
    repeats=11,
    pair=("sized:8b", "sized:draft-1b"),
    pair_tokens=64 * 512,
    streams=(1, 4, 16, 64),
    tree_streams=4,
    tokens=96,
    compared=50,
)
_SMALL = Shape(64, 128, 2, 4, 2, 16, tied_embeddings=False)
TINY = Sizes(
    shapes={"8b": _SMALL, "1b": replace(_SMALL, tied_embeddings=True)},
    vocab_size=512,
    context_len=512,
    memory_bytes=1 << 20,
    matmul=64,
    rotate_bytes=1 << 18,
    linear_rows=(1, 4),
    places=(2, 8, 32),
    attention=((40, 1, 1), (40, 3, 6), (100, 2, 32)),
    choose_rows=(1, 6),
    graph_kernels=(10,),
    step_rows=(1, 2, 6),
    eager_rows=(1, 6),
    step_lengths=(16, 128),
    prompt_len=100,
    kv_tokens={"8b": 2048, "1b": 2048},
    eager_scores=1 << 22,
    repeats=2,
    pair=(embedded_model("target"), embedded_model("draft")),
    pair_tokens=4096,
    streams=(1, 4),
    tree_streams=4,
    tokens=12,
    compared=5,
)


def sizes_for(device: torch.device) -> Sizes:
    """The sizes that a kind of device is asked about."""
    return FULL if device.type == "cuda" else TINY


def matrices(shape: Shape, vocab_size: int) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the matrices of a layer, as they are stacked, and of the head."""
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "qkv": (query + 2 * kv, shape.hidden_size),
        "o": (shape.hidden_size, query),
        "gate_up": (2 * shape.intermediate_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.intermediate_size),
        "head": (vocab_size, shape.hidden_size),
    }
