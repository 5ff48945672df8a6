"""Weights of 8 and 4 bits: what they stand for, and that every implementation multiplies them with the same bits."""

import pytest
import torch
from support.models.engine_cases import BUILT, every_ops, native
from torch import Tensor

from outrider.engine.ops import Ops
from outrider.engine.ops.blocks import BlockMatrix, block_product, parts_of, quantise, unpacked
from outrider.errors import ModelRefused

BITS = pytest.mark.parametrize("bits", [8, 4])
SIZES = pytest.mark.parametrize(
    ("num_inputs", "num_outputs"), [(1, 1), (31, 5), (64, 16), (70, 33), (384, 640), (1000, 333), (2816, 17)]
)


def packed(weight: Tensor, bits: int) -> BlockMatrix:
    """One matrix alone."""
    return quantise([weight], bits)


def matrix_of(num_outputs: int, num_inputs: int) -> Tensor:
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(num_outputs)
    sizes = torch.rand(num_outputs, 1, generator=generator) * 3
    return torch.randn(num_outputs, num_inputs, generator=generator) * sizes


@BITS
@SIZES
def test_every_weight_is_within_half_a_step(bits: int, num_inputs: int, num_outputs: int) -> None:
    """A step is the largest weight of a group over 127, or at most over 6.5; the scale is rounded to bfloat16."""
    weight = matrix_of(num_outputs, num_inputs)
    found, group = packed(weight, bits).unpack(), {8: 64, 4: 32}[bits]
    assert found.shape == weight.shape
    for start in range(0, num_inputs, group):
        part = weight[:, start : start + group]
        step = part.abs().amax(1, keepdim=True) / (127 if bits == 8 else 6.5)
        # With 4 bits the largest weight may be cut: by two steps where its place is at 9.
        assert bool(((found[:, start : start + group] - part).abs() <= step * (0.8 if bits == 8 else 1.5)).all())


@BITS
def test_weights_on_the_grid_stay_as_they_are(bits: int) -> None:
    """What eight or four bits can say is said exactly, and quantising again changes nothing."""
    generator = torch.Generator().manual_seed(1)
    most = 127 if bits == 8 else 7
    weight = torch.randint(-most, most + 1, (50, 130), generator=generator) / 8
    weight[:, ::32] = most / 8
    once = packed(weight, bits)
    assert torch.equal(once.unpack(), weight)
    assert torch.equal(packed(once.unpack(), bits).unpack(), weight)


