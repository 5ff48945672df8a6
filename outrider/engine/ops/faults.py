"""Faults of rows that cannot be drawn from, found where the scores are, and read by the host with what it reads anyway.

On the CPU the operations raise themselves. On a device asking would cost a wait for each operation, so the results
carry the fault: a negative id, or probabilities that are NaN.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

NOTHING_FINITE, NO_NUMBER = -1, -2
"""In the place of the id of a row of which all scores are -inf, and of one with NaN or +inf."""


def refuse() -> ValueError:
    """The error about rows that nothing can be drawn from."""
    return ValueError("every row of scores needs a finite score and neither NaN nor +inf")


def marked(ids: Tensor, scores: Tensor) -> Tensor:
    """ids [R] drawn from scores [R, V], negative for rows with a fault; needs no answer of the device."""
    # The greatest of a row carries NaN along.
    greatest = scores.amax(dim=-1)
    faults = torch.where(greatest == -torch.inf, NOTHING_FINITE, NO_NUMBER)
    return torch.where(torch.isfinite(greatest), ids, faults)


def read_ids(ids: Tensor) -> list[int]:
    """ids [R] int64 of `Ops.draw` or `Ops.choose`; waits for them. Raises ValueError about a row with a fault."""
    found: list[int] = ids.tolist()
    check_ids(found)
    return found


def check_ids(token_ids: Iterable[int]) -> None:
    """Raises ValueError where one of the ids that have been read stands for a fault."""
    if min(token_ids, default=0) < 0:
        raise refuse()


def check_probs(probs: Tensor) -> Tensor:
    """probs [R, V] that `Ops.softmax` gave. Raises ValueError about a row with a fault; waits for a device."""
    # On the CPU softmax has looked itself.
    if not probs.is_cpu and bool(probs[:, 0].isnan().any()):
        raise refuse()
    return probs
