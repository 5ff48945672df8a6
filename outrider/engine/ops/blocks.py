"""Matrices in blocks of 16 outputs, as kernels/blocks.h describes them: the values of a GGUF file, none rounded.

A block is read in one stream: for each group of 32 inputs the weights of 16 outputs, four inputs at a time, and their
scales. `int8` and `int4` are made here of any weights, as Q8_0 and Q4_0: symmetric, groups of 32, scales in float16.
With 8 bits a group's largest weight is 127 scales; with 4 bits the scale is the one of a few around the largest weight
that leaves the least squared error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from outrider.errors import ModelRefused
from outrider.model_files.gguf.types import GROUP, KINDS, OUTPUTS, SPAN, Scale

MAX_PARTS = 4
LARGEST = {8: 127, 15: 127 * 128 + 63}
"""The largest input of a group as an integer, by the bits of inputs: as one byte, or as 128 times one plus another."""
# A four-bit scale is the largest weight over one of these; below 8 the largest weight is cut.
NIBBLE_DIVISORS = (8.0, -8.0, 7.0, -7.0, 6.5, -6.5, 9.0, -9.0)
# By bits, the largest weight whose scales are all finite in float16.
LARGEST_WEIGHT = {8: 127 * 65504.0, 4: 6.5 * 65504.0}
# Weights that are quantised at a time: they and what is made on the way stay in a core's own cache.
PIECE_NUMBERS = 1 << 18
QUANTISED = {8: "Q8_0", 4: "Q4_0"}
"""The kind that weights of so many bits are made into."""


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """Weights [num_outputs, num_inputs] of one kind."""

    data: Tensor
    """uint8 [blocks, bytes of a block]; what fills the last block up is anything."""
    kind: str
    num_outputs: int
    num_inputs: int
    input_bits: int = 8
    """Bits to which products quantise what they multiply the weights with; a key of LARGEST."""

    @classmethod
    def empty(
        cls,
        kind: str,
        num_outputs: int,
        num_inputs: int,
        memory: Callable[..., Tensor] = torch.empty,
        input_bits: int = 8,
    ) -> "BlockMatrix":
        """A matrix with nothing in it yet, whose memory is given as torch.empty gives it."""
        data = memory(KINDS[kind].shape(num_outputs, num_inputs), dtype=torch.uint8)
        return cls(data, kind, num_outputs, num_inputs, input_bits)

    @property
    def number(self) -> int:
        """The kind's number in kernels/blocks.h."""
        return list(KINDS).index(self.kind)

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_outputs, self.num_inputs

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the numbers that it stands for."""
        return torch.float32

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def __len__(self) -> int:
        return self.num_outputs

    def numel(self) -> int:
        return self.num_outputs * self.num_inputs

    def integers(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The integers int16 [num_outputs, groups, 2, 16], and scales and minima float32 [num_outputs, groups, 2].

        A group of 32 inputs has two halves, which most kinds scale alike.
        """
        kind, num_blocks, num_groups = KINDS[self.kind], self.data.shape[0], -(-self.num_inputs // GROUP)
        # Groups [blocks, groups, bytes], and the heads of their spans [blocks, groups, bytes].
        if head := kind.head_bytes:
            spans = torch.split(self.data, head + SPAN * kind.group_bytes, 1)
            groups = torch.cat([span[:, head:] for span in spans], 1).view(num_blocks, num_groups, kind.group_bytes)
            heads = torch.stack([span[:, :head] for span in spans], 1).repeat_interleave(SPAN, 1)[:, :num_groups]
        else:
            groups = self.data.view(num_blocks, num_groups, kind.group_bytes)
            heads = self.data.new_empty(num_blocks, num_groups, 0)
        lines, scales = groups[..., : kind.line_bytes], groups[..., kind.line_bytes :]
        lines = lines.reshape(num_blocks, -1, kind.bits, OUTPUTS, 4)
        if kind.bits == 8:
            quads = lines.to(torch.int16)
        else:
            quads = torch.cat((lines[:, :, :4] & 15, lines[:, :, :4] >> 4), 2).to(torch.int16)
            if kind.bits > 4:
                # Of each byte of a line so many quads have their upper bits.
                width = kind.bits - 4
                shifts = torch.arange(8 // width, dtype=torch.uint8)[:, None, None] * width
                upper = lines[:, :, 4:, None] >> shifts & (1 << width) - 1
                quads |= upper.flatten(2, 3).to(torch.int16) << 4
        # [blocks, groups, quads, outputs, 4] to outputs first.
        integers = quads.permute(0, 3, 1, 2, 4).reshape(num_blocks * OUTPUTS, -1, 2, 16)[: self.num_outputs]
        if kind.table is None:
            integers = integers - kind.offset
        else:
            integers = torch.tensor(kind.table, dtype=torch.int16)[integers.long()]
        width = OUTPUTS * kind.scale.num_bytes
        minima = _scales(kind.scale, scales[..., width:], heads[..., 2 * OUTPUTS :]) if kind.has_minimum else None
        found = _scales(kind.scale, scales[..., :width], heads[..., : 2 * OUTPUTS])
        return integers, found[: self.num_outputs], None if minima is None else minima[: self.num_outputs]

    def unpack(self) -> Tensor:
        """The weights that it stands for, float32 [num_outputs, num_inputs]; those with a minimum are rounded once."""
        integers, scales, minima = self.integers()
        values = integers * scales[..., None]
        values = values if minima is None else values + minima[..., None]
        return values.flatten(1)[:, : self.num_inputs].contiguous()


@dataclass(frozen=True, slots=True)
class StackedMatrix:
    """The rows of several matrices, of which each is kept in its own way; at most MAX_PARTS."""

    parts: tuple[BlockMatrix | Tensor, ...]
    places: Tensor
    """Their addresses as kernels read them, int64."""

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def device(self) -> torch.device:
        return self.places.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the numbers that it stands for."""
        return torch.float32

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __len__(self) -> int:
        return self.shape[0]

    def numel(self) -> int:
        return sum(part.numel() for part in self.parts)


Weight = Tensor | BlockMatrix | StackedMatrix
"""A matrix [N, K] that `linear` multiplies with: bfloat16, float32, in blocks, or parts of these."""


def unpacked(weight: Weight) -> Tensor:
    """The matrix itself, or what it stands for in float32."""
    if isinstance(weight, StackedMatrix):
        return torch.cat([unpacked(part).float() for part in weight.parts])
    return weight.unpack() if isinstance(weight, BlockMatrix) else weight


def parts_of(weight: Weight) -> tuple[BlockMatrix | Tensor, ...]:
    """The matrices whose rows stand below each other; most have only one."""
    return weight.parts if isinstance(weight, StackedMatrix) else (weight,)


def first_rows(weight: Weight, count: int) -> Weight:
    """The first rows of a matrix, where they lie. Raises ValueError for parts of several kinds."""
    if isinstance(weight, StackedMatrix):
        raise ValueError("rows are taken of one matrix, and not of several parts")
    if isinstance(weight, BlockMatrix):
        return replace(weight, data=weight.data[: -(-count // OUTPUTS)], num_outputs=min(count, len(weight)))
    return weight[:count]


def are_same(one: Weight | None, other: Weight | None) -> bool:
    """Whether both are tensors of the same bits; blocks are no copy."""
    return (
        isinstance(one, Tensor) and isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    )


def _scales(scale: Scale, own: Tensor, heads: Tensor) -> Tensor:
    """Scales float32 [outputs, groups, 2] of their bytes [blocks, groups, bytes] and those of their spans."""
    own, heads = own.contiguous(), heads.contiguous()
    if scale is Scale.FLOAT16:
        found = own.view(torch.float16).float()
    elif scale is Scale.POWER:
        # Half of what the exponent says, which is where its values are twice what they should be.
        found = torch.ldexp(torch.ones(own.shape), own.int() - 128)
    else:
        spans = heads.view(torch.float16).float()
        found = own.view(torch.int8).float() * spans.repeat(1, 1, own.shape[2] // OUTPUTS)
    # One for a group, or one for each half of it.
    halves = found.view(*own.shape[:2], -1, OUTPUTS).expand(-1, -1, 2, -1)
    # [blocks, groups, halves, outputs] to outputs first.
    return halves.permute(0, 3, 1, 2).flatten(0, 1)


def quantise(weights: Sequence[Tensor], bits: int) -> BlockMatrix:
    """Quantises the rows of all weights [N, K] into one matrix, in torch; kernels/quantise.c makes the same bits.

    Raises ModelRefused for NaN, and for weights beyond LARGEST_WEIGHT.
    """
    weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
    made = BlockMatrix.empty(QUANTISED[bits], weight.shape[0], weight.shape[1])
    num_blocks = max(1, PIECE_NUMBERS // (OUTPUTS * made.num_inputs))
    for rows, data in zip(torch.split(weight, num_blocks * OUTPUTS), torch.split(made.data, num_blocks), strict=True):
        integers, scales = _quantise(rows.float(), bits)
        num_groups, missing = scales.shape[1], data.shape[0] * OUTPUTS - len(rows)
        integers = functional.pad(integers, (0, 0, 0, 0, 0, missing))
        integers = integers.view(data.shape[0], OUTPUTS, num_groups, GROUP // 4, 4)
        quads = (integers.permute(0, 2, 3, 1, 4).to(torch.int16) + (1 << bits - 1)).to(torch.uint8)
        if bits == 4:
            quads = quads[:, :, :4] | quads[:, :, 4:] << 4
        scales = functional.pad(scales, (0, 0, 0, missing)).view(data.shape[0], OUTPUTS, num_groups).transpose(1, 2)
        parts = quads.reshape(data.shape[0], num_groups, -1), scales.contiguous().view(torch.uint8)
        torch.cat(parts, 2, out=data.view(data.shape[0], num_groups, -1))
    return made


def refuse_weights(num_groups: int, bits: int) -> None:
    """Raises ModelRefused where groups of weights have no scale."""
    if num_groups:
        raise ModelRefused(
            f"{num_groups} groups of {GROUP} weights hold NaN or a number beyond {LARGEST_WEIGHT[bits]:,.0f}, "
            f"which is the largest that int{bits} can hold; another dtype can"
        )


def _quantise(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Integers int8 [N, groups, group] and scales float16 [N, groups] of weight [N, K] float32."""
    grouped = functional.pad(weight, (0, -weight.shape[1] % GROUP)).view(weight.shape[0], -1, GROUP)
    largest = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))
    # NaN is not within any limit.
    refuse_weights(int((~(largest.abs() <= LARGEST_WEIGHT[bits])).sum()), bits)
    if bits == 8:
        scales = (largest.abs() / 127).half()
        return _rounded(grouped, scales, 127, 127), scales[..., 0]
    scales, least = torch.zeros_like(largest, dtype=torch.float16), torch.full_like(largest, torch.inf)
    for divisor in NIBBLE_DIVISORS:
        tried = (largest / divisor).half()
        squares = (_rounded(grouped, tried, 8, 7) * tried.float() - grouped).square().view(*grouped.shape[:2], -1, 4)
        # In one order, whatever the processor: four sums of every fourth input, and these in pairs.
        sums = squares[:, :, 0]
        for place in range(1, GROUP // 4):
            sums = sums + squares[:, :, place]
        errors = ((sums[..., 0] + sums[..., 1]) + (sums[..., 2] + sums[..., 3]))[..., None]
        scales, least = torch.where(errors < least, tried, scales), torch.minimum(errors, least)
    return _rounded(grouped, scales, 8, 7), scales[..., 0]


def _rounded(grouped: Tensor, scales: Tensor, below: int, above: int) -> Tensor:
    # A scale of zero belongs to a group of zeros.
    return (grouped / scales.float().masked_fill(scales == 0, 1)).round().clamp(-below, above).to(torch.int8)


def block_product(x: Tensor, weight: BlockMatrix) -> Tensor:
    """x [R, K] times the transpose of the weights, [R, N], without kernels: the same integers, groups and order."""
    integers, scales, minima = weight.integers()
    # The rows as integers [R, groups, halves, 16], with scales [R, groups].
    grouped = functional.pad(x, (0, -x.shape[1] % GROUP)).view(x.shape[0], -1, GROUP)
    largest = grouped.abs().amax(2)
    is_zero, limit = largest < 2.0**-100, LARGEST[weight.input_bits]
    # A number over a tensor would be a product with its reciprocal, which is rounded twice.
    factors = torch.where(is_zero, 0, torch.full_like(largest, limit) / largest)
    inputs = (grouped * factors[..., None]).round().view(*largest.shape, 2, -1).double()
    row_scales = torch.where(is_zero, 0, largest / limit)
    halves = (slice(0, 1), slice(1, 2)) if KINDS[weight.kind].scale is Scale.HALVES else (slice(0, 2),)
    output = x.new_zeros(x.shape[0], weight.num_outputs)
    for place in range(scales.shape[1]):
        for half in halves:
            # Exact: at most 28 bits in float64, of which float32 keeps 24.
            given = inputs[:, place, half].flatten(1)
            products = given @ integers[:, place, half].flatten(1).double().T
            scale = scales[:, place, half.start] * row_scales[:, place, None]
            output = (products.float().double() * scale.double() + output.double()).float()
            if minima is not None:
                sums = row_scales[:, place] * given.sum(1).float()
                output = (minima[:, place, half.start].double() * sums[:, None].double() + output.double()).float()
    return output
