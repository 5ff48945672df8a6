"""Temperature as arithmetic on scores; kernels/draw.c does the same, element for element."""

import torch
from torch import Tensor


def apply_temperature(scores: Tensor, temperatures: Tensor) -> Tensor:
    """Divides scores [R, V] by temperatures [R, 1] float32; the best one becomes exactly 0, at any temperature."""
    return (scores - scores.amax(dim=-1, keepdim=True)) / temperatures


def argmax_mask(scores: Tensor) -> Tensor:
    """Temperature 0: score 0 for the lowest id among the best tokens, -inf for all others."""
    best = scores.argmax(dim=-1, keepdim=True)
    peak = scores.gather(-1, best)
    # The difference is NaN, and not 0, in a row without a finite score; the draw then refuses the row.
    return torch.full_like(scores, -torch.inf).scatter(-1, best, peak - peak)
