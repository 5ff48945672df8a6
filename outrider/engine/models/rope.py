"""Rotary embeddings (Su et al., 2021): how far each pair of a head's coordinates turns at each position.

A row turns by its own position, *not* by the length of anything, so its bits do not
depend on what is computed beside it. Frequencies are float32, by the operations of transformers in their order.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """The unscaled embedding: pair i of D/2 turns by theta^(-2i/D) a position. Scaled ones are its subclasses."""

    theta: float
    amplitude: float = 1.0
    """Factor of all cosines and sines."""
    share: float = 1.0
    """Part of a head's coordinates that turn, the first ones; the others stand still."""

    def num_turning(self, head_dim: int) -> int:
        """How many of a head's coordinates turn, an even number."""
        return int(head_dim * self.share)

    def context_len(self, max_positions: int) -> int:
        """Longest sequence, given "max_position_embeddings"; scaled embeddings take what vLLM takes."""
        return max_positions

    def frequencies(self, head_dim: int, positions: Tensor) -> Tensor:
        """Radians a position, float32: [D/2], or [P, D/2] where they differ between the positions [P]."""
        return 1.0 / self.theta ** _exponents(head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRope(Rope):
    """Position interpolation (Chen et al., 2023): every position counts as 1/factor of one."""

    factor: float

    def context_len(self, max_positions: int) -> int:
        """max_positions are those before the scaling."""
        return int(max_positions * self.factor)

    def frequencies(self, head_dim: int, positions: Tensor) -> Tensor:
        return Rope.frequencies(self, head_dim, positions) / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicRope(Rope):
    """Dynamic NTK (bloc97 and emozilla, 2023): past original_len theta grows with the length of the sequence.

    The length of a row's sequence is its own position + 1, as when it is decoded (docs/decisions/models/0009).
    """

    factor: float
    original_len: int

    def context_len(self, max_positions: int) -> int:
        """max_positions are those before the scaling."""
        return int(max_positions * self.factor)

    def frequencies(self, head_dim: int, positions: Tensor) -> Tensor:
        plain, exponents = Rope.frequencies(self, head_dim, positions), _exponents(head_dim)
        lengths = (positions + 1).clamp_min(self.original_len)
        stretch = self.factor * lengths / self.original_len - (self.factor - 1)
        # Powers of many float32 numbers at a time depend on their place in the tensor and on the threads.
        thetas = self.theta * (stretch.double() ** (head_dim / (head_dim - 2))).float()
        rows = zip(lengths > self.original_len, thetas, strict=True)
        return torch.stack([1.0 / theta**exponents if is_past else plain for is_past, theta in rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope(Rope):
    """Llama 3.1's: pairs that turn slowly are interpolated, fast ones are left alone, those between are blended.

    A pair is slow when it turns less than low_freq_factor times in original_len positions, and fast when it turns more
    than high_freq_factor times.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_len: int

    def frequencies(self, head_dim: int, positions: Tensor) -> Tensor:
        plain = Rope.frequencies(self, head_dim, positions)
        wavelengths = 2 * math.pi / plain
        is_slow = wavelengths > self.original_len / self.low_freq_factor
        is_fast = wavelengths < self.original_len / self.high_freq_factor
        turns = self.original_len / wavelengths
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - share) * plain / self.factor + share * plain
        return torch.where(is_slow, plain / self.factor, torch.where(is_fast, plain, blended))


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedRope(Rope):
    """Every pair turns slower by a factor of its own, as GGUF files state Llama 3.1's embedding."""

    divisors: tuple[float, ...]

    def frequencies(self, head_dim: int, positions: Tensor) -> Tensor:
        return Rope.frequencies(self, head_dim, positions) / torch.tensor(self.divisors)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRope(Rope):
    """LongRoPE (Ding et al., 2024) as far as its short factors hold: up to original_len.

    Past that transformers takes other factors for all rows, the earlier ones too, once the text is longer.
    """

    original_len: int
    divisors: tuple[float, ...]

    def context_len(self, max_positions: int) -> int:
        """max_positions are those of the long factors."""
        return min(max_positions, self.original_len)

    def frequencies(self, head_dim: int, positions: Tensor) -> Tensor:
        return 1.0 / (torch.tensor(self.divisors) * self.theta ** _exponents(head_dim))


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRope(Rope):
    """YaRN (Peng et al., 2023): like Llama 3's, but blended along a ramp over the pairs, and with an amplitude.

    The ramp goes from the pair that turns beta_fast times in original_len positions to the one that does beta_slow
    times; truncate rounds both ends outwards.
    """

    factor: float
    original_len: int
    beta_fast: float
    beta_slow: float
    truncate: bool

    def context_len(self, max_positions: int) -> int:
        """Files give "max_position_embeddings" before or after the scaling, so only original_len can be relied on."""
        return int(self.original_len * self.factor)

    def frequencies(self, head_dim: int, positions: Tensor) -> Tensor:
        spacings = self.theta ** _exponents(head_dim)
        # The pairs at the ends of the ramp, which turn so many times in original_len positions; may be fractions.
        first, last = (
            head_dim * math.log(self.original_len / (turns * 2 * math.pi)) / (2 * math.log(self.theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        last = last + 0.001 if first == last else last
        ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first), 0, 1)
        kept = 1 - ramp
        return 1.0 / (self.factor * spacings) * (1 - kept) + 1.0 / spacings * kept


def yarn_amplitude(factor: float, numerator_scale: float = 0.0, denominator_scale: float = 0.0) -> float:
    """YaRN's amplitude where the file names none; the scales are DeepSeek's "mscale" and "mscale_all_dim"."""
    if numerator_scale and denominator_scale:
        return _temper(factor, numerator_scale) / _temper(factor, denominator_scale)
    return _temper(factor, 1.0)


def rotary_tables(rope: Rope, head_dim: int, context_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [context_len, T/2] float32 by position, of the T coordinates of a head that turn."""
    positions = torch.arange(context_len)
    angles = positions.float()[:, None] * rope.frequencies(rope.num_turning(head_dim), positions)
    cos = angles.cos().mul_(rope.amplitude).to(device)
    return cos, angles.sin_().mul_(rope.amplitude).to(device)


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _temper(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
