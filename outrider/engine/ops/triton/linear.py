"""Products with a matrix, summed in one fixed tree whatever else is in the batch (He et al., 2025).

The inputs of a matrix are divided into units, whose size hangs on the matrix alone. A unit is summed alone, in steps of
one matrix instruction, and the units are added in their order. Whether one program does all units of an output or each
has a program of its own is a question of speed: the bits are the same.
"""

import triton
import triton.language as tl

from outrider.engine.ops.triton.launch import begin as begin_kernel

UNITS = (1024, 512, 256)
"""Inputs that are summed before they meet the others; which of these belongs to the numerics."""
ENOUGH_PROGRAMS = 256
"""Tiles of 64 outputs times units that keep a GPU busy: where large units make fewer, smaller ones are taken."""


def unit_of(num_outputs: int, num_inputs: int) -> int:
    """The size of a matrix's units; a function of the matrix, or a row's bits would hang on its neighbours."""
    tiles = triton.cdiv(num_outputs, 64)
    return next((each for each in UNITS if tiles * triton.cdiv(num_inputs, each) >= ENOUGH_PROGRAMS), UNITS[-1])


@triton.jit(do_not_specialize=["num_rows", "units_each"])
def linear_units(
    x,
    weight,
    partials,
    num_rows,
    num_outputs,
    num_inputs,
    units_each,
    UNIT: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    WIDE: tl.constexpr,
    BRANCHES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """partials [parts, R, N] float32 of x [R, K] times the transpose of weight [N, K]; a part has units_each units."""
    outputs = tl.program_id(0).to(tl.int64) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    part = tl.program_id(1)
    begin_kernel(OVERLAPS)
    rows = tl.program_id(2).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    is_output = outputs < num_outputs
    begin = part * units_each * UNIT
    end = tl.minimum(begin + units_each * UNIT, num_inputs)
    total = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
    unit = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
    steps = tl.arange(0, BLOCK_INPUTS)
    for first in range(begin, end, BLOCK_INPUTS):
        inputs = first + steps
        weight_places = weight + outputs[:, None] * num_inputs + inputs[None, :]
        x_places = x + rows[None, :] * num_inputs + inputs[:, None]
        if IS_EVEN:
            w = tl.load(weight_places)
            columns = tl.load(x_places, mask=is_row[None, :], other=0.0)
        else:
            is_input = inputs < num_inputs
            w = tl.load(weight_places, mask=is_output[:, None] & is_input[None, :], other=0.0)
            columns = tl.load(x_places, mask=is_row[None, :] & is_input[:, None], other=0.0)
        if WIDE:
            unit = tl.dot(w.to(tl.float32), columns.to(tl.float32), unit, input_precision="ieee")
        else:
            unit = tl.dot(w, columns, unit)
        is_end = ((first + BLOCK_INPUTS) % UNIT == 0) | (first + BLOCK_INPUTS >= end)
        if BRANCHES:
            # The same sums; the compiler of one kind of card knows no other way, and on Hopper the other was measured.
            if is_end:
                total += unit
                unit = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
        else:
            total += tl.where(is_end, unit, 0.0)
            unit = tl.where(is_end, 0.0, unit)
    places = partials + (part.to(tl.int64) * num_rows + rows[None, :]) * num_outputs + outputs[:, None]
    tl.store(places, total, mask=is_row[None, :] & is_output[:, None])


@triton.jit
def add_units(partials, places, is_place, part_size, NUM_PARTS: tl.constexpr):
    """The sum of the parts of a product at these places, in order."""
    total = tl.load(partials + places, mask=is_place, other=0.0)
    # Unrolled, so that all loads are on their way at once.
    for part in tl.static_range(1, NUM_PARTS):
        total += tl.load(partials + part * part_size + places, mask=is_place, other=0.0)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def sum_units(
    partials,
    bias,
    output,
    num_rows,
    num_outputs,
    NUM_PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """output [R, N] float32: the parts of a product, and a bias [N] where there is one."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_outputs
    part_size = num_rows.to(tl.int64) * num_outputs
    total = add_units(partials, row * num_outputs + columns, is_column, part_size, NUM_PARTS)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_column, other=0.0)
    tl.store(output + row * num_outputs + columns, total, mask=is_column)
