"""How far floating-point results may lie from exact ones: by their type, their sums, and what is computed of those.

Which of its additions a processor does first, and in how many lanes, is its own choice, so two of them differ in the
last digits of every sum, and no fixed number bounds what a whole model makes of that. This follows from what is always
true (docs/decisions/exactness/0033): a sum of n products is the exact sum of products that are each off by the
roundings on their way, n at most. One is half a unit at most and as often up as down, so their walk has a standard
deviation of at most √(n/12) units of the type. Taken are √n units, which is three and a half of them.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

NUM_DRAWS = 8


def share_of(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """By how much of itself a sum of so many products may be off."""
    return torch.finfo(dtype).eps * math.sqrt(terms)


def allowed(exact: Tensor, terms: int) -> float:
    """How far float32 sums of so many terms may lie from exact ones: of the largest, whose parts are as large as it."""
    return share_of(terms) * float(exact.abs().max())


def reach(weights: Iterable[Tensor | NDArray[Any]], compute: Callable[[], Tensor]) -> float:
    """How far float32's rounding may carry the results of `compute`: the largest change when all weights are off.

    Every weight is off by what its sum may be off, up or down by chance, eight times; a weight's sum is as long as its
    last dimension. What a model makes of it, so does this: a steep softmax magnifies both. The weights are those that
    `compute` reads, of whatever type holds such differences, and are themselves again at the end. Measured: errors of
    float32 on several instruction sets are a fifth to a twentieth of it.
    """
    floats = [weight for weight in map(torch.as_tensor, weights) if weight.is_floating_point()]
    held = {weight.data_ptr(): (weight.detach(), weight.detach().clone()) for weight in floats}.values()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        exact, changes = compute(), []
        known = exact.isfinite()
        for _ in range(NUM_DRAWS):
            for weight, before in held:
                signs = torch.randint(2, weight.shape, generator=generator, dtype=torch.int8) * 2 - 1
                weight.copy_(before * (1 + share_of(weight.shape[-1]) * signs.to(weight.dtype)))
            changes.append(float((compute() - exact)[known].abs().max()))
        for weight, before in held:
            weight.copy_(before)
    return max(changes)
