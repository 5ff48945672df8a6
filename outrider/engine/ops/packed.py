"""Matrices of 8 or 4 bits a weight, as kernels/linear_integer.c reads them.

Weights are quantised symmetrically in groups along their inputs, 64 of 8 bits or 32 of 4 bits, each with a scale in
bfloat16: 8.25 and 4.5 bits a weight. With 8 bits a group's largest weight is 127 scales; with 4 bits the scale is the
one of a few around the largest weight that leaves the least squared error.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

OUTPUTS = 16
"""Number of outputs in a block."""
GROUPS = {8: 64, 4: 32}
"""Inputs of a group, by the bits of a weight."""
# A four-bit scale is the largest weight over one of these; below 8 the largest weight is cut.
NIBBLE_DIVISORS = (8.0, -8.0, 7.0, -7.0, 6.5, -6.5, 9.0, -9.0)
# Rows that are quantised at a time, so that only these are float32 as well.
PIECE_ROWS = 4096


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Weights [num_outputs, num_inputs], quantised."""

    data: Tensor
    """Blocks of 16 outputs, uint8 [blocks, groups, bytes]: weights four inputs at a time, and 16 scales."""
    num_outputs: int
    num_inputs: int
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_outputs, self.num_inputs

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def numel(self) -> int:
        return self.num_outputs * self.num_inputs

    def quantised(self) -> tuple[Tensor, Tensor]:
        """The integers int8 [num_outputs, groups, group], zeros past the inputs, and scales float32 [.., groups]."""
        group, (num_blocks, num_groups, _) = GROUPS[self.bits], self.data.shape
        split = self.data.shape[2] - 2 * OUTPUTS
        weights = self.data[..., :split].contiguous()
        if self.bits == 4:
            weights = torch.stack((weights & 15, weights >> 4), 2)
        offset = 1 << self.bits - 1
        quads = weights.view(num_blocks, num_groups, group // 4, OUTPUTS, 4).to(torch.int16) - offset
        integers = quads.permute(0, 3, 1, 2, 4).reshape(num_blocks * OUTPUTS, num_groups, group).to(torch.int8)
        scales = self.data[..., split:].contiguous().view(torch.bfloat16).float()
        return integers[: self.num_outputs], scales.transpose(1, 2).reshape(-1, num_groups)[: self.num_outputs]

    def unpack(self) -> Tensor:
        """The weights that it stands for, float32 [num_outputs, num_inputs]."""
        integers, scales = self.quantised()
        return (integers * scales[..., None]).flatten(1)[:, : self.num_inputs].contiguous()


Weight = Tensor | PackedMatrix
"""A matrix [N, K] that `linear` multiplies with: bfloat16, float32, or packed."""


def unpacked(weight: Weight) -> Tensor:
    """The matrix itself, or what a packed one stands for, float32."""
    return weight.unpack() if isinstance(weight, PackedMatrix) else weight


def packed_shape(num_outputs: int, num_inputs: int, bits: int) -> tuple[int, int, int]:
    """The shape of a PackedMatrix's data."""
    group = GROUPS[bits]
    return -(-num_outputs // OUTPUTS), -(-num_inputs // group), OUTPUTS * (group * bits // 8 + 2)


def pack(weights: Iterable[Tensor], bits: int, empty: Callable[..., Tensor] = torch.empty) -> PackedMatrix:
    """Quantises the rows of all weights [N, K] into one matrix, whose memory `empty` gives, as torch.empty does."""
    pieces = [piece for weight in weights for piece in torch.split(weight, PIECE_ROWS)]
    num_outputs, num_inputs = sum(piece.shape[0] for piece in pieces), pieces[0].shape[1]
    quantised = [_quantise(piece.float(), bits) for piece in pieces]
    integers = torch.cat([each for each, _ in quantised])
    scales = torch.cat([each for _, each in quantised])
    data = empty(packed_shape(num_outputs, num_inputs, bits), dtype=torch.uint8)
    group, (num_blocks, num_groups, _) = GROUPS[bits], data.shape
    missing = num_blocks * OUTPUTS - num_outputs
    integers = functional.pad(integers, (0, 0, 0, 0, 0, missing)).view(num_blocks, OUTPUTS, num_groups, group // 4, 4)
    # Zeros are stored as their offset; what fills a block up has the scale zero as well.
    quads = (integers.permute(0, 2, 3, 1, 4).to(torch.int16) + (1 << bits - 1)).to(torch.uint8)
    if bits == 4:
        quads = quads[:, :, : group // 8] | quads[:, :, group // 8 :] << 4
    scales = functional.pad(scales, (0, 0, 0, missing)).view(num_blocks, OUTPUTS, num_groups).transpose(1, 2)
    ends = scales.contiguous().view(torch.uint8)
    torch.cat((quads.reshape(num_blocks, num_groups, -1), ends), 2, out=data)
    return PackedMatrix(data, num_outputs, num_inputs, bits)


def _quantise(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Integers int8 [N, groups, group] and scales bfloat16 [N, groups] of weight [N, K] float32."""
    group = GROUPS[bits]
    grouped = functional.pad(weight, (0, -weight.shape[1] % group)).view(weight.shape[0], -1, group)
    largest = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))
    if bits == 8:
        scales = (largest.abs() / 127).bfloat16()
        return _rounded(grouped, scales, 127, 127), scales[..., 0]
    scales, least = torch.zeros_like(largest, dtype=torch.bfloat16), torch.full_like(largest, torch.inf)
    for divisor in NIBBLE_DIVISORS:
        tried = (largest / divisor).bfloat16()
        errors = (_rounded(grouped, tried, 8, 7) * tried.float() - grouped).square().sum(2, keepdim=True)
        scales, least = torch.where(errors < least, tried, scales), torch.minimum(errors, least)
    return _rounded(grouped, scales, 8, 7), scales[..., 0]


def _rounded(grouped: Tensor, scales: Tensor, below: int, above: int) -> Tensor:
    # A scale of zero belongs to a group of zeros.
    return (grouped / scales.float().masked_fill(scales == 0, 1)).round().clamp(-below, above).to(torch.int8)


def packed_product(x: Tensor, weight: PackedMatrix) -> Tensor:
    """x [R, K] times the transpose of the weights, [R, N], without kernels: the same integers, groups and order."""
    integers, weight_scales = weight.quantised()
    group = GROUPS[weight.bits]
    # The rows as integers [R, groups, group] in float32, with scales [R, groups].
    grouped = functional.pad(x, (0, -x.shape[1] % group)).view(x.shape[0], -1, group)
    largest = grouped.abs().amax(2)
    is_zero = largest < 2.0**-100
    inputs = (grouped * torch.where(is_zero, 0, 127 / largest)[..., None]).round()
    scales = torch.where(is_zero, 0, largest / 127)
    output = x.new_zeros(x.shape[0], weight.num_outputs)
    for place in range(weight_scales.shape[1]):
        # Exact: at most 21 bits.
        products = functional.linear(inputs[:, place].double(), integers[:, place].double())
        scale = weight_scales[:, place] * scales[:, place, None]
        output = (products * scale.double() + output.double()).float()
    return output
