"""Blocks of every type of GGUF: the values of a file, and products that are the same by every implementation."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.models.engine_cases import BUILT, every_ops, native
from support.models.gguf_blocks import FORMS, Array, every_scale, hostile_blocks, random_blocks, reference
from torch import Tensor

from outrider.engine.ops import Ops
from outrider.engine.ops.blocks import LARGEST, BlockMatrix, block_product
from outrider.engine.ops.native import NativeOps
from outrider.model_files.gguf.types import GROUP, KINDS

KIND = pytest.mark.parametrize("kind", FORMS)
NAME = pytest.mark.parametrize("name", BUILT)
INPUT_BITS = pytest.mark.parametrize("input_bits", LARGEST)
ROWS = 33


def filled(kind: str, stored: Array, ops: NativeOps | None = None) -> BlockMatrix:
    """A matrix of the rows of a file, uint8 [N, bytes]."""
    ops, form = ops or native(), FORMS[kind]
    matrix = ops.blocks(kind, len(stored), stored.shape[1] // form.size * form.length)
    # The last three powers of two, which not every weight has a multiple of.
    faults = int((stored.reshape(-1, form.size)[:, 0] > 252).sum()) if form.scale is None else 0
    assert ops.fill(matrix, torch.from_numpy(stored), 0) == faults
    return matrix


def bits(values: Tensor | Array) -> Array:
    """The bits of float32, in which zeros of two signs differ."""
    return np.ascontiguousarray(values).view(np.uint32)


def inputs(num_inputs: int, num_rows: int = ROWS) -> Tensor:
    """Rows of very different sizes, one of them zero."""
    generator = torch.Generator().manual_seed(num_inputs)
    x = torch.randn(num_rows, num_inputs, generator=generator) * torch.logspace(-3, 2, num_rows)[:, None]
    x[num_rows // 2] = 0
    return x


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether the bits are those, but for which NaN it is."""
    is_none = expected.isnan()
    return torch.equal(found.isnan(), is_none) and torch.equal(found[~is_none], expected[~is_none])


def test_the_kinds_are_those_that_are_described() -> None:
    """With the sizes of the file's blocks."""
    assert {name: (kind.block_len, kind.block_bytes) for name, kind in KINDS.items()} == {
        name: (form.length, form.size) for name, form in FORMS.items()
    }


@KIND
@NAME
def test_blocks_have_the_files_values(kind: str, name: str) -> None:
    """To the bit: bytes at random, every pattern of a packed scale, scales that are zero, subnormal and largest."""
    found = [random_blocks(kind, 50, 768, scales="any"), random_blocks(kind, 16, 256), every_scale(kind)]
    for stored in (*found, hostile_blocks(kind)):
        assert np.array_equal(bits(filled(kind, stored, native(name)).unpack()), bits(reference(kind, stored)))


@KIND
@NAME
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_pieces_of_a_file_fill_the_same_blocks(kind: str, name: str, num_threads: int) -> None:
    """Rows come as they are read, with several threads, and a last block that is not full."""
    stored, ops = random_blocks(kind, 107, 512), native(name, num_threads=num_threads)
    whole, matrix = filled(kind, stored), ops.blocks(kind, 107, 512)
    for first, last in ((64, 107), (0, 16), (16, 64)):
        assert ops.fill(matrix, torch.from_numpy(stored[first:last]), first) == 0
    assert torch.equal(matrix.unpack(), whole.unpack())
    assert torch.equal(matrix.data[:6], whole.data[:6])


