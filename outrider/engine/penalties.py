"""What a request changes about single tokens: biases, bans, minimum length, penalties. Cuts nothing, draws nothing.

Everything here is elementwise, so a row's result does not depend on the other rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.bans import forbidden
from outrider.parameters import SamplingParameters

# Above this a score would become infinite in float32.
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class RowContext:
    """What a row of logits stands on: its prefix is `committed` + `path`, of which `prompt_len` tokens are the prompt.

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
    held_back: frozenset[int] = field(init=False, repr=False, compare=False)
    """Tokens that cannot be drawn here: banned behind this prefix, or an end that comes too soon."""

    def __post_init__(self) -> None:
        ends = self.end_token_ids if self.output_len < self.sampling.min_tokens else frozenset[int]()
        # Found once, because every step of a transform asks which rows it concerns.
        held_back = ends.union(forbidden(self.banned, self.committed, self.path)) if self.banned else ends
        object.__setattr__(self, "held_back", held_back)

    @property
    def output_len(self) -> int:
        """Number of tokens of the prefix that are output, draft tokens included."""
        return len(self.committed) + len(self.path) - self.prompt_len


def is_edited(row: RowContext) -> bool:
    """Whether `edit` would change anything but the temperature of a row."""
    return bool(row.sampling.logit_bias or row.held_back) or has_penalties(row.sampling)


def edit(scores: Tensor, rows: Sequence[RowContext]) -> Tensor:
    """Biases, bans, minimum length, penalties and temperature: new scores [R, V] float32, computed in float64.

    The best score becomes exactly 0, and any temperature leaves it there; 0 counts as 1 here.
    """
    wide = scores.to(torch.float64, copy=True)
    _bias(wide, rows)
    sessions: dict[tuple[int, int], list[int]] = {}
    for number, row in enumerate(rows):
        if has_penalties(row.sampling):
            sessions.setdefault((id(row.committed), row.prompt_len), []).append(number)
    for numbers in sessions.values():
        _penalise(wide, numbers, [rows[number] for number in numbers])
    temperatures = column([row.sampling.temperature or 1.0 for row in rows], wide)
    return ((wide - wide.amax(dim=-1, keepdim=True)) / temperatures).float()


def _bias(scores: Tensor, rows: Sequence[RowContext]) -> None:
    """Adds biases in place, and masks the tokens that are held back."""
    entries: list[tuple[int, int, float]] = []
    for number, row in enumerate(rows):
        changes = row.sampling.logit_bias | dict.fromkeys(row.held_back, -math.inf)
        # A masked id stays masked under any bias; one that the model has no logit for is dropped.
        entries += [(number, token_id, change) for token_id, change in changes.items() if token_id < scores.shape[1]]
    if entries:
        places = torch.tensor([entry[:2] for entry in entries], device=scores.device)
        addends = torch.tensor([entry[2] for entry in entries], dtype=scores.dtype, device=scores.device)
        # No place occurs twice, so the order of the additions does not matter.
        scores.index_put_((places[:, 0], places[:, 1]), addends, accumulate=True)


def _penalise(scores: Tensor, numbers: Sequence[int], rows: Sequence[RowContext]) -> None:
    """Applies the penalties of one session's rows in place, to the tokens that occurred only.

    Repetition penalty: Keskar et al., 2019, arXiv 1909.05858. Presence and frequency penalties: OpenAI.
    """
    token_ids, in_prompt, counts = (part.to(scores.device) for part in _occurrences(rows, scores.shape[1]))
    repetition = column([row.sampling.repetition_penalty for row in rows], scores)
    presence = column([row.sampling.presence_penalty for row in rows], scores)
    frequency = column([row.sampling.frequency_penalty for row in rows], scores)
    places = torch.tensor(numbers, device=scores.device)[:, None], token_ids
    before = scores[places]
    repeated = torch.where(before > 0, before / repetition, before * repetition).clamp(max=LARGEST)
    after = torch.where(in_prompt | (counts > 0), repeated, before)
    scores[places] = after - (counts > 0) * presence - counts * frequency


def _occurrences(rows: Sequence[RowContext], num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """The N tokens that occurred in a session: ids [N], whether in the prompt [N], how often in the output [R, N]."""
    committed, prompt_len = rows[0].committed, rows[0].prompt_len
    in_prompt = _counts(committed[:prompt_len], num_tokens) > 0
    in_output = _counts(committed[prompt_len:], num_tokens)
    counts = np.stack([in_output + _counts(row.path, num_tokens) if row.path else in_output for row in rows])
    token_ids = np.flatnonzero(in_prompt | counts.any(axis=0))
    return torch.from_numpy(token_ids), torch.from_numpy(in_prompt[token_ids]), torch.from_numpy(counts[:, token_ids])


def _counts(token_ids: Sequence[int], num_tokens: int) -> NDArray[np.int64]:
    """How often each token occurs [num_tokens]; ids without a logit are left out."""
    # Counted anew each time, because numpy is faster at that than Python is at keeping the counts of every prefix.
    return np.bincount(np.array(token_ids, dtype=np.int64), minlength=num_tokens)[:num_tokens]


def column(values: Sequence[float], like: Tensor) -> Tensor:
    """One value a row [R, 1] float64. A tensor and not a number: torch may multiply by the reciprocal of a number."""
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def has_penalties(wanted: SamplingParameters) -> bool:
    """Whether any token that occurred is penalised."""
    return wanted.repetition_penalty != 1 or wanted.presence_penalty != 0 or wanted.frequency_penalty != 0
