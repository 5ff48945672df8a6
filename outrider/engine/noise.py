"""Counter-based noise: a pure function of (seed, position, purpose, token id), and for some purposes of the round.

Draft and target that draw the same position of the same request use the same noise, whichever process computes it, so
that both choose the same token wherever their distributions allow it (Daliri, Musco and Suresh, 2024, arXiv
2408.07978).

Hash words and uniforms are equal bit for bit on every device. Gumbel values pass through two logarithms and agree
within 2 units in the last place of the value or of 1, whichever is larger: near 0 the outer logarithm cancels.
tests/outrider/engine/noise_vectors.json holds test vectors.
"""

import functools
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
# The same as numpy's own numbers, because making one takes as long as using it.
NUMPY_MULTIPLIERS = tuple(map(np.uint64, MULTIPLIERS))
NUMPY_SHIFTS = tuple(map(np.uint64, SHIFTS))
# 52 bits and a half: both ends of the range stay inside (0, 1), where -log(-log(u)) is finite.
UNIFORM_SHIFT = 12
UNIFORM_STEP = 2.0**-52

# Of fewer numpy takes longer to begin than Python to end.
FEW_KEYS = 32
FEW_DRAWS = 10

# Lanes that a drafter of a request has for itself; its siblings of one depth are fewer.
LANES_EACH = 2**32

Keys = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]


class Purpose(IntEnum):
    """What a draw is for. Draws of different purposes at one position are independent.

    TOKEN is the target's own draw, also after a proposal that is accepted to its end, and the draw of a draft that
    shares it; RESIDUAL is the correction. A position is committed once, so one key serves each of them. DRAFT, the draw
    of a draft of its own, and ACCEPTANCE, which decides about a draft token, need `round_key`.
    """

    TOKEN = 0
    DRAFT = 1
    ACCEPTANCE = 2
    RESIDUAL = 3


def noise_key(seed: int, position: int, purpose: Purpose) -> int:
    """The key of one draw, as a signed 64-bit integer.

    `position` is the absolute index of the token to be drawn: the length of its prefix, prompt included. `seed` may
    be any integer and counts modulo 2**64.
    """
    key = _mix((_seed_word(seed) + GAMMA * (position + 1)) & MASK)
    key = _mix((key + GAMMA * (purpose + 1)) & MASK)
    return _signed(key)


def round_key(seed: int, base_len: int, position: int, purpose: Purpose, lane: int = 0) -> int:
    """The key of one draw of the round that builds on base_len tokens; otherwise as noise_key.

    `lane`, at least 0, distinguishes the draws for one position, each of which needs noise of its own: those of a tree,
    where all of a chain are in lane 0, and those of several drafters of a request, each of which has LANES_EACH lanes.

    A position may be drafted and tested in one round, not be committed there, and be drafted again in the next. What
    was drawn for it the first time has then been looked at: block verification looks at all rows whatever comes of
    them. Drawn with the same noise again, the second round would depend on the first one's outcome, and be biased.
    """
    # Complemented, because a plain key with such a step added is the plain draw's own word for a token id.
    key = _mix(((noise_key(seed, position, purpose) ^ MASK) + GAMMA * (base_len + 1)) & MASK)
    if lane:
        key = _mix(((key ^ MASK) + GAMMA * lane) & MASK)
    return _signed(key)


@functools.lru_cache(maxsize=1024)
def _seed_word(seed: int) -> int:
    """Kept, because all draws of a request begin with it."""
    return _mix((seed + GAMMA) & MASK)


def hash_words(keys: Tensor, num_tokens: int) -> Tensor:
    """Hash words [R, num_tokens] int64 (two's complement of the 64 bits) for keys [R] int64 and ids 0, 1, 2, ..."""
    ids = torch.arange(1, num_tokens + 1, dtype=torch.int64, device=keys.device)
    # torch multiplies int64 modulo 2**64, so the signed product has the bits of the unsigned one.
    word = keys[:, None] + ids * _signed(GAMMA)
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
        word = (word ^ _logical_shift(word, shift)) * _signed(multiplier)
    return word


