"""Products of the kernels for CUDA: who adds, and beside whom, changes no bit."""

from pathlib import Path

import pytest
import torch
from support.devices.kernels import KernelOps, altered, amid_nan, assert_same
from torch import Tensor

from outrider.engine.ops import triton_ops
from outrider.engine.ops.blocks import BlockMatrix
from outrider.engine.ops.reference import ReferenceOps
from outrider.engine.ops.triton import linear

UNIT = 128
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EACH_TYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Rows, outputs and inputs: whole tiles, none, one unit and a bit, three units, more rows than a step has.
SIZES = [(1, 64, 128), (5, 96, 300), (17, 33, 260), (66, 130, 50)]


@pytest.fixture(autouse=True)
def _short_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few inputs are several of them."""
    monkeypatch.setattr(linear, "UNITS", (UNIT,))


def product(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, a matrix and a bias, with NaN around them."""
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, num_inputs, generator=generator).to(dtype)
    weight = (torch.randn(num_outputs, num_inputs, generator=generator) / num_inputs**0.5).to(dtype)
    return amid_nan(x), amid_nan(weight), amid_nan(torch.randn(num_outputs, generator=generator))


def assert_near(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    """x is rounded to the weights' type first; a bias comes last."""
    x, weight, bias = product(*sizes, dtype)
    exact = x.double() @ weight.double().T
    ops = KernelOps()
    found = ops.linear(x.float(), weight)
    assert found.dtype == torch.float32
    assert float((found - exact).norm() / exact.norm()) < 1e-6
    assert_same(ops.linear(x.float(), weight, bias), found + bias)


@EACH_TYPE
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_product_is_near_float64(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Of any sizes, whatever lies around its numbers, with and without a bias."""
    assert_near(dtype, sizes)


def test_units_as_long_as_a_card_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of 256 inputs each; how many hangs on the matrix alone, so that every part of a card has some."""
    monkeypatch.undo()
    assert_near(torch.float16, (2, 16, 700))
    sizes = (28672, 4096), (4096, 14336), (4096, 4096), (64, 128)
    assert [linear.unit_of(*size) for size in sizes] == [1024, 1024, 1024, 256]


def assert_rows_are_their_own(dtype: torch.dtype, num_rows: int) -> None:
    """Each row alone, and in parts of every kind, has the bits that it has among all."""
    x, weight, _ = product(num_rows, 66, 140, dtype)
    ops = KernelOps()
    whole = ops.linear(x, weight)
    for rows in (slice(0, 1), slice(num_rows - 1, None), slice(3, 5), slice(1, 17), slice(0, 33)):
        assert_same(ops.linear(x[rows], weight), whole[rows])


@EACH_TYPE
def test_a_row_alone_has_its_bits_of_the_batch(dtype: torch.dtype) -> None:
    """Of more rows than a step has, whose tiles are others, of two units, the second one short."""
    assert_rows_are_their_own(dtype, 66)


def assert_division_changes_nothing(dtype: torch.dtype) -> None:
    """Units by themselves, added afterwards, against one program that adds them; and a bias behind both."""
    x, weight, bias = product(5, 70, 300, dtype)
    ops, others = KernelOps(1000), KernelOps(0)
    divided, whole = ops.parts_of_product(x, weight), others.parts_of_product(x, weight)
    assert (len(divided), len(whole)) == (3, 1)
    assert_same(ops.linear(x, weight), whole[0])
    assert_same(ops.linear(x, weight, bias), others.linear(x, weight, bias))
    assert_same(divided[0] + divided[1] + divided[2], whole[0])


@EACH_TYPE
def test_a_divided_product_has_the_bits_of_one_program(dtype: torch.dtype) -> None:
    """How many multiprocessors a card has decides who adds, and not what is added to what."""
    assert_division_changes_nothing(dtype)


def launched(x: Tensor, weight: Tensor, outputs: int, rows: int, inputs: int, branches: bool = False) -> Tensor:
    """The product of one program an output tile of so many outputs, rows and inputs at a time."""
    (num_rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    partials = torch.empty(1, num_rows, num_outputs)
    sizes = {"BLOCK_OUTPUTS": outputs, "BLOCK_ROWS": rows, "BLOCK_INPUTS": inputs, "UNIT": UNIT}
    flags = {"IS_EVEN": False, "WIDE": x.dtype is torch.float32, "OVERLAPS": False, "BRANCHES": branches}
    numbers = num_rows, num_outputs, num_inputs, -(-num_inputs // UNIT)
    linear.linear_units[-(-num_outputs // outputs), 1, -(-num_rows // rows)](
        x, weight, partials, *numbers, **sizes, **flags
    )
    return partials[0]


@EACH_TYPE
def test_the_size_of_a_tile_changes_no_bit(dtype: torch.dtype) -> None:
    """Nor do the inputs of a step: a smaller card may have smaller ones."""
    x, weight, _ = product(5, 33, 200, dtype)
    whole = launched(x, weight, 64, 16, 128)
    for tile in ((32, 16, 32), (128, 128, 64), (16, 32, 16), (64, 16, 64)):
        assert_same(launched(x, weight, *tile), whole)
    # As it is compiled for Blackwell.
    assert_same(launched(x, weight, 64, 16, 128, branches=True), whole)


def test_a_packed_matrix_is_refused() -> None:
    """It is for the CPU."""
    packed = ReferenceOps(8).stack([torch.randn(16, 32)])
    assert isinstance(packed, BlockMatrix)
    with pytest.raises(ValueError, match="packed"):
        KernelOps().linear(torch.randn(1, 32), packed)


def check_all() -> None:
    """All of the above of float32, and a product of 16 bits."""
    assert_near(torch.float32, (3, 70, 260))
    assert_near(torch.bfloat16, (3, 20, 260))
    assert_rows_are_their_own(torch.float32, 6)
    assert_division_changes_nothing(torch.float32)


def test_the_check_passes_without_a_fault() -> None:
    """What the planted ones are compared with."""
    check_all()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # Inputs past the end are read, and are others' numbers.
        ("mask=is_output[:, None] & is_input[None, :]", "mask=is_output[:, None]"),
        # Units are as long as a row's neighbours make them.
        ("% UNIT == 0", "% (UNIT // (1 + (num_rows > 1))) == 0"),
        # The last unit is lost where it is short.
        (" | (first + BLOCK_INPUTS >= end)", ""),
        # A unit begins with what the one before has left.
        ("unit = tl.where(is_end, 0.0, unit)", "unit = unit"),
        # Units are added from behind.
        ("for part in tl.static_range(1, NUM_PARTS):", "for part in tl.static_range(NUM_PARTS - 1, 0, -1):"),
        # Of 16 bits, a branch of its own, sums are rounded to them.
        ("tl.dot(w, columns, unit)", "tl.dot(w, columns, unit).to(w.dtype).to(tl.float32)"),
    ],
    ids=["input mask", "unit by rows", "short unit", "unit kept", "order of units", "16 bits"],
)
def test_planted_faults_are_found(old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is an easy slip in this kernel."""
    changed = altered(linear, old, new, tmp_path)
    changed.UNITS = (UNIT,)  # type: ignore[attr-defined]
    monkeypatch.setattr(triton_ops, "linear", changed)
    with pytest.raises(AssertionError):
        check_all()
