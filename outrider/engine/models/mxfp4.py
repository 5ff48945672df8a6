"""MXFP4 as safetensors of gpt-oss have it: nibbles of 32 weights each, and their powers of two, in tensors of bytes."""

from math import gcd

import torch
from torch import Tensor

from outrider.engine.ops import Weight
from outrider.engine.ops.native import NativeOps
from outrider.errors import ModelRefused
from outrider.model_files.gguf.types import FOURTH, GROUP, OUTPUTS
from outrider.model_files.safetensors_header import BLOCKS, MXFP4, SCALES

METHOD = "mxfp4"
"""Name of this format in "quantization_config"."""
# Of more than this power not every multiple is a number.
MOST_SCALE = 252


def packed_shapes(name: str, num_experts: int, num_outputs: int, num_inputs: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the two tensors of a matrix of all experts. Raises ModelRefused about a width without whole blocks."""
    if num_inputs % GROUP:
        raise ModelRefused(f"{name} has {num_inputs} inputs, but {MXFP4} needs a multiple of {GROUP}", tensor=name)
    groups = num_experts, num_outputs, num_inputs // GROUP
    return {f"{name}{BLOCKS}": (*groups, GROUP // 2), f"{name}{SCALES}": groups}


def matrix_of(name: str, blocks: Tensor, scales: Tensor, dtype: torch.dtype, native: NativeOps | None) -> Weight:
    """Matrix [E M, inputs], in dtype, of blocks uint8 [E, M, groups, 16] and scales uint8 [E, M, groups].

    With compiled operations it stays in blocks, bit for bit. Raises ModelRefused about weights that are no numbers.
    """
    largest = int(scales.max())
    if largest > MOST_SCALE:
        fault = f"{name}{SCALES} holds {largest}, but a power of two must be at most {MOST_SCALE}"
        raise ModelRefused(f"{fault}, so nothing can be computed with it", tensor=f"{name}{SCALES}")
    num_experts, num_outputs, num_groups = scales.shape
    shape = num_experts * num_outputs, num_groups * GROUP
    packed = None if native is None else native.blocks(MXFP4, *shape)
    plain = torch.empty(shape if native is None else (0, 0), dtype=dtype, device=blocks.device)
    # So many experts have whole blocks of outputs together, and what is made on the way stays small.
    step, first = OUTPUTS // gcd(OUTPUTS, num_outputs), 0
    for some, powers in zip(torch.split(blocks, step), torch.split(scales, step), strict=True):
        # Inputs take turns in the two halves of a byte.
        nibbles = torch.stack((some & 15, some >> 4), -1).view(-1, num_groups, GROUP)
        if native is not None and packed is not None:
            # In GGUF a byte has one input of each half of a block, and the power goes first.
            halves = nibbles[..., : GROUP // 2] | nibbles[..., GROUP // 2 :] << 4
            rows = torch.cat((powers.reshape(-1, num_groups, 1), halves), -1).flatten(1)
            native.fill(packed, rows, first)
        else:
            values = torch.tensor(FOURTH, dtype=torch.float32, device=some.device)[nibbles.int()]
            # The table has twice the values.
            numbers = torch.ldexp(values, powers.reshape(-1, num_groups, 1).int() - 128)
            plain[first : first + len(nibbles)] = numbers.flatten(1)
        first += len(nibbles)
    return plain if packed is None else packed
