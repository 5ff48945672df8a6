"""One guess for each of many sessions from the logits of one forward. Changes no session.

A session that shares the target's noise draws as the target does (Daliri, Musco and Suresh, 2024, arXiv 2408.07978).
One with noise of its own draws from a truncated and quantised law, and that law is exactly what the target tests with.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draft_service.drafters.task import DraftTask, Guess
from outrider.engine.drawing import Ask, draw_each, key_column, rows_of, scores_behind
from outrider.engine.noise import Purpose, round_key
from outrider.engine.quantise import quantise
from outrider.engine.runner import Feed, ModelRunner
from outrider.errors import OutriderError


def guess_each(
    runner: ModelRunner, tasks: Sequence[DraftTask], logits: Tensor, rows: Sequence[range], top_n: int
) -> list[Guess | OutriderError]:
    """The next guess of each task, behind its one row of logits, logits[rows[i]]; or why there is none.

    Laws have at most top_n tokens.
    """
    guesses: dict[int, Guess | OutriderError] = {}
    for noise, guess in ((Purpose.TOKEN, _coupled), (Purpose.DRAFT, _sampled)):
        numbers = [number for number, task in enumerate(tasks) if task.noise is noise]
        if numbers:
            chosen = [tasks[number] for number in numbers]
            found = guess(runner, chosen, logits, [rows[number] for number in numbers], top_n)
            guesses |= zip(numbers, found, strict=True)
    return [guesses[number] for number in range(len(tasks))]


def _ask(task: DraftTask) -> Ask:
    return Ask(Feed(task.session), task.spec)


def _coupled(
    runner: ModelRunner, tasks: Sequence[DraftTask], logits: Tensor, rows: Sequence[range], _top_n: int
) -> list[Guess | OutriderError]:
    drawn = draw_each(runner, logits, [_ask(task) for task in tasks], rows)
    return [each if isinstance(each, OutriderError) else Guess(each[0]) for each in drawn]


def _sampled(
    runner: ModelRunner, tasks: Sequence[DraftTask], logits: Tensor, rows: Sequence[range], top_n: int
) -> list[Guess | OutriderError]:
    scores = _scores(runner, rows_of(logits, rows), [_ask(task) for task in tasks])
    laws = quantise(scores, top_n, runner.ops)
    keys = [round_key(task.spec.seed, task.base_len, len(task.session), Purpose.DRAFT) for task in tasks]
    token_ids = laws.draw(key_column(runner, keys)).tolist()
    sent = laws.distributions() if any(task.needs_law for task in tasks) else [None] * len(tasks)
    return [
        Guess(token_id, law if task.needs_law else None)
        for task, token_id, law in zip(tasks, token_ids, sent, strict=True)
    ]


def _scores(runner: ModelRunner, logits: Tensor, asks: Sequence[Ask]) -> Tensor:
    """Transformed scores, of which a row that has none is -inf throughout, and no task fails for its row."""
    try:
        return scores_behind(runner, logits, asks)
    except ValueError:
        if len(asks) == 1:
            return torch.full_like(logits, -torch.inf)
        return torch.cat([_scores(runner, logits[row : row + 1], [ask]) for row, ask in enumerate(asks)])
