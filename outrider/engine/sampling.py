"""From logits to the distribution that a request asked for. Draws nothing; draft and target use it alike.

The transforms apply in one order: logit bias, banned sequences, minimum length; repetition, presence and frequency
penalties; temperature; top-k; top-p; min-p. On the CPU a row's result is bitwise independent of the other rows: only
elementwise arithmetic, selections, sums of integers and sequential sums along the row are used, and `Ops.softmax`,
which promises the same.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.engine.heat import collapse, heat
from outrider.engine.ops import Ops
from outrider.engine.penalties import RowContext, column, edit, has_penalties, is_edited
from outrider.parameters import SamplingParameters

__all__ = ["RowContext", "divisor", "is_plain", "transform"]

# Below this a temperature would become 0 in float32.
SMALLEST = torch.finfo(torch.float32).tiny
# Most nuclei are smaller than this, and a partial selection costs a tenth of a sort.
NUCLEUS_WIDTH = 256


def transform(logits: Tensor, rows: Sequence[RowContext], vocabulary_size: int, ops: Ops) -> Tensor:
    """Scores [R, V] float32 of logits [R, V] float32: log-probabilities up to a constant, -inf outside the support.

    Ids from `vocabulary_size` on are never in the support, whatever their bias. At temperature 0 the support is the
    lowest id among those with the largest logit. `logits` stays as it is, and is returned itself when nothing changes
    it.

    Raises ValueError when the number of rows differs.
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"{len(rows)} contexts for {logits.shape[0]} rows of logits")
    scores = logits
    if vocabulary_size < logits.shape[1]:
        scores = logits.clone()
        scores[:, vocabulary_size:] = -torch.inf
    for is_wanted, change in _STEPS:
        chosen = [number for number, row in enumerate(rows) if is_wanted(row)]
        if chosen and len(chosen) == len(rows):
            scores = change(scores, rows, ops)
        elif chosen:
            # Rows that need nothing are not touched, and cost nothing.
            changed = change(scores[chosen], [rows[number] for number in chosen], ops)
            scores = scores.index_copy(0, torch.tensor(chosen, device=scores.device), changed)
    return scores


def is_plain(sampling: SamplingParameters, output_len: int, has_ends: bool, has_bans: bool) -> bool:
    """Whether `transform` would apply a temperature and nothing else; then `Ops.choose` draws the same without it.

    output_len counts the tokens of the row's prefix that are output; has_ends tells whether min_tokens holds any back,
    and has_bans whether any sequence is banned, be it behind this prefix or another one.
    """
    cuts = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    is_short = has_ends and output_len < sampling.min_tokens
    edits = is_short or has_bans or bool(sampling.logit_bias) or has_penalties(sampling)
    return not edits and (sampling.temperature == 0 or not cuts)


def divisor(sampling: SamplingParameters) -> float:
    """The temperature to divide scores by, 0 for none but the best token."""
    return max(sampling.temperature, SMALLEST) if sampling.temperature else 0.0


def _edit(scores: Tensor, rows: Sequence[RowContext], _ops: Ops) -> Tensor:
    return edit(scores, rows)


def _heat(scores: Tensor, rows: Sequence[RowContext], _ops: Ops) -> Tensor:
    temperatures = column([max(row.sampling.temperature, SMALLEST) for row in rows], scores)
    return heat(scores, temperatures.float())


def _collapse(scores: Tensor, _rows: Sequence[RowContext], _ops: Ops) -> Tensor:
    return collapse(scores)


def _cut_top_k(scores: Tensor, rows: Sequence[RowContext], _ops: Ops) -> Tensor:
    """Keeps the top_k most probable tokens (Fan et al., 2018), of equal ones those with the lowest ids."""
    sizes = [min(row.sampling.top_k, scores.shape[1]) for row in rows]
    largest = scores.topk(max(sizes)).values
    return _keep_first(scores, scores, torch.tensor(sizes, device=scores.device), largest)


def _cut_top_p(scores: Tensor, rows: Sequence[RowContext], ops: Ops) -> Tensor:
    """Keeps the smallest set of most probable tokens whose mass reaches top_p (Holtzman et al., 2020)."""
    probs = ops.softmax(scores)
    top_p = column([row.sampling.top_p for row in rows], probs)
    width = min(NUCLEUS_WIDTH, scores.shape[1])
    while True:
        largest = probs.topk(width).values
        # The sum runs along the row from the most probable token, so that it does not depend on `width`.
        sizes = (largest.cumsum(dim=-1) < top_p).sum(dim=-1) + 1
        if width == scores.shape[1] or bool((sizes <= width).all()):
            return _keep_first(scores, probs, sizes.clamp(max=width), largest)
        width = min(8 * width, scores.shape[1])


def _cut_min_p(scores: Tensor, rows: Sequence[RowContext], _ops: Ops) -> Tensor:
    """Drops the tokens less probable than min_p times the most probable one (Nguyen et al., 2024, arXiv 2407.01082)."""
    floors = column([math.log(row.sampling.min_p) for row in rows], scores)
    wide = scores.double()
    return scores.masked_fill(wide - wide.amax(dim=-1, keepdim=True) < floors, -torch.inf)


def _keep_first(scores: Tensor, weights: Tensor, sizes: Tensor, largest: Tensor) -> Tensor:
    """Keeps the first sizes[r] tokens of each row in the order of (-weight, id).

    `largest` [R, N] holds the largest weights of each row in falling order, N >= sizes.max().
    """
    threshold = largest.gather(-1, sizes[:, None] - 1)
    kept = weights >= threshold
    tied = (kept.sum(dim=-1) > sizes).nonzero().flatten()
    if len(tied):
        above, equal = weights[tied] > threshold[tied], weights[tied] == threshold[tied]
        room = sizes[tied, None] - above.sum(dim=-1, keepdim=True)
        kept[tied] = above | (equal & (equal.cumsum(dim=-1) <= room))
    return scores.masked_fill(~kept, -torch.inf)


def _is_heated(row: RowContext) -> bool:
    return row.sampling.temperature not in {0, 1} and not is_edited(row)


def _is_greedy(row: RowContext) -> bool:
    return row.sampling.temperature == 0


def _has_top_k(row: RowContext) -> bool:
    return row.sampling.temperature > 0 and row.sampling.top_k > 0


def _has_top_p(row: RowContext) -> bool:
    return row.sampling.temperature > 0 and row.sampling.top_p < 1


def _has_min_p(row: RowContext) -> bool:
    return row.sampling.temperature > 0 and row.sampling.min_p > 0


Change = Callable[[Tensor, Sequence[RowContext], Ops], Tensor]
# In the documented order: which rows want a step, and the step.
_STEPS: tuple[tuple[Callable[[RowContext], bool], Change], ...] = (
    (is_edited, _edit),
    (_is_heated, _heat),
    (_is_greedy, _collapse),
    (_has_top_k, _cut_top_k),
    (_has_top_p, _cut_top_p),
    (_has_min_p, _cut_min_p),
)
