"""Blocks of GGUF's types, written from the format's description: values, bytes at random, every scale, quantisers.

A type is told by where its bits lie, and one rule makes numbers of them: `(d s) q - m t`, where d and m are scales of
the whole block in f16, s and t those of a group of weights, and q a weight's integer. Every product and the difference
is exact in float64, and is rounded once to float32. Nothing of the gguf package is used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
# Doubled, so that all are integers.
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
HOSTILE_SCALES = np.array(
    [0.0, -0.0, 2.0**-24, -(2.0**-24), 1023 * 2.0**-24, 2.0**-14, -(2.0**-14), 1.0, -1.0, 65504.0, -65504.0], np.float16
)
"""Zero of both signs, subnormal, the smallest normal, negative, the largest."""


class Bits(NamedTuple):
    """Places of so many bits of each of several integers: the byte in the block, and the lowest bit in it."""

    byte: Array
    shift: Array
    width: int


@dataclass(frozen=True)
class Form:
    """Where the integers of a block lie, the lowest bits first."""

    length: int
    size: int
    weights: Sequence[Bits]
    offset: int = 0
    table: Array | None = None
    """Weight of each integer, instead of the integer less the offset."""
    scale: int | None = 0
    """Byte of d; without one the first byte is an exponent."""
    minimum: int | None = None
    """Byte of m."""
    adds: bool = False
    """Whether m is added; else it is subtracted."""
    scales: Sequence[Bits] = ()
    scale_offset: int = 0
    is_signed: bool = False
    """Whether s is a byte with a sign."""
    minima: Sequence[Bits] = ()

    @property
    def bits(self) -> int:
        """Of a weight."""
        return sum(part.width for part in self.weights)

    @property
    def scale_bits(self) -> int:
        """Of a group's scale."""
        return sum(part.width for part in self.scales)

    @property
    def minimum_bits(self) -> int:
        """Of a group's minimum."""
        return sum(part.width for part in self.minima)


def at(byte: Any, shift: Any, width: int) -> Bits:
    """Bits at places that are given by numbers or arrays of them."""
    bytes_, shifts = np.broadcast_arrays(np.asarray(byte), np.asarray(shift))
    return Bits(bytes_, shifts, width)


