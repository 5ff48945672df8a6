"""Held-out loss, and how it depends on what came before. Trains nothing.

The same held-out tokens, the second halves of blocks, end windows of doubling lengths, so the figures differ by the
context alone and not by the text. What stands before them may have been learnt from; they themselves never were.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from training.losses import logits

MAX_WINDOWS = 64  # of each length: the long ones cost minutes on a CPU
MICRO_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The held-out blocks of a text."""

    token_ids: Tensor
    blocks: Tensor
    block_len: int
    context_len: int

    @property
    def window_lens(self) -> list[int]:
        """A block, twice as much and so on, up to the context."""
        doublings = (self.context_len // self.block_len).bit_length()
        return [self.block_len << number for number in range(doublings)]

    def windows(self, length: int) -> Tensor:
        """Windows [W, length] that end with a held-out block, the same blocks for every length."""
        ends = [(number + 1) * self.block_len for number in self.blocks.tolist()]
        ends = [end for end in ends if end >= self.window_lens[-1]][:MAX_WINDOWS]
        empty = self.token_ids.new_empty(0, length)
        return torch.stack([self.token_ids[end - length : end] for end in ends]) if ends else empty

    def whole_blocks(self) -> Tensor:
        """All held-out blocks [H, block_len]."""
        return torch.stack([self.token_ids[number * self.block_len :][: self.block_len] for number in self.blocks])


@dataclass(frozen=True, slots=True)
class Losses:
    """Nats a token."""

    blocks: float
    """Of all held-out blocks, each without anything before it."""
    by_window: tuple[float, ...]
    """Of the last half block of windows, by window_lens; NaN when the text is too short for a window."""


def measure(model: nn.Module, held_out: HeldOut, advance: Callable[[], None]) -> Losses:
    """Runs the model over all windows; calls `advance` now and then."""
    model.eval()
    tail = held_out.block_len // 2
    blocks = _loss(model, held_out.whole_blocks(), held_out.block_len - 1, advance)
    windows = (held_out.windows(length) for length in held_out.window_lens)
    return Losses(blocks, tuple(_loss(model, each, tail, advance) for each in windows))


@torch.inference_mode()
def _loss(model: nn.Module, windows: Tensor, tail: int, advance: Callable[[], None]) -> float:
    if not len(windows):
        return math.nan
    total = torch.zeros((), dtype=torch.float64)
    device = next(model.parameters()).device
    for piece in micro_batches(windows):
        tokens = piece.to(device)
        predicted = logits(model, tokens)[:, -tail - 1 : -1]
        total += cross_entropy(predicted.flatten(0, 1), tokens[:, -tail:].flatten(), reduction="sum").cpu()
        advance()
    return float(total / (len(windows) * tail))


def micro_batches(rows: Tensor) -> tuple[Tensor, ...]:
    """Pieces of a batch [B, L] of about MICRO_TOKENS tokens, and of one row at least: logits take much memory."""
    return torch.split(rows, max(1, MICRO_TOKENS // rows.shape[1]))