def hostile_matrices() -> list[Tensor]:
    """Rows of every size that float16 scales have, ties, zeros of both signs, and the largest weights."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.exp2(torch.linspace(-40, 13, 640))[:, None]
    halves = torch.randint(-20, 21, (333, 96), generator=generator) / 2
    anything = torch.randint(0, 0x477FE000, (200, 320), generator=generator, dtype=torch.int32).view(torch.float32)
    zeros = torch.zeros(9, 96)
    zeros[::2] *= -1
    zeros[3:6, :32] = torch.tensor([[-1e-45], [-3e-9], [-3e-8]])
    most = torch.tensor([[1.0, -2.0]]) * 6.5 * 65504
    return [
        torch.randn(640, 70, generator=generator) * sizes,
        halves,
        halves * sizes[:333] * 2**-13,
        anything - anything.flip(1) / 2,
        zeros,
        torch.cat((most, -most)) / 2,
        matrix_of(1, 1),
        matrix_of(17, 31),
    ]


@BITS
@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 425776), (torch.bfloat16, 423936), (torch.float16, 65504)], ids=str
)
def test_kernels_quantise_to_the_bits_of_torch(bits: int, name: str, dtype: torch.dtype, most: float) -> None:
    """Scales, integers, and what fills the last block up."""
    ops = native(name, num_threads=2, packed_bits=bits)
    for weight in hostile_matrices():
        given = weight.clamp(-most, most).to(dtype)
        made = ops.quantised(given)
        assert isinstance(made, BlockMatrix)
        assert torch.equal(made.data, packed(given, bits).data)


@BITS
@pytest.mark.parametrize("fault", [float("nan"), float("-inf"), 1e7])
def test_a_weight_without_a_scale_is_refused(bits: int, fault: float) -> None:
    """Its whole group would become zeros, or NaN."""
    weight = matrix_of(20, 100)
    weight[17, 99] = fault
    for ops in every_ops(packed_bits=bits):
        with pytest.raises(
            ModelRefused, match=r"1 groups of 32 weights hold NaN or a number beyond (425,776|8,319,008)"
        ):
            ops.quantised(weight)


@BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_whose_rows_lie_apart_is_quantised_as_any(bits: int, dtype: torch.dtype) -> None:
    """Columns that stand side by side in memory, as those of a transposed matrix do."""
    ops, weight = native(packed_bits=bits), matrix_of(500, 384).to(dtype)
    found, expected = (ops.quantised(each) for each in (weight.T.contiguous().T, weight))
    assert torch.equal(unpacked(found), unpacked(expected))


@BITS
def test_stacked_matrices_are_one(bits: int) -> None:
    """The rows of all, in their order; zeros stay zeros."""
    first, second = matrix_of(20, 96), torch.zeros(5, 96)
    both = quantise([first, second], bits)
    assert torch.equal(both.unpack(), torch.cat((packed(first, bits).unpack(), second)))


@BITS
@pytest.mark.parametrize("ops", every_ops(), ids=lambda ops: ops.name)
@SIZES
def test_every_implementation_has_the_same_bits(bits: int, ops: Ops, num_inputs: int, num_outputs: int) -> None:
    """Integers are exact and groups come in one order, so kernels of any processor agree with plain torch."""
    weight = packed(matrix_of(num_outputs, num_inputs), bits)
    x = matrix_of(23, num_inputs)
    bias = matrix_of(num_outputs, 1)[:, 0].contiguous()
    assert torch.equal(ops.linear(x, weight), block_product(x, weight))
    assert torch.equal(ops.linear(x, weight, bias), block_product(x, weight) + bias)


@BITS
@pytest.mark.parametrize("name", BUILT)
def test_the_greatest_sums_do_not_saturate(bits: int, name: str) -> None:
    """Bytes at both ends, of one sign and of two: an instruction that adds pairs within 16 bits would cut them."""
    signs = torch.tensor([[1.0], [-1.0]])
    weight, x = packed(signs.repeat(16, 640) * 3, bits), signs.repeat(1, 640) * 5
    expected = x.double() @ weight.unpack().double().T
    assert torch.allclose(native(name).linear(x, weight).double(), expected, rtol=1e-6)


@BITS
@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_not_lost(bits: int, name: str, fault: float) -> None:
    """NaN or infinity in a row makes its outputs NaN, and leaves other rows alone."""
    weight, x = packed(matrix_of(20, 200), bits), matrix_of(3, 200)
    sound = native(name).linear(x, weight)
    x[1, 77] = fault
    found = native(name).linear(x, weight)
    assert bool(found[1].isnan().all())
    assert torch.equal(found[::2], sound[::2])


@pytest.mark.parametrize("name", BUILT)
def test_tiny_and_huge_rows_are_scaled(name: str) -> None:
    """From the smallest normal numbers, which count as zero, to the largest."""
    weight, x = packed(torch.eye(64), 8), torch.ones(4, 64) * torch.tensor([[1e-38], [1e-20], [1.0], [3e38]])
    found = native(name).linear(x, weight)
    assert bool((found[0] == 0).all())
    assert torch.allclose(found[1:], x[1:], rtol=0.01)


@BITS
def test_a_product_is_near_that_of_the_weights(bits: int) -> None:
    """What is lost on top of the weights' own error is that of inputs of eight bits."""
    weight, x = packed(matrix_of(300, 576), bits), matrix_of(9, 576)
    exact = x.double() @ weight.unpack().double().T
    assert float((native().linear(x, weight) - exact).norm() / exact.norm()) < 0.01


def test_a_packed_matrix_of_another_shape_is_refused() -> None:
    """C would read past its end."""
    weight = packed(matrix_of(20, 200), 8)
    with pytest.raises(ValueError, match=r"weight is \[20, 200\], but must be \[20, 100\]"):
        native().linear(torch.zeros(1, 100), weight)
    short = BlockMatrix(weight.data[:1], "Q8_0", 20, 200)
    with pytest.raises(ValueError, match=r"weight is torch\.uint8"):
        native().linear(torch.zeros(1, 200), short)


@BITS
def test_operations_with_packed_bits_stack_packed(bits: int) -> None:
    """What `choose_ops` is asked for is how stacked matrices are kept, with kernels and without."""
    weights = [matrix_of(20, 200), matrix_of(3, 200)]
    for ops in every_ops(packed_bits=bits):
        stacked = ops.stack(weights)
        assert all(isinstance(part, BlockMatrix) for part in parts_of(stacked))
        assert torch.equal(unpacked(stacked), packed(torch.cat(weights), bits).unpack())
        assert ops.quantised(stacked) is stacked