@KIND
def test_heads_that_llama_cpp_rotates_are_put_back(kind: str) -> None:
    """Neighbours of a head become halves: whole rows move, and nothing in them."""
    stored, heads, size = random_blocks(kind, 192, 256), 6, 32
    turned = stored.reshape(heads, 2, size // 2, -1).swapaxes(1, 2).reshape(stored.shape)
    ops = native()
    matrix = ops.blocks(kind, 192, 256)
    assert ops.fill(matrix, torch.from_numpy(turned.copy()), 0, size) == 0
    assert torch.equal(matrix.unpack(), torch.from_numpy(reference(kind, stored)))


@KIND
@pytest.mark.parametrize("fault", [np.inf, -np.inf, np.nan])
def test_scales_that_are_no_numbers_are_counted(kind: str, fault: float) -> None:
    """Each f16 that is none, scale or minimum, so that the file can be refused."""
    stored, form = random_blocks(kind, 20, 512), FORMS[kind]
    places = [byte for byte in (form.scale, form.minimum) if byte is not None]
    for row, byte in enumerate(places):
        stored[7 * row + 3, byte : byte + 2] = np.array([fault], "<f2").view(np.uint8)
    ops = native()
    assert ops.fill(ops.blocks(kind, 20, 512), torch.from_numpy(stored), 0) == len(places)


@KIND
@INPUT_BITS
@pytest.mark.parametrize("ops", every_ops(), ids=lambda ops: ops.name)
@pytest.mark.parametrize(("num_outputs", "groups"), [(1, 1), (17, 9), (100, 24)])
def test_every_implementation_has_the_products_of_the_blocks(
    kind: str, input_bits: int, ops: Ops, num_outputs: int, groups: int
) -> None:
    """To the bit those of integers, groups and order in plain torch, of one row as of many."""
    width = max(GROUP, FORMS[kind].length)
    num_inputs = -(-groups * GROUP // width) * width
    stored = random_blocks(kind, num_outputs, num_inputs, seed=groups)
    weight = replace(filled(kind, stored), input_bits=input_bits)
    x, bias = inputs(num_inputs), torch.linspace(-3, 3, num_outputs)
    expected = block_product(x, weight)
    assert same(ops.linear(x, weight, bias), expected + bias)
    for first, last in ((0, 1), (4, 6), (6, 11), (11, 20), (20, ROWS)):
        assert same(ops.linear(x[first:last].contiguous(), weight), expected[first:last])


@KIND
@NAME
@INPUT_BITS
def test_a_rows_bits_are_its_own(kind: str, name: str, input_bits: int) -> None:
    """Whatever rows stand beside it, up to 33, and however many threads share the work."""
    weight, x = replace(filled(kind, random_blocks(kind, 333, 768)), input_bits=input_bits), inputs(768)
    expected = native(name).linear(x, weight)
    for num_threads in (1, 2, 3):
        ops = native(name, num_threads=num_threads)
        for num_rows in range(1, ROWS + 1):
            assert same(ops.linear(x[-num_rows:].contiguous(), weight), expected[-num_rows:])


@KIND
@NAME
@INPUT_BITS
def test_only_the_inputs_are_rounded(kind: str, name: str, input_bits: int) -> None:
    """A product is within half a step of every input, and some float32 rounding, of that of the file's values."""
    stored, x = random_blocks(kind, 64, 512), inputs(512)
    exact = torch.from_numpy(reference(kind, stored)).double()
    found = native(name).linear(x, replace(filled(kind, stored), input_bits=input_bits)).double()
    groups = x.double().view(ROWS, -1, GROUP)
    steps = groups.abs().amax(2) / LARGEST[input_bits]
    sizes = exact.abs().view(64, -1, GROUP).sum(2)
    limit = steps @ sizes.T / 2 + 1e-5 * x.abs().double() @ exact.abs().T
    assert bool(((found - x.double() @ exact.T).abs() <= limit).all())
    # And by far more than rounding alone, where eight bits are what is computed with; with fifteen by hardly more.
    lost = float((found - x.double() @ exact.T).abs().max()) / float(found.abs().max())
    assert lost > 1e-4 if input_bits == 8 else 1e-8 < lost < 1e-4


@KIND
@NAME
@INPUT_BITS
def test_hostile_scales_compute_as_float32_does(kind: str, name: str, input_bits: int) -> None:
    """Zero, subnormal, negative and largest ones, infinite powers of two included: nothing is lost or made up."""
    stored = hostile_blocks(kind)
    weight, x = replace(filled(kind, stored), input_bits=input_bits), inputs(FORMS[kind].length, 9)
    assert same(native(name).linear(x, weight), block_product(x, weight))


@KIND
@pytest.mark.parametrize("ops", every_ops(), ids=lambda ops: ops.name)
def test_a_row_is_looked_up_as_it_is(kind: str, ops: Ops) -> None:
    """To the bit, of the first, of the last, and of the same one twice."""
    stored, ids = random_blocks(kind, 77, 512, scales="any"), torch.tensor([0, 76, 15, 16, 76, 31, 40])
    found = ops.embed(filled(kind, stored), ids)
    assert np.array_equal(bits(found), bits(reference(kind, stored)[ids.numpy()]))


@NAME
@pytest.mark.parametrize("kinds", [("Q4_K", "Q4_K", "Q6_K"), ("Q5_0", "IQ4_XS", "Q8_0"), ("MXFP4", "Q2_K", "Q3_K")])
def test_queries_keys_and_values_may_differ_in_kind(name: str, kinds: tuple[str, ...]) -> None:
    """A stack of them gives the outputs of each, to the bit; a matrix of floats may be among them."""
    parts = [filled(kind, random_blocks(kind, size, 512)) for kind, size in zip(kinds, (96, 32, 33), strict=True)]
    ops, x, bias = native(name), inputs(512), torch.linspace(-2, 2, 161 + 20)
    wide = torch.randn(20, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    alone = torch.cat([ops.linear(x, part) for part in (*parts, wide)], 1)
    stacked = ops.stack([*parts, wide])
    assert stacked.shape == (181, 512)
    for rows in (1, 5, ROWS):
        assert torch.equal(ops.linear(x[:rows].contiguous(), stacked, bias), alone[:rows] + bias)
