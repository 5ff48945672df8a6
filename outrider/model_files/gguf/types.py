"""The types of numbers in GGUF files, and how matrices of them are kept in memory. The one table of these facts.

The compiled kernels have their own (outrider/engine/ops/kernels/blocks.h), which is compared with this as they load.
"""

from dataclasses import dataclass
from enum import Enum

OUTPUTS = 16
"""Number of outputs in a block of a matrix in memory."""
GROUP, SPAN, LINE = 32, 8, 64
"""Inputs of a group, groups of a span, and bytes of a line: four inputs of 16 outputs."""
NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FOURTH = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class Scale(Enum):
    """How a kind keeps its scales."""

    FLOAT16 = "float16 for a group"
    BYTE = "a byte with a sign for a group, times float16 for a span"
    HALVES = "the same with a byte for each half of a group"
    POWER = "a power of two for a group"

    @property
    def num_bytes(self) -> int:
        """Bytes of a group's scale of one output."""
        return 1 if self in (Scale.BYTE, Scale.POWER) else 2

    @property
    def has_spans(self) -> bool:
        return self in (Scale.BYTE, Scale.HALVES)


@dataclass(frozen=True, slots=True)
class TensorType:
    """Storage of numbers: in blocks of so many, each of so many bytes."""

    name: str
    block_len: int
    block_bytes: int

    @property
    def memory_bits(self) -> float:
        """Bits of a number in memory under `--dtype file`: float32 where it has to be, or bfloat16."""
        return 32 if self.name in ("F32", "F16") else 16

    def row_bytes(self, num_inputs: int) -> int:
        """Bytes of a row of the file."""
        return num_inputs // self.block_len * self.block_bytes


@dataclass(frozen=True, slots=True)
class BlockType(TensorType):
    """A type whose matrices are kept as they are in the file: what a weight in memory is made of."""

    bits: int
    scale: Scale
    has_minimum: bool = False
    offset: int = 0
    """What a weight without a table has too much."""
    table: tuple[int, ...] | None = None

    @property
    def memory_bits(self) -> float:
        return 8 * (self.group_bytes + self.head_bytes / SPAN) / (GROUP * OUTPUTS)

    @property
    def line_bytes(self) -> int:
        return self.bits * LINE

    @property
    def head_bytes(self) -> int:
        """Bytes of a span before its groups."""
        return 2 * OUTPUTS * (1 + self.has_minimum) if self.scale.has_spans else 0

    @property
    def group_bytes(self) -> int:
        return self.line_bytes + OUTPUTS * self.scale.num_bytes * (1 + self.has_minimum)

    def shape(self, num_outputs: int, num_inputs: int) -> tuple[int, int]:
        """The shape of a matrix's data."""
        groups = -(-num_inputs // GROUP)
        return -(-num_outputs // OUTPUTS), groups * self.group_bytes + -(-groups // SPAN) * self.head_bytes


# All types that the gguf package turns into float32, by the format's number.
TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18, 4, Scale.FLOAT16, offset=8),
    3: BlockType("Q4_1", 32, 20, 4, Scale.FLOAT16, has_minimum=True),
    6: BlockType("Q5_0", 32, 22, 5, Scale.FLOAT16, offset=16),
    7: BlockType("Q5_1", 32, 24, 5, Scale.FLOAT16, has_minimum=True),
    8: BlockType("Q8_0", 32, 34, 8, Scale.FLOAT16, offset=128),
    10: BlockType("Q2_K", 256, 84, 4, Scale.HALVES, has_minimum=True),
    11: BlockType("Q3_K", 256, 110, 4, Scale.HALVES, offset=4),
    12: BlockType("Q4_K", 256, 144, 4, Scale.BYTE, has_minimum=True),
    13: BlockType("Q5_K", 256, 176, 5, Scale.BYTE, has_minimum=True),
    14: BlockType("Q6_K", 256, 210, 6, Scale.HALVES, offset=32),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18, 4, Scale.FLOAT16, table=NONLINEAR),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136, 4, Scale.BYTE, table=NONLINEAR),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17, 4, Scale.POWER, table=FOURTH),
    40: TensorType("NVFP4", 64, 36),
}
KINDS = {each.name: each for each in TYPES.values() if isinstance(each, BlockType)}
"""In the order of kernels/blocks.h."""
