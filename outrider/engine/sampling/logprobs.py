"""Log-probabilities of tokens under raw logits: no temperature, bias, ban or cut changes a number.

Each is log-softmax over the full width of the logits, padding included, in float64. On the CPU a row's numbers are
bitwise independent of the other rows: `Ops.softmax` promises that, and what is left is selection and one subtraction.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.ops import Ops
from outrider.engine.ops.faults import refuse
from outrider.engine.sampling.transforms import column, index
from outrider.parameters import TokenLogprob

# Logits of one piece: float64 copies of a long prompt's rows would take twice the memory of its logits.
PIECE_ELEMENTS = 1 << 21
# Stands for a logit of -inf, so that every number can be written down.
MIN_LOGPROB = torch.finfo(torch.float32).min


def row_logprobs(
    logits: Tensor, token_ids: Sequence[int], count: int, vocabulary_size: int, ops: Ops
) -> list[TokenLogprob]:
    """Log-probabilities for each row of logits [R, V] float32: of its token, and of the `count` most probable ones.

    The alternatives are ids below `vocabulary_size` in the order of (-log-probability, id); the token itself may be
    among them. All numbers are finite and at most 0. Raises ValueError for a row that is no distribution (NaN, +inf or
    nothing finite), and when there is not one token a row.
    """
    if len(token_ids) != logits.shape[0]:
        raise ValueError(f"{len(token_ids)} tokens for {logits.shape[0]} rows of logits")
    step = max(1, PIECE_ELEMENTS // logits.shape[1])
    entries: list[TokenLogprob] = []
    count = min(count, vocabulary_size)
    for start in range(0, len(token_ids), step):
        piece = logits[start : start + step]
        best = piece.argmax(dim=-1, keepdim=True)
        best_probs = ops.softmax(piece).gather(-1, best).flatten().tolist()
        if any(map(math.isnan, best_probs)):
            raise refuse()
        # By way of Python, because torch takes another logarithm for the last few numbers of a column than for the
        # others.
        best_logprobs = column([math.log(prob) for prob in best_probs], piece)
        ids = index(token_ids[start : start + step], piece)[:, None]
        if count:
            ids = torch.cat((ids, _top_ids(piece[:, :vocabulary_size], count)), dim=-1)
        gaps = piece.gather(-1, ids).double() - piece.gather(-1, best).double()
        numbers = (gaps + best_logprobs).clamp(min=MIN_LOGPROB).tolist()
        entries += [
            TokenLogprob(logprob, tuple(top_ids), tuple(top_logprobs))
            for (logprob, *top_logprobs), (_, *top_ids) in zip(numbers, ids.tolist(), strict=True)
        ]
    return entries


def _top_ids(logits: Tensor, count: int) -> Tensor:
    """The first `count` ids [R, count] of each row in the order of (-logit, id)."""
    largest, ids = logits.topk(min(count + 1, logits.shape[1]))
    ids = ids[:, :count]
    # topk takes any of equal ones, which matters where the first one left out is equal to the last one taken.
    tied = (largest[:, count - 1 : -1] == largest[:, count:]).any(dim=-1).nonzero().flatten()
    if len(tied):
        ids[tied] = logits[tied].sort(dim=-1, descending=True, stable=True).indices[:, :count]
    ids = ids.sort(dim=-1).values
    order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(-1, order)
