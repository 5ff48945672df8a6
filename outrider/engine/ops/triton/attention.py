"""Attention over lists of cache slots, in chunks that are counted from a list's first column.

A chunk of CHUNK columns is summed alone, for as many rows as see it; then a row's chunks are joined in a fixed tree
(Dao et al., 2023). So a row has the same bits alone, in a batch, in a tree and in a chain. A tile is TILE rows of the
matrix unit: token rows times the query heads of one key-value head, whose number is rounded up to HEADS.
"""

import triton
import triton.language as tl

from outrider.engine.ops.triton.launch import COUNTS, ITEM_ROWS, ITEMS, KEY_SLOTS, NUM_ITEMS, NUM_ROWS, ROW_CHUNKS
from outrider.engine.ops.triton.launch import begin as begin_kernel

LOG2_E = tl.constexpr(1.4426950408889634)
JOINED = 16
"""Chunks that are joined at a time; belongs to the numerics, as the length of a chunk does."""


@triton.jit
def _softmax_step(q, k, v, ones, columns, counts, maximum, total, output, scale_log2e, WIDE: tl.constexpr):
    """The softmax's maximum and sum, and the weighted values, after some more keys and values."""
    if WIDE:
        scores = tl.dot(q, tl.trans(k.to(tl.float32)), input_precision="ieee")
    else:
        scores = tl.dot(q, tl.trans(k))
    scores = tl.where(columns[None, :] < counts[:, None], scores * scale_log2e, float("-inf"))
    highest = tl.maximum(maximum, tl.max(scores, 1))
    # Of a row that sees nothing yet.
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(maximum - shift)
    total = total * decay[:, None]
    output = output * decay[:, None]
    # Summed by the matrix unit too, whose order does not depend on the number of warps.
    if WIDE:
        total = tl.dot(weights, ones, total, input_precision="ieee")
        output = tl.dot(weights, v.to(tl.float32), output, input_precision="ieee")
    else:
        narrow = weights.to(v.dtype)
        total = tl.dot(narrow, ones, total)
        output = tl.dot(narrow, v, output)
    return highest, total, output


@triton.jit
def _sum_chunk(
    query,
    key_cache,
    value_cache,
    key_slots,
    maxima,
    sums,
    weighted,
    rows,
    is_row,
    counts,
    chunk_places,
    first_column,
    end_column,
    group,
    num_heads,
    num_groups,
    scale_log2e,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The softmax's maximum and sum, and the weighted values, of one chunk for the rows of a tile."""
    heads_each = num_heads // num_groups
    member = tl.arange(0, TILE) % HEADS
    is_lane = is_row & (member < heads_each)
    heads = group * heads_each + member
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    query_places = (rows * num_heads + heads)[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(query + query_places, mask=is_lane[:, None] & is_dim[None, :], other=0.0)
    q = q.to(tl.float32) if WIDE else q.to(key_cache.dtype.element_ty)
    ones = tl.full((STEP, 16), 1.0, tl.float32 if WIDE else key_cache.dtype.element_ty)
    maximum = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE, 16), tl.float32)
    output = tl.zeros((TILE, BLOCK_DIM), tl.float32)
    stop = tl.minimum(first_column + CHUNK, end_column)
    for first in range(first_column, stop, STEP):
        columns = first + tl.arange(0, STEP)
        is_column = columns < stop
        slots = tl.load(key_slots + columns, mask=is_column, other=0).to(tl.int64)
        places = (slots * num_groups + group)[:, None] * HEAD_DIM + dims[None, :]
        is_place = is_column[:, None] & is_dim[None, :]
        # Loads past the end give 0: a slot there is another's, and 0 times NaN would be NaN.
        k = tl.load(key_cache + places, mask=is_place, other=0.0)
        v = tl.load(value_cache + places, mask=is_place, other=0.0)
        maximum, total, output = _softmax_step(
            q, k, v, ones, columns, counts, maximum, total, output, scale_log2e, WIDE
        )
    is_seen = is_lane & (counts > first_column)
    places = chunk_places * num_heads + heads
    tl.store(maxima + places, maximum, mask=is_seen)
    tl.store(sums + places, tl.max(total, 1), mask=is_seen)
    weighted_places = weighted + places[:, None] * HEAD_DIM + dims[None, :]
    tl.store(weighted_places, output, mask=is_seen[:, None] & is_dim[None, :])


@triton.jit
def _rows_of_item(item, item_rows, row_counts, row_chunks, token):
    """Rows of an item of work, which of a tile's there are, what each sees, and the chunk with its places."""
    is_row = token < tl.load(item + 1)
    rows = tl.load(item_rows + tl.load(item) + token, mask=is_row, other=0).to(tl.int64)
    chunk = tl.load(item + 3)
    counts = tl.load(row_counts + rows, mask=is_row, other=0)
    chunk_places = tl.load(row_chunks + rows, mask=is_row, other=0).to(tl.int64) + chunk
    return rows, is_row, counts, chunk, chunk_places


