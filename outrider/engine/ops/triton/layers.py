"""What lies between the products of a transformer's layer, in one kernel each: the bits are those of the operations.

Products come as parts (outrider.engine.ops.triton.linear). Rows past the number that stands in the work's header only
fill a graph up: they repeat its last row, and are stored nowhere.
"""

import triton
import triton.language as tl

from outrider.engine.ops.triton.launch import (
    COUNTS,
    ITEMS,
    KEY_SLOTS,
    NUM_ROWS,
    POSITIONS,
    ROW_CHUNKS,
    SLOTS,
    TOKEN_IDS,
    begin,
)
from outrider.engine.ops.triton.linear import add_units
from outrider.engine.ops.triton.rows import norm_factor, normed, places_of_pairs, rotated, silu


@triton.jit(do_not_specialize_on_alignment=["work"])
def embed(embedding, work, norm, x, hidden, size, epsilon, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """x [R, H] float32, the rows of token ids, and hidden [R, H], what the first norm makes of them."""
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < size
    source = tl.minimum(row, tl.load(work + NUM_ROWS) - 1)
    token = tl.load(work + tl.load(work + TOKEN_IDS) + source).to(tl.int64)
    values = tl.load(embedding + token * size + columns, mask=is_column, other=0.0).to(tl.float32)
    scales = tl.load(norm + columns, mask=is_column, other=0.0)
    tl.store(x + row * size + columns, values, mask=is_column)
    tl.store(hidden + row * size + columns, normed(values, scales, size, epsilon), mask=is_column)


@triton.jit(do_not_specialize=["num_rows"])
def add_and_norm(
    x,
    partials,
    bias,
    norm,
    hidden,
    num_rows,
    size,
    epsilon,
    NUM_PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Adds a product to x [R, H] in place; hidden [R, H] is what the next norm makes of it."""
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < size
    places = row * size + columns
    total = add_units(partials, places, is_column, num_rows.to(tl.int64) * size, NUM_PARTS)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_column, other=0.0)
    values = tl.load(x + places, mask=is_column, other=0.0) + total
    scales = tl.load(norm + columns, mask=is_column, other=0.0)
    tl.store(x + places, values, mask=is_column)
    tl.store(hidden + places, normed(values, scales, size, epsilon), mask=is_column)


@triton.jit(do_not_specialize=["num_rows"])
def multiply_silu(
    partials,
    bias,
    output,
    num_rows,
    width,
    NUM_PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """output [R, M] = silu(gate) * up of the product [R, 2M] = gate beside up."""
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < width
    part_size = num_rows.to(tl.int64) * width * 2
    places = row * 2 * width + columns
    gate = add_units(partials, places, is_column, part_size, NUM_PARTS)
    up = add_units(partials, places + width, is_column, part_size, NUM_PARTS)
    if HAS_BIAS:
        gate += tl.load(bias + columns, mask=is_column, other=0.0)
        up += tl.load(bias + width + columns, mask=is_column, other=0.0)
    tl.store(output + row * width + columns, silu(gate) * up, mask=is_column)


@triton.jit
def _numbers_of_head(parts, bias, places, is_place, part_size, NUM_PARTS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Numbers of a product of which each part begins with a head, at places in it, with their bias."""
    numbers = add_units(parts, places, is_place, part_size, NUM_PARTS)
    if HAS_BIAS:
        numbers += tl.load(bias + places, mask=is_place, other=0.0)
    return numbers


@triton.jit
def _turned(first, second, cos, sin, position, half, TURNING: tl.constexpr):
    """Halves of a head, of which the first TURNING // 2 pairs are turned by a position."""
    angles = position * (TURNING // 2) + half
    row_cos = tl.load(cos + angles, mask=half < TURNING // 2, other=1.0)
    row_sin = tl.load(sin + angles, mask=half < TURNING // 2, other=0.0)
    return rotated(first, second, row_cos, row_sin)


@triton.jit
def _place_of_head(query, key_cache, value_cache, work, row, head, num_heads, num_groups, HEAD_DIM: tl.constexpr):
    """Where a head of a row is stored: one of the queries, the keys or the values."""
    if head < num_heads:
        target = query + (row * num_heads + head) * HEAD_DIM
    else:
        slot = tl.load(work + tl.load(work + SLOTS) + row).to(tl.int64)
        place = (slot * num_groups + (head - num_heads) % num_groups) * HEAD_DIM
        target = key_cache + place
        if head >= num_heads + num_groups:
            target = value_cache + place
    return target


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["work"])
def split_heads(
    partials,
    bias,
    query_norm,
    key_norm,
    cos,
    sin,
    work,
    query,
    key_cache,
    value_cache,
    num_rows,
    num_heads,
    num_groups,
    size,
    epsilon,
    NUM_PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TURNING: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Norms and turns the heads of a product [R, (H + 2G) D], and stores them; one program a row and head.

    size is the head dimension again, as a number that a mean is divided by.
    """
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row_width = (num_heads + 2 * num_groups) * HEAD_DIM
    part_size = num_rows.to(tl.int64) * row_width
    half = tl.arange(0, HALF)
    is_half = half < HEAD_DIM // 2
    low, high = places_of_pairs(half, HEAD_DIM, TURNING)
    if row < tl.load(work + NUM_ROWS):
        column = head * HEAD_DIM
        own = partials + row * row_width + column
        first = _numbers_of_head(own, bias + column, low, is_half, part_size, NUM_PARTS, HAS_BIAS)
        second = _numbers_of_head(own, bias + column, high, is_half, part_size, NUM_PARTS, HAS_BIAS)
        if head < num_heads + num_groups:
            if HAS_NORM:
                dims = tl.arange(0, BLOCK)
                # Once more as a whole: its sum is that of the operation, which does not know halves.
                whole = _numbers_of_head(own, bias + column, dims, dims < HEAD_DIM, part_size, NUM_PARTS, HAS_BIAS)
                factor = norm_factor(whole, size, epsilon)
                norm = query_norm
                if head >= num_heads:
                    norm = key_norm
                first = first * factor * tl.load(norm + low, mask=is_half, other=0.0)
                second = second * factor * tl.load(norm + high, mask=is_half, other=0.0)
            position = tl.load(work + tl.load(work + POSITIONS) + row)
            first, second = _turned(first, second, cos, sin, position, half, TURNING)
        target = _place_of_head(query, key_cache, value_cache, work, row, head, num_heads, num_groups, HEAD_DIM)
        tl.store(target + low, first, mask=is_half)
        tl.store(target + high, second, mask=is_half)


@triton.jit(do_not_specialize_on_alignment=["work"])
def store_rows(source, work, features, size, first_column, row_stride, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Stores source [R, H] at the rows' slots of features, from a column on."""
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    if row < tl.load(work + NUM_ROWS):
        values = tl.load(source + row * size + columns, mask=is_column, other=0.0)
        place = tl.load(work + tl.load(work + SLOTS) + row).to(tl.int64) * row_stride + first_column + columns
        tl.store(features + place, values, mask=is_column)


@triton.jit(do_not_specialize=["by"], do_not_specialize_on_alignment=["work", "ids"])
def go_down(work, ids, by):
    """Moves rows, each with items of its own, down or up their lists in place, where the tokens ids [R] int64 are.

    What is no token, because nothing could be drawn, becomes one that is there; what follows is not used.
    """
    row = tl.program_id(0)
    tl.store(work + tl.load(work + TOKEN_IDS) + row, tl.maximum(tl.load(ids + row), 0).to(tl.int32))
    position = work + tl.load(work + POSITIONS) + row
    tl.store(position, tl.load(position) + by)
    place = work + tl.load(work + COUNTS) + row
    count = tl.load(place) + by
    tl.store(place, count)
    # Its chunks are counted in the order of its items, each of which says where its list begins.
    item = work + tl.load(work + ITEMS) + tl.load(work + tl.load(work + ROW_CHUNKS) + row) * 4
    keys = work + tl.load(work + KEY_SLOTS) + tl.load(item + 2)
    tl.store(work + tl.load(work + SLOTS) + row, tl.load(keys + count - 1))
