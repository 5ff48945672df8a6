"""The way from logits to the distribution that a request asked for; draft and target use it alike.

The transforms apply in one order: grammar; logit bias, banned sequences, minimum length; repetition, presence and
frequency penalties; temperature; top-k; top-p; min-p. On the CPU a row's result is bitwise independent of the other
rows: only elementwise arithmetic, selections, sums of integers and sequential sums along the row are used, and
`Ops.softmax`, which promises the same.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.devices import send
from outrider.engine.ops import Ops
from outrider.engine.ops.temperature import apply_temperature, argmax_mask
from outrider.grammar import Bits
from outrider.parameters import SamplingParameters

# Above the first a score would become infinite in float32, below the second a temperature would become 0.
LARGEST, SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
# Most nuclei are smaller than this, and a partial selection costs a tenth of a sort.
NUCLEUS_WIDTH = 256


def forbidden(
    banned: Sequence[tuple[int, ...]], committed: Sequence[int], path: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Last ids of the sequences whose other ids are the end of the prefix `committed` + `path`; ids may repeat.

    A sequence of one id is forbidden everywhere. Neither a sequence nor the prefix may be empty.
    """
    reach = max(map(len, banned), default=1) - 1
    if not reach:
        return tuple(sequence[0] for sequence in banned)
    # A prefix has thousands of tokens, of which a sequence can meet these only.
    tail = (*committed[-reach:], *path)[-reach:]
    last = tail[-1]
    return tuple(
        sequence[-1]
        for sequence in banned
        # One comparison shows of nearly all sequences that they do not match here.
        if len(sequence) == 1 or (sequence[-2] == last and tail[1 - len(sequence) :] == sequence[:-1])
    )


@dataclass(frozen=True, slots=True)
class RowContext:
    """Context of a row of logits: its prefix is `committed` + `path`, of which `prompt_len` tokens are the prompt.

    Rows of one session should share one `committed` object, which is then counted once. `path` holds the draft tokens
    between the last committed token and the row, the row's own included. `end_token_ids` are the tokens that
    `min_tokens` holds back. The last token of each sequence in `banned` cannot follow the others.
    """

    sampling: SamplingParameters
    committed: Sequence[int]
    path: tuple[int, ...]
    prompt_len: int
    end_token_ids: frozenset[int]
    banned: tuple[tuple[int, ...], ...] = ()
    allowed: Bits | None = None
    """Mask of the request's grammar; None where there is none, or where no answer gets to."""
    held_back: frozenset[int] = field(init=False, repr=False, compare=False)
    """Tokens that cannot be drawn here: banned after this prefix, or an end that comes too soon."""

    def __post_init__(self) -> None:
        ends = self.end_token_ids if self.output_len < self.sampling.min_tokens else frozenset[int]()
        # Found once, because every step of a transform asks which rows it concerns.
        held_back = ends.union(forbidden(self.banned, self.committed, self.path)) if self.banned else ends
        object.__setattr__(self, "held_back", held_back)

    @property
    def output_len(self) -> int:
        """Number of tokens of the prefix that are output, draft tokens included."""
        return len(self.committed) + len(self.path) - self.prompt_len


def mask(scores: Tensor, allowed: Sequence[Bits | None], ops: Ops) -> Tensor:
    """Scores [R, V] with -inf for what may not follow; None allows everything."""
    num_bytes = max((len(each) for each in allowed if each is not None), default=0)
    joined = b"".join(b"\xff" * num_bytes if each is None else each for each in allowed)
    bits = np.frombuffer(joined, np.int32).reshape(len(allowed), -1).copy()
    return ops.mask(scores.contiguous(), send(bits, scores.device))


def is_edited(row: RowContext) -> bool:
    """Whether `edit` would change anything but the temperature of a row."""
    return bool(row.sampling.logit_bias or row.held_back) or row.sampling.has_penalties


def edit(scores: Tensor, rows: Sequence[RowContext]) -> Tensor:
    """Biases, bans, minimum length, penalties and temperature: new scores [R, V] float32, computed in float64.

    The best score becomes exactly 0, and any temperature leaves it there; 0 counts as 1 here.
    """
    wide = scores.to(torch.float64, copy=True)
    entries: list[tuple[int, int, float]] = []
    sessions: dict[tuple[int, int], list[int]] = {}
    for number, row in enumerate(rows):
        changes = row.sampling.logit_bias | dict.fromkeys(row.held_back, -math.inf)
        # A masked id stays masked under any bias; one that the model has no logit for is dropped.
        entries += [(number, token_id, change) for token_id, change in changes.items() if token_id < scores.shape[1]]
        if row.sampling.has_penalties:
            sessions.setdefault((id(row.committed), row.prompt_len), []).append(number)
    if entries:
        places = send(np.array([entry[:2] for entry in entries], dtype=np.int64), wide.device)
        addends = column([entry[2] for entry in entries], wide)[:, 0]
        # No place occurs twice, so the order of the additions does not matter.
        wide.index_put_((places[:, 0], places[:, 1]), addends, accumulate=True)
    for numbers in sessions.values():
        _penalise(wide, numbers, [rows[number] for number in numbers])
    temperatures = column([row.sampling.temperature or 1.0 for row in rows], wide)
    return ((wide - wide.amax(dim=-1, keepdim=True)) / temperatures).float()