def uniforms(keys: Tensor, num_tokens: int) -> Tensor:
    """Uniforms [R, num_tokens] float64 in the open interval (0, 1), exact on every device."""
    return (_logical_shift(hash_words(keys, num_tokens), UNIFORM_SHIFT).to(torch.float64) + 0.5) * UNIFORM_STEP


def gumbel(keys: Tensor, num_tokens: int) -> Tensor:
    """Standard Gumbel values [R, num_tokens] float64, all finite: argmax(log p + gumbel) draws from p."""
    return -torch.log(-torch.log(uniforms(keys, num_tokens)))


def numpy_hash_words(keys: Words, num_tokens: int) -> Words:
    """The words of `hash_words` as uint64, for keys [R] uint64; needs no torch and no signed arithmetic."""
    ids = np.arange(1, num_tokens + 1, dtype=np.uint64)
    return numpy_mix(keys[:, None] + ids * np.uint64(GAMMA))


def numpy_uniforms(keys: Words, num_tokens: int) -> Floats:
    """The uniforms of `uniforms`, bit for bit, for keys [R] uint64."""
    words = numpy_hash_words(keys, num_tokens) >> np.uint64(UNIFORM_SHIFT)
    return (words.astype(np.float64) + 0.5) * UNIFORM_STEP


def first_uniforms(keys: Sequence[int]) -> Floats:
    """The uniforms [R] of id 0 alone, for keys [R] as noise_key makes them: all that a test needs."""
    if len(keys) > FEW_KEYS:
        return numpy_uniforms(np.array(keys, dtype=np.int64).view(np.uint64), 1)[:, 0]
    words = (_mix((key + GAMMA) & MASK) for key in keys)
    return np.array([((word >> UNIFORM_SHIFT) + 0.5) * UNIFORM_STEP for word in words])


def token_keys(seeds: Sequence[int], positions: Sequence[int]) -> Keys:
    """`noise_key` of purpose TOKEN for many draws, [R] int64: draw r has seeds[r] and positions[r]."""
    if len(seeds) < FEW_DRAWS:
        keys = [noise_key(*draw, Purpose.TOKEN) for draw in zip(seeds, positions, strict=True)]
        return np.array(keys, dtype=np.int64)
    seed_words = np.array([*map(_seed_word, seeds)], dtype=np.uint64)
    steps = np.array(positions, dtype=np.uint64) + np.uint64(1)
    word = numpy_mix(seed_words + steps * np.uint64(GAMMA))
    return numpy_mix(word + np.uint64(GAMMA * (Purpose.TOKEN + 1))).view(np.int64)


def numpy_mix(word: Words) -> Words:
    """The finaliser of `_mix` for many words."""
    for shift, multiplier in zip(NUMPY_SHIFTS, NUMPY_MULTIPLIERS, strict=False):
        word = (word ^ (word >> shift)) * multiplier
    return word ^ (word >> NUMPY_SHIFTS[-1])


def _mix(word: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): a bijection of 64 bits."""
    # Not a loop: this runs for every token that anyone draws.
    word = ((word ^ (word >> SHIFTS[0])) * MULTIPLIERS[0]) & MASK
    word = ((word ^ (word >> SHIFTS[1])) * MULTIPLIERS[1]) & MASK
    return word ^ (word >> SHIFTS[2])


def _signed(word: int) -> int:
    """The two's complement reading of 64 bits, which is how torch carries them."""
    return word - 2**64 if word >= 2**63 else word


def _logical_shift(word: Tensor, shift: int) -> Tensor:
    """int64 shifted right as if unsigned: torch's own shift copies the sign bit in."""
    return torch.bitwise_and(word >> shift, 2 ** (64 - shift) - 1)
