"""What the weights in a model's files are, and what they take of memory and of the time of a token."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from outrider.errors import ModelRefused
from outrider.model_files.gguf.config import EMBEDDING, OUTPUT
from outrider.model_files.gguf.header import GgufFile
from outrider.model_files.gguf.types import KINDS, TYPES
from outrider.model_files.model_names import VOCAB_SIZE, Shape
from outrider.model_files.safetensors_header import BLOCKS, MXFP4, SCALES, read_header

NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# Of a number in memory, by the type of the weights; with scales, where they are integers.
BITS = {"bfloat16": 16.0, "float32": 32.0, "int8": KINDS["Q8_0"].memory_bits, "int4": KINDS["Q4_0"].memory_bits}
AUTO, PLAIN = "auto", "bfloat16"
# The least share of a type that is worth a word.
SHOWN_SHARE = 0.005


@dataclass(frozen=True, slots=True)
class Weights:
    """Numbers of a model by their types, and those of its embedding."""

    counts: Mapping[str, int]
    file_bits: Mapping[str, float]
    """Bits of a number of each type in memory where it is kept as the file has it; none where nothing is."""
    embedding_count: int
    embedding_kind: str
    is_tied: bool
    """Whether the embedding is the matrix of the output, too, so that each token reads it."""
    block_dtype: str = ""
    """Type in memory that keeps the file's blocks; empty where it has none."""
    unread: Mapping[str, float] = field(default_factory=dict)
    """Number of weights by their types, in experts that a token does not choose."""

    @classmethod
    def of_gguf(cls, file: GgufFile) -> Self:
        """Weights of a GGUF file that has an embedding."""
        name = file.metadata.get("general.architecture")
        idle = _idle_share(file.metadata.get(f"{name}.expert_used_count"), file.metadata.get(f"{name}.expert_count"))
        counts, unread = Counter[str](), dict[str, float]()
        for each in file.tensors.values():
            kind, size = NAMES.get(each.type.name, each.type.name), math.prod(each.shape)
            counts[kind] += size
            if "_exps." in each.name:
                unread[kind] = unread.get(kind, 0) + idle * size
        dtype = file.block_dtype
        bits = {NAMES.get(each.name, each.name): each.memory_bits for each in TYPES.values()} if dtype else {}
        embedding = file.tensors[EMBEDDING]
        kind = NAMES.get(embedding.type.name, embedding.type.name)
        return cls(counts, bits, math.prod(embedding.shape), kind, OUTPUT not in file.tensors, dtype, unread)

    @classmethod
    def of_folder(cls, folder: Path, config: Mapping[str, Any]) -> Self:
        """Weights of all safetensors files, by their headers. Raises ModelRefused."""
        single = folder / "model.safetensors"
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelRefused(f"{folder} has no safetensors weights")
        counts, sizes = Counter[str](), [config.get("vocab_size"), config.get("hidden_size")]
        num_experts = config.get("num_experts") or config.get("num_local_experts")
        idle, unread = _idle_share(config.get("num_experts_per_tok"), num_experts), dict[str, float]()
        for each in (tensor for file in files for tensor in read_header(file)):
            if each.name.endswith(SCALES):
                continue
            kind, size = NAMES.get(each.dtype, each.dtype), math.prod(each.shape)
            if each.name.endswith(BLOCKS):
                kind, size = MXFP4, 2 * size
            counts[kind] += size
            if ".experts." in each.name:
                unread[kind] = unread.get(kind, 0) + idle * size
        embedding = math.prod(size if isinstance(size, int) and size > 0 else 0 for size in sizes)
        tied, dtype = bool(config.get("tie_word_embeddings")), "file" if MXFP4 in counts else ""
        bits = {each.name: each.memory_bits for each in TYPES.values()} if dtype else {}
        return cls(counts, bits, embedding, PLAIN, tied, dtype, unread)

    @classmethod
    def of_shape(cls, shape: Shape) -> Self:
        """Weights of a model that is made in memory."""
        counts = {PLAIN: shape.parameter_count}
        return cls(counts, {}, VOCAB_SIZE * shape.hidden_size, PLAIN, shape.tied_embeddings)

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    @property
    def shown_count(self) -> str:
        """All parameters, and those that one token takes where these are fewer."""
        active = round(self.count - sum(self.unread.values()))
        return f"{self.count:,} parameters" + (f" ({active:,} for a token)" if active < self.count else "")

    @property
    def stored_dtype(self) -> str:
        """Type of most numbers."""
        return max(self.counts, key=lambda each: self.counts[each], default="nothing")

    @property
    def mix(self) -> str:
        """The types of all but a few numbers, with their shares where they are several."""
        shares = {kind: count / max(1, self.count) for kind, count in self.counts.items()}
        shown = sorted((each for each in shares if shares[each] >= SHOWN_SHARE), key=lambda each: -shares[each])
        return self.stored_dtype if len(shown) < 2 else ", ".join(f"{kind} ({shares[kind]:.0%})" for kind in shown)

    def served(self, dtype: str, device: str) -> str:
        """Type in memory under a `--dtype`."""
        if dtype != AUTO:
            return dtype
        return (self.block_dtype if device == "cpu" else "") or PLAIN

    def memory_bytes(self, dtype: str) -> int:
        """Bytes that all weights take in memory, under a type that `served` gives."""
        is_beside = dtype in ("int8", "int4")
        # What is looked up stays as it was, and is quantised besides where it is the output's matrix.
        kept = self.embedding_count * BITS[PLAIN] if is_beside else 0
        quantised_again = self.embedding_count * BITS[dtype] if is_beside and not self.is_tied else 0
        return int(self._bits(dtype) + kept - quantised_again) // 8

    def token_bytes(self, dtype: str) -> int:
        """Bytes of weights that one token reads: of experts those that it chooses."""
        looked_up = 0 if self.is_tied else self.embedding_count * self._bits_of(self.embedding_kind, dtype)
        unread = sum(count * self._bits_of(kind, dtype) for kind, count in self.unread.items())
        return int(self._bits(dtype) - looked_up - unread) // 8

    def _bits(self, dtype: str) -> float:
        return sum(count * self._bits_of(kind, dtype) for kind, count in self.counts.items())

    def _bits_of(self, kind: str, dtype: str) -> float:
        return BITS[dtype] if dtype in BITS else self.file_bits.get(kind, BITS[PLAIN])


def _idle_share(num_chosen: object, num_experts: object) -> float:
    """The part of experts that a token does not choose; 0 for numbers that say nothing."""
    if type(num_chosen) is int and type(num_experts) is int and 0 < num_chosen <= num_experts:
        return 1 - num_chosen / num_experts
    return 0.0
