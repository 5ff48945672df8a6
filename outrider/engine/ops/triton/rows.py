"""What a row needs beside products and attention, each a function of that row alone."""

import triton
import triton.language as tl


@triton.jit
def norm_factor(x, size, epsilon):
    """1 / sqrt(mean of x^2 + epsilon), of x with zeros past its size (Zhang and Sennrich, 2019)."""
    mean = tl.div_rn(tl.sum(x * x, 0), size.to(tl.float32))
    return tl.div_rn(1.0, tl.sqrt_rn(mean + epsilon))


@triton.jit
def normed(x, weight, size, epsilon):
    """x times its norm_factor times weight."""
    return x * norm_factor(x, size, epsilon) * weight


@triton.jit
def silu(x):
    """x / (1 + e^-x)."""
    return tl.div_rn(x, 1.0 + tl.exp(-x))


@triton.jit
def rms_norm(x, weight, output, size, epsilon, BLOCK: tl.constexpr):
    """output [R, D] of x [R, D] float32 and weight [D] float32; one program a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < size
    values = tl.load(x + row * size + columns, mask=is_column, other=0.0)
    scales = tl.load(weight + columns, mask=is_column, other=0.0)
    tl.store(output + row * size + columns, normed(values, scales, size, epsilon), mask=is_column)


@triton.jit
def gelu(x):
    """x (1 + tanh(u)) / 2 = x / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and Gimpel, 2016)."""
    return tl.div_rn(x, 1.0 + tl.exp(x * (x * x * -0.07135481282553325 - 1.5957691216057308)))


@triton.jit
def gate_multiply(gate_up, output, width, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    """output [R, M] = gelu(gate) or silu(gate) * up of gate_up [R, 2M] = gate beside up, float32."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=is_column, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=is_column, other=0.0)
    gated = gelu(gate) if IS_GELU else silu(gate)
    tl.store(output + row * width + columns, gated * up, mask=is_column)


@triton.jit
def clamped_multiply(gate_up, output, width, slope, limit, BLOCK: tl.constexpr):
    """Product g / (1 + e^(-slope g)) (u + 1), of gates up to limit and u from -limit to limit."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=is_column, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=is_column, other=0.0)
    # So that NaN stays NaN.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    gated = tl.div_rn(gate, 1.0 + tl.exp(-slope * gate))
    tl.store(output + row * width + columns, gated * (up + 1.0), mask=is_column)


@triton.jit
def rotated(first, second, cos, sin):
    """Both halves of a head turned, as in rotate_half (Su et al., 2021)."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def places_of_pairs(half, head_dim, turning):
    """Offsets in a head of both elements of pairs: first those that turn, i and i + T/2, and then the others."""
    turns = half < turning // 2
    return half + tl.where(turns, 0, turning // 2), half + tl.where(turns, turning // 2, head_dim // 2)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def rotate_and_store(
    query,
    key,
    value,
    positions,
    slots,
    cos,
    sin,
    output,
    key_cache,
    value_cache,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    num_heads,
    num_groups,
    HEAD_DIM: tl.constexpr,
    TURNING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row and head: of H query heads, then of G keys with their values."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = tl.arange(0, BLOCK)
    is_half = half < HEAD_DIM // 2
    position = tl.load(positions + row)
    turns = half < TURNING // 2
    row_cos = tl.load(cos + position * (TURNING // 2) + half, mask=turns, other=1.0)
    row_sin = tl.load(sin + position * (TURNING // 2) + half, mask=turns, other=0.0)
    low, high = places_of_pairs(half, HEAD_DIM, TURNING)
    if head < num_heads:
        source = query + row * query_row + head * query_head
        first = tl.load(source + low, mask=is_half, other=0.0)
        second = tl.load(source + high, mask=is_half, other=0.0)
        first, second = rotated(first, second, row_cos, row_sin)
        target = output + (row * num_heads + head) * HEAD_DIM
        tl.store(target + low, first, mask=is_half)
        tl.store(target + high, second, mask=is_half)
    else:
        group = head - num_heads
        source = key + row * key_row + group * key_head
        first = tl.load(source + low, mask=is_half, other=0.0)
        second = tl.load(source + high, mask=is_half, other=0.0)
        first, second = rotated(first, second, row_cos, row_sin)
        place = (tl.load(slots + row) * num_groups + group) * HEAD_DIM
        tl.store(key_cache + place + low, first, mask=is_half)
        tl.store(key_cache + place + high, second, mask=is_half)
        source = value + row * value_row + group * value_head
        first = tl.load(source + low, mask=is_half, other=0.0)
        second = tl.load(source + high, mask=is_half, other=0.0)
        tl.store(value_cache + place + low, first, mask=is_half)
        tl.store(value_cache + place + high, second, mask=is_half)
