"""Writes a sized model as a GGUF file in a mix of types, a matrix at a time: 8b needs 5 GB of disk and little memory.

What the small model inside says at these types is what the file says, because its rows are quantised by llama.cpp. All
other weights are random blocks: where a sized model has random numbers, a file has blocks drawn from a pool that
llama.cpp made of such numbers. So sizes, types and the spread of weights are those of the sized model quantised, and
the random numbers are others.
"""

import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from bench.gguf.lab import Llama
from bench.gguf.write import CPU, WrittenWords, name_in_file, plain_types, small_of, write_file
from outrider.engine.models.checkpoints import SizedCheckpoint
from outrider.engine.models.config import ModelConfig
from outrider.engine.models.sized import (
    STANDARD_DEVIATION,
    fill,
    generator_of,
    source_of,
    spots,
    vector,
)
from outrider.engine.models.weights import expected_shapes
from outrider.model_files.gguf.header import GgufFile

# Whole blocks of every type, and numbers of a pool.
SPAN, POOL_NUMBERS = 256, 1 << 22


def write_sized(checkpoint: SizedCheckpoint, mix: str, llama: Llama, file: Path, threads: int) -> None:
    """Writes the file. Raises LlamaFailed, also for a mix that there is not."""
    words = WrittenWords.of_folder(checkpoint.folder, checkpoint.config)
    types = types_of(checkpoint.config, words, mix, llama, file.parent, threads)
    write_file(checkpoint.config, words, file, types, stored_tensors(checkpoint, types, llama))


def types_of(
    config: ModelConfig, words: WrittenWords, mix: str, llama: Llama, folder: Path, threads: int
) -> Mapping[str, GGMLQuantizationType]:
    """Types by checkpoint names: those that its quantiser gives to a narrow model of as many layers and heads."""
    hidden, neurons = (SPAN + size % SPAN for size in (config.hidden_size, config.intermediate_size))
    narrow = replace(config, hidden_size=hidden, intermediate_size=neurons)
    wide_types, shapes = plain_types(narrow, GGMLQuantizationType.BF16), expected_shapes(narrow)
    zeros = (
        torch.zeros(*shape[:-1], shape[-1] * (4 if len(shape) == 1 else 2), dtype=torch.uint8)
        for shape in shapes.values()
    )
    with tempfile.TemporaryDirectory(dir=folder) as place:
        wide, made = Path(place, "wide.gguf"), Path(place, "made.gguf")
        write_file(narrow, words, wide, wide_types, zeros)
        llama.ask("quantise", source=str(wide), file=str(made), mix=mix, threads=threads)
        found = GgufFile.read(made).tensors
    return {name: GGMLQuantizationType(found[name_in_file(name)].type_id) for name in shapes}


@dataclass(slots=True)
class Pools:
    """Blocks of weights that are random, and of weights that are zero, by their type and their number of weights."""

    llama: Llama
    generator: torch.Generator
    _made: dict[tuple[GGMLQuantizationType, int, bool], Tensor] = field(default_factory=dict)

    def rows(self, kind: GGMLQuantizationType, shape: tuple[int, ...], is_random: bool) -> Tensor:
        """Rows uint8 [rows, bytes] of weights [rows, width]."""
        num_rows, width = shape
        length = math.gcd(width, SPAN)
        if (kind, length, is_random) not in self._made:
            numbers = torch.zeros(POOL_NUMBERS // length if is_random else 1, length)
            if is_random:
                numbers.normal_(0, STANDARD_DEVIATION, generator=self.generator)
            self._made[kind, length, is_random] = self.llama.blocks(numbers, kind)
        pool = self._made[kind, length, is_random]
        drawn = torch.randint(len(pool), (num_rows * width // length,), generator=self.generator)
        return pool[drawn].view(num_rows, -1)


def stored_tensors(
    checkpoint: SizedCheckpoint, types: Mapping[str, GGMLQuantizationType], llama: Llama
) -> Iterator[Tensor]:
    """Bytes of the tensors in the order of expected_shapes: of matrices uint8 [rows, bytes]."""
    tensors, small = small_of(checkpoint)
    places, pools = spots(small, checkpoint.config), Pools(llama, generator_of("", checkpoint.seed, CPU))
    for name, shape in expected_shapes(checkpoint.config).items():
        source = source_of(name, tensors)
        if len(shape) == 1:
            yield vector(source, torch.ones(shape)).view(torch.uint8)
            continue
        spot = places[name.split(".")[-2]]
        rows = pools.rows(types[name], shape, spot.is_random)
        if source is not None:
            touched = torch.tensor(sorted({*range(spot.cleared_rows), *spot.rows.tolist()}))
            own = replace(spot, rows=torch.searchsorted(touched, spot.rows))
            numbers = fill(own, source, torch.empty(len(touched), shape[1]), generator_of(name, checkpoint.seed, CPU))
            rows[touched] = llama.blocks(numbers, types[name])
        yield rows