def _penalise(scores: Tensor, numbers: Sequence[int], rows: Sequence[RowContext]) -> None:
    """Applies the penalties of one session's rows in place, to the tokens that occurred only.

    Repetition penalty: Keskar et al., 2019, arXiv 1909.05858. Presence and frequency penalties: OpenAI.
    """
    committed, prompt_len, num_tokens = rows[0].committed, rows[0].prompt_len, scores.shape[1]
    in_prompt = _counts(committed[:prompt_len], num_tokens) > 0
    in_output = _counts(committed[prompt_len:], num_tokens)
    counts = np.stack([in_output + _counts(row.path, num_tokens) if row.path else in_output for row in rows])
    # The N tokens that occurred: ids [N], whether in the prompt [N], how often in the output [R, N].
    ids = np.flatnonzero(in_prompt | counts.any(axis=0))
    token_ids, was_there, count = (send(part, scores.device) for part in (ids, in_prompt[ids], counts[:, ids]))
    repetition = column([row.sampling.repetition_penalty for row in rows], scores)
    presence = column([row.sampling.presence_penalty for row in rows], scores)
    frequency = column([row.sampling.frequency_penalty for row in rows], scores)
    places = index(numbers, scores)[:, None], token_ids
    before = scores[places]
    repeated = torch.where(before > 0, before / repetition, before * repetition).clamp(max=LARGEST)
    after = torch.where(was_there | (count > 0), repeated, before)
    scores[places] = after - (count > 0) * presence - count * frequency


def _counts(token_ids: Sequence[int], num_tokens: int) -> NDArray[np.int64]:
    """Number of times that each token occurs [num_tokens]; ids without a logit are left out."""
    # Counted anew each time, because numpy is faster at that than Python is at keeping the counts of every prefix.
    return np.bincount(np.array(token_ids, dtype=np.int64), minlength=num_tokens)[:num_tokens]


def column(values: Sequence[float], like: Tensor) -> Tensor:
    """One value a row [R, 1] float64. A tensor and not a number: torch may multiply by the reciprocal of a number."""
    return send(np.array(values, dtype=np.float64)[:, None], like.device)


def index(rows: Sequence[int], like: Tensor) -> Tensor:
    """Rows [R] int64 where a tensor is."""
    return send(np.array(rows, dtype=np.int64), like.device)


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
            places = index(chosen, scores)
            changed = change(scores.index_select(0, places), [rows[number] for number in chosen], ops)
            scores = scores.index_copy(0, places, changed)
    return scores


def divisor(sampling: SamplingParameters) -> float:
    """The temperature to divide scores by, 0 for none but the best token."""
    return max(sampling.temperature, SMALLEST) if sampling.temperature else 0.0


def _cut_top_k(scores: Tensor, rows: Sequence[RowContext], _ops: Ops) -> Tensor:
    """Keeps the top_k most probable tokens (Fan et al., 2018), of equal ones those with the lowest ids."""
    sizes = [min(row.sampling.top_k, scores.shape[1]) for row in rows]
    largest = scores.topk(max(sizes)).values
    return _keep_first(scores, scores, index(sizes, scores), largest)


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
    # Which rows are tied a device does not say without being waited for, and looking at all costs it less.
    is_tied = kept.sum(dim=-1) > sizes
    tied = is_tied.nonzero().flatten() if kept.is_cpu else torch.arange(len(kept), device=kept.device)
    if len(tied):
        above, equal = weights[tied] > threshold[tied], weights[tied] == threshold[tied]
        room = sizes[tied, None] - above.sum(dim=-1, keepdim=True)
        kept[tied] = above | (equal & (equal.cumsum(dim=-1) <= room))
    return scores.masked_fill(~kept, -torch.inf)


Step = tuple[Callable[[RowContext], bool], Callable[[Tensor, Sequence[RowContext], Ops], Tensor]]
# In the documented order: which rows want a step, and the step.
_STEPS: tuple[Step, ...] = (
    (lambda row: row.allowed is not None, lambda scores, rows, ops: mask(scores, [row.allowed for row in rows], ops)),
    (is_edited, lambda scores, rows, _ops: edit(scores, rows)),
    (
        lambda row: row.sampling.temperature not in {0, 1} and not is_edited(row),
        lambda scores, rows, _ops: apply_temperature(
            scores, column([divisor(row.sampling) for row in rows], scores).float()
        ),
    ),
    (lambda row: row.sampling.temperature == 0, lambda scores, _rows, _ops: argmax_mask(scores)),
    (lambda row: row.sampling.temperature > 0 and row.sampling.top_k > 0, _cut_top_k),
    (lambda row: row.sampling.temperature > 0 and row.sampling.top_p < 1, _cut_top_p),
    (lambda row: row.sampling.temperature > 0 and row.sampling.min_p > 0, _cut_min_p),
)