def nibbles(first: int, length: int) -> Bits:
    """Half of the weights in the low nibbles of as many bytes, the other half in the high ones."""
    place = np.arange(length)
    return at(first + place % (length // 2), place // (length // 2) * 4, 4)


def forms() -> Mapping[str, Form]:
    """All types by their names; places of K types are told for each of 256 weights, 16 groups or 8."""
    place, few = np.arange(256), np.arange(32)
    half, within, eight, sixteen = place // 128, place % 128, np.arange(8), np.arange(16)
    pairs_of_32 = at(place // 64 * 32 + place % 32, place // 32 % 2 * 4, 4)
    low, high = eight[:4], eight[4:]
    # Groups 4 to 7 keep two bits of six above those of groups 0 to 3.
    scales = [
        at([*(4 + low), *(8 + high)], 0, 4),
        at([*(4 + low), *(high)], [*(0 * low + 4), *(0 * high + 6)], 2),
    ]
    minima = [
        at([*(8 + low), *(8 + high)], [*(0 * low), *(0 * high + 4)], 4),
        at([*(8 + low), *(4 + high)], [*(0 * low + 4), *(0 * high + 6)], 2),
    ]
    packed = {"minimum": 2, "scales": scales, "minima": minima}
    fifth = at(2 + few // 8, few % 8, 1)
    quarters = at(half * 32 + place % 32, within // 32 * 2, 2)
    return {
        "Q4_0": Form(32, 18, [nibbles(2, 32)], offset=8),
        "Q4_1": Form(32, 20, [nibbles(4, 32)], minimum=2, adds=True),
        "Q5_0": Form(32, 22, [nibbles(6, 32), fifth], offset=16),
        "Q5_1": Form(32, 24, [nibbles(8, 32), at(fifth.byte + 2, fifth.shift, 1)], minimum=2, adds=True),
        "Q8_0": Form(32, 34, [at(2 + few, 0, 8)], table=(np.arange(256) + 128) % 256 - 128),
        "IQ4_NL": Form(32, 18, [nibbles(2, 32)], table=NL),
        "MXFP4": Form(32, 17, [nibbles(1, 32)], table=E2M1, scale=None),
        "Q2_K": Form(
            256,
            84,
            [at(16 + quarters.byte, quarters.shift, 2)],
            scale=80,
            minimum=82,
            scales=[at(sixteen, 0, 4)],
            minima=[at(sixteen, 4, 4)],
        ),
        "Q3_K": Form(
            256,
            110,
            [at(32 + quarters.byte, quarters.shift, 2), at(place % 32, place // 32, 1)],
            offset=4,
            scale=108,
            scales=[at(96 + sixteen % 8, sixteen // 8 * 4, 4), at(104 + sixteen % 4, sixteen // 4 * 2, 2)],
            scale_offset=32,
        ),
        "Q4_K": Form(256, 144, [at(16 + pairs_of_32.byte, pairs_of_32.shift, 4)], **packed),
        "Q5_K": Form(
            256, 176, [at(48 + pairs_of_32.byte, pairs_of_32.shift, 4), at(16 + place % 32, place // 32, 1)], **packed
        ),
        "Q6_K": Form(
            256,
            210,
            [at(half * 64 + within % 64, within // 64 * 4, 4), at(128 + quarters.byte, quarters.shift, 2)],
            offset=32,
            scale=208,
            scales=[at(192 + sixteen, 0, 8)],
            is_signed=True,
        ),
        "IQ4_XS": Form(
            256,
            136,
            [at(8 + place // 32 * 16 + place % 16, place // 16 % 2 * 4, 4)],
            table=NL,
            scales=[at(4 + eight // 2, eight % 2 * 4, 4), at(2 + eight // 4, eight % 4 * 2, 2)],
            scale_offset=32,
        ),
    }


FORMS = forms()
K_KINDS = tuple(kind for kind, form in FORMS.items() if form.length == 256)


def read(blocks: Array, parts: Sequence[Bits]) -> Array:
    """Integers [n, count] of blocks [n, bytes]."""
    found, above = np.zeros((len(blocks), len(parts[0].byte)), np.int64), 0
    for byte, shift, width in parts:
        found |= (blocks[:, byte].astype(np.int64) >> shift & (1 << width) - 1) << above
        above += width
    return found


def write(blocks: Array, parts: Sequence[Bits], integers: Array) -> None:
    """Puts integers [n, count] into blocks of which these bits are zero."""
    above = 0
    for byte, shift, width in parts:
        values = (integers >> above & (1 << width) - 1) << shift
        for place, each in enumerate(byte):
            blocks[:, each] |= values[:, place].astype(np.uint8)
        above += width


def halves(blocks: Array, byte: int) -> Array:
    """The f16 at a byte of each block, float64 [n, 1]."""
    return blocks[:, byte : byte + 2].copy().view("<f2").astype(np.float64)


def put_halves(blocks: Array, byte: int, values: Array) -> None:
    """Writes an f16 [n] at a byte of each block."""
    blocks[:, byte : byte + 2] = values.astype("<f2")[:, None].view(np.uint8)


def reference(kind: str, stored: Array) -> Array:
    """Values, float32 [rows, weights], of rows of whole blocks, uint8 [rows, bytes]."""
    form = FORMS[kind]
    blocks = stored.reshape(-1, form.size)
    with np.errstate(all="ignore"):
        return _values(form, blocks).astype(np.float32).reshape(len(stored), -1)


def _values(form: Form, blocks: Array) -> Array:
    integers = read(blocks, form.weights)
    weights = integers - form.offset if form.table is None else form.table[integers]
    scale = np.exp2(blocks[:, :1] - 128.0) if form.scale is None else halves(blocks, form.scale)
    if form.scales:
        own = read(blocks, form.scales) - form.scale_offset
        scale = scale * (own.astype(np.int8) if form.is_signed else own)
    values = np.repeat(scale, form.length // scale.shape[1], 1) * weights
    if form.minimum is None:
        return values
    least = halves(blocks, form.minimum)
    if form.minima:
        least = np.repeat(least * read(blocks, form.minima), form.length // len(form.minima[0].byte), 1)
    return values + least if form.adds else values - least


def random_blocks(kind: str, rows: int, width: int, seed: int = 0, scales: str = "weights") -> Array:
    """Rows of random bytes, uint8 [rows, bytes], whose f16 are as those of trained weights, or "any" finite ones."""
    form, random = FORMS[kind], np.random.default_rng([seed, *kind.encode()])
    blocks = random.integers(0, 256, (rows * width // form.length, form.size), dtype=np.uint8)
    # So that the values, whatever their integers, are within some tenths.
    steps = 1 << form.bits + form.scale_bits + (0 if form.table is None else 3)
    for byte, size in ((form.scale, 0.3 / steps), (form.minimum, 0.15 / (1 << form.minimum_bits))):
        if byte is not None and scales == "any":
            bits = random.integers(0, 1 << 16, len(blocks), dtype=np.uint16)
            # Without the exponent of what is no number.
            put_halves(blocks, byte, np.where(bits & 0x7C00 == 0x7C00, bits ^ 0x4000, bits).view(np.float16))
        elif byte is not None:
            put_halves(blocks, byte, size * random.uniform(0.5, 2, len(blocks)) * random.choice([-1, 1], len(blocks)))
    if form.scale is None:
        blocks[:, 0] = (
            random.integers(0, 253, len(blocks)) if scales == "any" else random.integers(118, 124, len(blocks))
        )
    return blocks.reshape(rows, -1)


def every_scale(kind: str) -> Array:
    """Blocks, uint8 [n, bytes], in which each packed scale has every pattern at each of its places.

    Types without packed scales have every finite f16, or every exponent.
    """
    form = FORMS[kind]
    pairs = 1 << form.scale_bits + form.minimum_bits
    count = pairs if form.scales else 256 if form.scale is None else 1 << 16
    blocks = random_blocks(kind, 1, count * form.length).reshape(count, form.size)
    if form.scales:
        for parts in (form.scales, form.minima):
            for byte, shift, width in parts:
                keep = np.full(form.size, 255, np.uint8)
                np.bitwise_and.at(keep, byte, ~((1 << width) - 1 << shift).astype(np.uint8))
                blocks &= keep
        groups = len(form.scales[0].byte)
        # Another pattern in each group of a block.
        patterns = (np.arange(count)[:, None] + np.arange(groups) * (count // groups + 1)) % count
        write(blocks, form.scales, patterns & (1 << form.scale_bits) - 1)
        if form.minima:
            write(blocks, form.minima, patterns >> form.scale_bits)
        return blocks
    if form.scale is None:
        blocks[:, 0] = np.arange(256)
        return blocks
    bits = np.arange(1 << 16, dtype=np.uint16)
    for byte, order in ((form.scale, bits), (form.minimum, bits[::-1] * 40503 & 0xFFFF)):
        if byte is not None:
            put_halves(blocks, byte, order.astype(np.uint16).view(np.float16))
    is_finite = np.isfinite(halves(blocks, form.scale)[:, 0])
    return blocks[is_finite & (True if form.minimum is None else np.isfinite(halves(blocks, form.minimum)[:, 0]))]


def hostile_blocks(kind: str) -> Array:
    """Blocks, uint8 [n, bytes], of random integers with every pair of HOSTILE_SCALES for d and m."""
    form = FORMS[kind]
    many = len(HOSTILE_SCALES)
    blocks = random_blocks(kind, 1, many * many * form.length, seed=1).reshape(-1, form.size)
    for byte, scales in ((form.scale, np.repeat(HOSTILE_SCALES, many)), (form.minimum, np.tile(HOSTILE_SCALES, many))):
        if byte is not None:
            put_halves(blocks, byte, scales)
    if form.scale is None:
        # From what is subnormal in float32 to what is infinite with large weights.
        blocks[:, 0] = np.tile([0, 1, 2, 3, 127, 128, 250, 251, 252, 253, 254], many)
    return blocks


def quantised(kind: str, weights: Array) -> Array:
    """Rows of float32 [rows, width] in a type, each number the nearest that its group can say; uint8 [rows, bytes]."""
    form = FORMS[kind]
    count = len(form.scales[0].byte) if form.scales else 1
    x = weights.astype(np.float64).reshape(-1, count, form.length // count)
    blocks = np.zeros((len(x), form.size), np.uint8)
    most = (1 << form.bits) - 1 - form.offset if form.table is None else int(form.table.max())
    low, high = np.minimum(x.min(2), 0), np.maximum(x.max(2), 0)
    steps = (high - low if form.minimum is not None else np.maximum(high, -low)) / most
    if form.scale is None:
        blocks[:, :1] = np.ceil(np.log2(np.maximum(steps, 1e-30))) + 128
        steps = np.exp2(blocks[:, :1] - 128.0)
    else:
        top = (127 if form.is_signed else (1 << form.scale_bits) - 1 - form.scale_offset) if form.scales else 0
        steps = _shared(blocks, form.scale, form.scales, steps, top, form.scale_offset)
    least = np.zeros_like(steps)
    if form.minimum is not None:
        top = (1 << form.minimum_bits) - 1
        least = _shared(blocks, form.minimum, form.minima, low if form.adds else -low, top) * (-1 if form.adds else 1)
    scaled = (x + least[..., None]) / np.where(steps == 0, 1, steps)[..., None]
    if form.table is None:
        integers = np.clip(np.rint(scaled) + form.offset, 0, (1 << form.bits) - 1)
    else:
        order = np.argsort(form.table, kind="stable")
        rising = form.table[order]
        integers = order[np.searchsorted((rising[1:] + rising[:-1]) / 2, scaled)]
    write(blocks, form.weights, integers.reshape(len(blocks), -1).astype(np.int64))
    return blocks.reshape(len(weights), -1)


def _shared(blocks: Array, byte: int, parts: Sequence[Bits], values: Array, top: int, offset: int = 0) -> Array:
    """Writes values [n, groups] as an f16 and integers up to `top` times it; returns what they have become."""
    put_halves(blocks, byte, values.max(1) / top if parts else values[:, 0])
    common = halves(blocks, byte)
    if not parts:
        return common
    integers = np.clip(np.rint(values / np.where(common == 0, 1, common)), 0, top).astype(np.int64)
    write(blocks, parts, integers + offset)
    return common * integers