# Where work and the sums begin hangs on how many rows and chunks there are, and is no reason to compile anew.
@triton.jit(do_not_specialize_on_alignment=["work", "sums"])
def sum_shared_chunks(
    query,
    key_cache,
    value_cache,
    work,
    maxima,
    sums,
    weighted,
    num_heads,
    num_groups,
    scale_log2e,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WIDE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Chunks by items of work (outrider.engine.batching.shared_work), each of which several rows see.

    Any number of programs takes them by turns.
    """
    begin_kernel(OVERLAPS)
    items = work + tl.load(work + ITEMS)
    item_rows = work + tl.load(work + ITEM_ROWS)
    row_counts = work + tl.load(work + COUNTS)
    row_chunks = work + tl.load(work + ROW_CHUNKS)
    key_slots = work + tl.load(work + KEY_SLOTS)
    token = tl.arange(0, TILE) // HEADS
    for index in range(tl.program_id(0), tl.load(work + NUM_ITEMS) * num_groups, tl.num_programs(0)):
        item = items + (index // num_groups) * 4
        rows, is_row, counts, chunk, chunk_places = _rows_of_item(item, item_rows, row_counts, row_chunks, token)
        _sum_chunk(
            query,
            key_cache,
            value_cache,
            key_slots + tl.load(item + 2),
            maxima,
            sums,
            weighted,
            rows,
            is_row,
            counts,
            chunk_places,
            chunk * CHUNK,
            tl.max(counts, 0),
            index % num_groups,
            num_heads,
            num_groups,
            scale_log2e,
            CHUNK,
            STEP,
            TILE,
            HEADS,
            HEAD_DIM,
            BLOCK_DIM,
            WIDE,
        )


@triton.jit(
    do_not_specialize=["num_chunks"],
    do_not_specialize_on_alignment=["key_slots", "key_starts", "key_counts", "sums"],
)
def sum_own_chunks(
    query,
    key_cache,
    value_cache,
    key_slots,
    key_starts,
    key_counts,
    maxima,
    sums,
    weighted,
    num_chunks,
    num_heads,
    num_groups,
    scale_log2e,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Chunks of each row's own list, shared or not: one program a chunk, group and row."""
    chunk = tl.program_id(0)
    group = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    count = tl.load(key_counts + row)
    if chunk * CHUNK < count:
        token = tl.arange(0, TILE) // HEADS
        rows = token.to(tl.int64) * 0 + row
        is_row = token < 1
        counts = tl.where(is_row, count, 0)
        _sum_chunk(
            query,
            key_cache,
            value_cache,
            key_slots + tl.load(key_starts + row),
            maxima,
            sums,
            weighted,
            rows,
            is_row,
            counts,
            rows * num_chunks + chunk,
            chunk * CHUNK,
            count,
            group,
            num_heads,
            num_groups,
            scale_log2e,
            CHUNK,
            STEP,
            TILE,
            HEADS,
            HEAD_DIM,
            BLOCK_DIM,
            WIDE,
        )


@triton.jit
def _join(
    maxima,
    sums,
    weighted,
    sinks,
    output,
    row,
    head,
    first,
    num_chunks,
    num_heads,
    JOINED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """A head of a row's output from its chunks."""
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    lanes = tl.arange(0, JOINED)
    # A maximum is the same in any order.
    highest = tl.full((JOINED,), float("-inf"), tl.float32)
    for begin in range(0, num_chunks, JOINED):
        chunks = begin + lanes
        places = (first + chunks) * num_heads + head
        highest = tl.maximum(highest, tl.load(maxima + places, mask=chunks < num_chunks, other=float("-inf")))
    peak = tl.max(highest, 0)
    total = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks + head) * LOG2_E
        peak = tl.maximum(peak, sink)
        total = tl.exp2(sink - peak)
    joined = tl.zeros((BLOCK_DIM,), tl.float32)
    for begin in range(0, num_chunks, JOINED):
        chunks = begin + lanes
        is_chunk = chunks < num_chunks
        places = (first + chunks) * num_heads + head
        weights = tl.exp2(tl.load(maxima + places, mask=is_chunk, other=float("-inf")) - peak)
        total += tl.sum(weights * tl.load(sums + places, mask=is_chunk, other=0.0), 0)
        value_places = weighted + places[:, None] * HEAD_DIM + dims[None, :]
        values = tl.load(value_places, mask=is_chunk[:, None] & is_dim[None, :], other=0.0)
        joined += tl.sum(values * weights[:, None], 0)
    places = output + (row * num_heads + head) * HEAD_DIM + dims
    tl.store(places, tl.div_rn(joined, total), mask=is_dim)


@triton.jit(do_not_specialize_on_alignment=["work", "sums"])
def join_shared_chunks(
    maxima,
    sums,
    weighted,
    work,
    sinks,
    output,
    num_heads,
    CHUNK: tl.constexpr,
    JOINED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """output [R, H, D] of what sum_shared_chunks leaves; one program a row and head."""
    begin_kernel(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    # Rows that fill a graph up repeat the last.
    source = tl.minimum(row, tl.load(work + NUM_ROWS) - 1)
    num_chunks = tl.cdiv(tl.load(work + tl.load(work + COUNTS) + source), CHUNK)
    first = tl.load(work + tl.load(work + ROW_CHUNKS) + source).to(tl.int64)
    head = tl.program_id(1)
    _join(
        maxima,
        sums,
        weighted,
        sinks,
        output,
        row,
        head,
        first,
        num_chunks,
        num_heads,
        JOINED,
        HEAD_DIM,
        BLOCK_DIM,
        HAS_SINKS,
    )


@triton.jit(do_not_specialize=["row_chunks"], do_not_specialize_on_alignment=["key_counts", "sums"])
def join_own_chunks(
    maxima,
    sums,
    weighted,
    key_counts,
    sinks,
    output,
    num_heads,
    row_chunks,
    CHUNK: tl.constexpr,
    JOINED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """output [R, H, D] of what sum_own_chunks leaves, with row_chunks for each row; one program a row and head."""
    row = tl.program_id(0).to(tl.int64)
    num_chunks = tl.cdiv(tl.load(key_counts + row), CHUNK)
    first = row * row_chunks
    head = tl.program_id(1)
    _join(
        maxima,
        sums,
        weighted,
        sinks,
        output,
        row,
        head,
        first,
        num_chunks,
        num_heads,
        JOINED,
        HEAD_DIM,
        BLOCK_DIM,
        HAS_SINKS,
    )
