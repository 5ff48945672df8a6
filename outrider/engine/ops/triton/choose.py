"""Which token a row's noise chooses: the arithmetic of kernels/draw.c, and so its ids.

Noise is that of outrider/engine/noise.py. Its logarithm is the series of Sun's fdlibm (e_log.c) in plain products and
sums, which every device rounds alike. Ids below 0 are faults: -1 where no score is finite, -2 at a NaN or +inf.
"""

import triton
import triton.language as tl

PIECE = 4096
"""Tokens of a program."""
BLOCK = 1024
"""Tokens that a program looks at at a time."""
# Above every noise minus the least: the largest uniform is 1 - 2^-53, whose noise is 36.74, and the least noise -3.62.
NOISE_RANGE = tl.constexpr(40.5)


@triton.jit
def _logarithm(x):
    """log(x) within 1 ulp for positive normal x float64."""
    shifted = x.to(tl.uint64, bitcast=True) + (0x3FF0000000000000 - 0x3FE6A09E00000000)
    exponent = (shifted >> 52).to(tl.int64).to(tl.float64) - 1023.0
    mantissa = (shifted & 0x000FFFFFFFFFFFFF) + 0x3FE6A09E00000000
    f = mantissa.to(tl.float64, bitcast=True) - 1.0
    s = f / (f + 2.0)
    z = s * s
    w = z * z
    even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01))
    odd = 2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)
    series = even + z * (6.666666666666735130e-01 + w * odd)
    half_square = f * f * 0.5
    small = exponent * 1.90821492927058770002e-10 + s * (half_square + series)
    return exponent * 6.93147180369123816490e-01 + (f - (half_square - small))


@triton.jit
def gumbel(key, tokens):
    """Standard Gumbel noise float64 of a key for these tokens."""
    word = key.to(tl.uint64, bitcast=True) + (tokens.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    word = word ^ (word >> 31)
    uniform = ((word >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -_logarithm(-_logarithm(uniform))


@triton.jit
def _better(value, token, other_value, other_token):
    """The greater of two with its token, of equal ones the lower token."""
    is_other = (other_value > value) | ((other_value == value) & (other_token < token))
    return tl.where(is_other, other_value, value), tl.where(is_other, other_token, token)


@triton.jit
def find_best(
    logits,
    best,
    tokens,
    num_tokens,
    row_stride,
    num_pieces,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The greatest logit of each piece of a row, best [R, pieces] float32, and its lowest token; -2 at a fault."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    lowest = tl.full((BLOCK,), 2147483647, tl.int32)
    faults = tl.zeros((BLOCK,), tl.int32)
    for begin in range(piece * PIECE, tl.minimum((piece + 1) * PIECE, num_tokens), BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        values = tl.load(logits + row * row_stride + ids, mask=ids < num_tokens, other=float("-inf"))
        faults |= (~(values < float("inf"))).to(tl.int32)
        is_greater = values > highest
        highest = tl.where(is_greater, values, highest)
        lowest = tl.where(is_greater, ids, lowest)
    value, token = tl.reduce((highest, lowest), 0, _better)
    token = tl.where(value == float("-inf"), -1, token)
    place = row * num_pieces + piece
    tl.store(best + place, value)
    tl.store(tokens + place, tl.where(tl.max(faults, 0) > 0, -2, token))


@triton.jit(do_not_specialize_on_alignment=["temperatures", "keys"])
def add_noise(
    logits,
    temperatures,
    keys,
    best,
    tokens,
    sums,
    winners,
    num_tokens,
    row_stride,
    num_pieces,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
):
    """The greatest sum of score and noise of each piece of a row, float64, and its token: see Ops.choose.

    At temperature 0 the score of the best token is 0 and that of all others -inf.
    """
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    key = tl.load(keys + row)
    pieces = tl.arange(0, PIECES)
    maxima = tl.load(best + row * num_pieces + pieces, mask=pieces < num_pieces, other=float("-inf"))
    peak = tl.max(maxima, 0)
    own = tl.load(best + row * num_pieces + piece)
    token = tl.load(tokens + row * num_pieces + piece)
    divisor = temperature.to(tl.float32)
    value = own.to(tl.float64)
    if temperature != 0.0:
        if token >= 0:
            most = tl.where(temperature == 1.0, own - peak, tl.div_rn(own - peak, divisor))
            token = -1
            value = tl.full((), float("-inf"), tl.float64)
            # No noise lifts the rest of such a piece above the row's best.
            if most > -NOISE_RANGE:
                highest = tl.full((BLOCK,), float("-inf"), tl.float64)
                lowest = tl.full((BLOCK,), 2147483647, tl.int32)
                for begin in range(piece * PIECE, tl.minimum((piece + 1) * PIECE, num_tokens), BLOCK):
                    ids = begin + tl.arange(0, BLOCK)
                    scores = tl.load(logits + row * row_stride + ids, mask=ids < num_tokens, other=float("-inf"))
                    if temperature != 1.0:
                        scores = tl.div_rn(scores - peak, divisor)
                    total = scores.to(tl.float64) + gumbel(key, ids)
                    is_greater = total > highest
                    highest = tl.where(is_greater, total, highest)
                    lowest = tl.where(is_greater, ids, lowest)
                value, token = tl.reduce((highest, lowest), 0, _better)
                token = tl.where(value == float("-inf"), -1, token)
    tl.store(sums + row * num_pieces + piece, value)
    tl.store(winners + row * num_pieces + piece, token)


@triton.jit
def settle(sums, winners, ids, num_pieces, PIECES: tl.constexpr):
    """ids [R] int64: the winners of the rows, or their faults."""
    row = tl.program_id(0).to(tl.int64)
    pieces = tl.arange(0, PIECES)
    is_piece = pieces < num_pieces
    values = tl.load(sums + row * num_pieces + pieces, mask=is_piece, other=float("-inf"))
    tokens = tl.load(winners + row * num_pieces + pieces, mask=is_piece, other=-1)
    fault = tl.min(tokens, 0)
    # What has no winner loses against what has one, also where both stand at -inf.
    token = tl.where(tokens < 0, 2147483647, tokens)
    _, winner = tl.reduce((values, token), 0, _better)
    found = tl.where(winner == 2147483647, -1, winner)
    tl.store(ids + row, tl.where(fault == -2, -2, found).to(tl.int64))
