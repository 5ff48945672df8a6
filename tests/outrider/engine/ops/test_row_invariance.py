"""The rule of the CPU path: a row's bits do not depend on the other rows, on chunking, on threads or on the build."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from support.models.engine_cases import BUILT, AttentionCase, attend, attention_case, keys_of, native, rotate, rows_of
from torch import Tensor

from outrider.engine.ops import Ops, Weight
from outrider.engine.ops.reference import ReferenceOps

NUM_ROWS = 300
WIDTH = 203
# Ends of consecutive pieces: each number of rows that a tile may be cut into, and long runs.
CUTS = [0, 1, 3, 8, 16, 20, 23, 39, 300]
Operation = Callable[[Ops, slice], Tensor]


def by_rows() -> dict[str, Operation]:
    """Every operation on some rows of one fixed input."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_ROWS, WIDTH, generator=generator)
    weight, bias = torch.randn(91, WIDTH, generator=generator), torch.randn(91, generator=generator)
    packed = {bits: ReferenceOps(bits).stack([weight]) for bits in (8, 4)}
    scores, keys = torch.randn(NUM_ROWS, 300, generator=generator), keys_of(NUM_ROWS, generator)
    case = attention_case(NUM_ROWS, 6, 2, 72)
    narrow = replace(case, key_cache=case.key_cache.bfloat16(), value_cache=case.value_cache.bfloat16())

    def stored(ops: Ops, rows: slice, whole: AttentionCase = case) -> Tensor:
        part = rows_of(whole, rows)
        query = rotate(ops, part)
        cached = [cache[part.plan.slots] for cache in (part.key_cache, part.value_cache)]
        return torch.cat([heads.flatten(1) for heads in (query, *cached)], dim=1)

    return {
        "linear bf16": lambda ops, rows: ops.linear(x[rows], weight.bfloat16(), bias),
        "linear int8": lambda ops, rows: ops.linear(x[rows], packed[8], bias),
        "linear int4": lambda ops, rows: ops.linear(x[rows], packed[4]),
        "linear f32": lambda ops, rows: ops.linear(x[rows], weight),
        "rms_norm": lambda ops, rows: ops.rms_norm(x[rows], weight[0], 1e-6),
        "silu_multiply": lambda ops, rows: ops.gate_multiply(x[rows, :202].contiguous()),
        "gelu_multiply": lambda ops, rows: ops.gate_multiply(x[rows, :202].contiguous(), is_gelu=True),
        "clamped_multiply": lambda ops, rows: ops.clamped_multiply(x[rows, :202].contiguous(), 1.702, 0.9),
        "rotate_and_store": stored,
        "rotate_and_store bf16": lambda ops, rows: stored(ops, rows, narrow),
        "attention": lambda ops, rows: attend(ops, rows_of(case, rows)),
        "attention with sinks": lambda ops, rows: attend(ops, rows_of(case, rows), scores[0, :6].contiguous()),
        "attention bf16": lambda ops, rows: attend(ops, rows_of(narrow, rows)),
        "softmax": lambda ops, rows: ops.softmax(scores[rows]),
        "draw": lambda ops, rows: ops.draw(scores[rows], keys[rows]),
    }


OPERATIONS = by_rows()
EACH = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
LINEAR = OPERATIONS["linear bf16"]


def assert_invariant(operation: Operation, ops: Ops, whole: Tensor) -> None:
    for start, end in pairwise(CUTS):
        assert torch.equal(operation(ops, slice(start, end)), whole[start:end])
    for row in (0, 7, 299):
        assert torch.equal(operation(ops, slice(row, row + 1)), whole[row : row + 1])


@EACH
@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_rows_of_compiled_kernels_are_independent(operation: Operation, name: str, num_threads: int) -> None:
    """Pieces of 1 to 261 rows give the bits of 300 rows at once, which one thread alone computed."""
    whole = operation(native(name, 1), slice(0, NUM_ROWS))
    assert_invariant(operation, native(name, num_threads), whole)


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_every_number_of_rows_gives_the_bits_of_one(name: str, num_threads: int, bits: int) -> None:
    """1 to 50 rows over more weights than one panel, with a tail: strips of every height, and blocks of rows."""
    generator = torch.Generator().manual_seed(5)
    x, floats = torch.randn(50, 1043, generator=generator), torch.randn(601, 1043, generator=generator)
    ops = native(name, num_threads, packed_bits=bits if bits <= 8 else None)
    weight = ops.stack([floats.bfloat16() if bits == 16 else floats])
    one_by_one = torch.cat([ops.linear(row, weight) for row in x.split(1)])
    for num_rows in range(1, 51):
        assert torch.equal(ops.linear(x[:num_rows], weight), one_by_one[:num_rows])


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("heads_of_a_group", [1, 2, 3, 4, 5, 8])
def test_heads_that_advance_together_are_independent(name: str, heads_of_a_group: int) -> None:
    """Eight threads cut the heads of a single row finer than one thread does those of many rows."""
    case = attention_case(20, 2 * heads_of_a_group, 2, 72)
    whole = attend(native(name, 1), case)
    for row in range(20):
        assert torch.equal(attend(native(name, 8), rows_of(case, slice(row, row + 1))), whole[row : row + 1])


@EACH
def test_rows_of_the_reference_are_independent(operation: Operation) -> None:
    """The same rule without compiled kernels."""
    ops = ReferenceOps()
    whole = operation(ops, slice(0, 40))
    for start, end in ((0, 1), (1, 3), (3, 8), (8, 40)):
        assert torch.equal(operation(ops, slice(start, end)), whole[start:end])


@EACH
@pytest.mark.skipif(len(BUILT) < 2, reason="one build of the kernels only")
def test_builds_agree(operation: Operation) -> None:
    """Kernels for longer and for shorter registers give the same bits."""
    results = [operation(native(name), slice(0, NUM_ROWS)) for name in BUILT]
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("num_inputs", [16, 100, 1024])
@pytest.mark.parametrize("num_outputs", [1, 4, 6, 4099])
def test_outputs_do_not_depend_on_their_place(num_inputs: int, num_outputs: int) -> None:
    """An output is one dot product wherever the tile borders fall: shifted weights give shifted outputs."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(7, num_inputs, generator=generator)
    weight = torch.randn(num_outputs + 3, num_inputs, generator=generator).bfloat16()
    ops = native()
    whole = ops.linear(x, weight)
    for shift in range(1, 4):
        assert torch.equal(ops.linear(x, weight[shift:]), whole[:, shift:])


def test_the_check_finds_another_order_of_additions() -> None:
    """A planted bug: an implementation that adds in another order for single rows does not pass."""

    class Careless(ReferenceOps):
        def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
            if len(x) == 1 and isinstance(weight, Tensor):
                return super().linear(x.flip(1), weight.flip(1), bias)
            return super().linear(x, weight, bias)

    with pytest.raises(AssertionError):
        assert_invariant(LINEAR, Careless(), LINEAR(Careless(), slice(0, NUM_ROWS)))
