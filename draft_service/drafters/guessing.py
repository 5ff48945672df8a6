"""One guess for each of many sessions from the logits of one forward. Changes no session.

A session that shares the target's noise draws as the target does (Daliri, Musco and Suresh, 2024, arXiv 2408.07978).
One with noise of its own draws from a truncated and quantised law, and that law is exactly what the target tests with.

The log-probability of a guess is computed behind its draw, for the sessions that want it, and so changes no guess.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draft_service.drafters.task import DraftTask, Guess
from outrider.engine.batching import Feed
from outrider.engine.noise import Purpose, round_key
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draft_distribution import quantise
from outrider.engine.sampling.draw import Ask, draw_each, key_column, rows_of, scores_behind
from outrider.errors import OutriderError

# The logarithm of what float64 cannot tell from 0 is not infinite.
LEAST_PROB = 5e-324


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


def _draw_input(task: DraftTask) -> Ask:
    return Ask(Feed(task.session), task.spec)


def _coupled(
    runner: ModelRunner, tasks: Sequence[DraftTask], logits: Tensor, rows: Sequence[range], _top_n: int
) -> list[Guess | OutriderError]:
    drawn = draw_each(runner, logits, [_draw_input(task) for task in tasks], rows)
    guesses = [each if isinstance(each, OutriderError) else Guess(each[0]) for each in drawn]
    if not any(task.wants_logprob for task in tasks):
        return guesses
    logprobs = _logprobs(runner, tasks, logits, rows, guesses)
    return [
        replace(guess, logprob=logprobs[number]) if isinstance(guess, Guess) and number in logprobs else guess
        for number, guess in enumerate(guesses)
    ]


def _logprobs(
    runner: ModelRunner,
    tasks: Sequence[DraftTask],
    logits: Tensor,
    rows: Sequence[range],
    guesses: Sequence[Guess | OutriderError],
) -> dict[int, float]:
    """By the numbers of tasks that want them, the log-probabilities of guesses drawn with the shared noise."""
    made = {n: guess.token_id for n, guess in enumerate(guesses) if tasks[n].wants_logprob and isinstance(guess, Guess)}
    # At temperature 0 the law is the one token.
    hot = [number for number in made if tasks[number].spec.sampling.temperature]
    logprobs = dict.fromkeys(made, 0.0)
    if hot:
        scores = scores_behind(runner, rows_of(logits, [rows[n] for n in hot]), [_draw_input(tasks[n]) for n in hot])
        ids = torch.tensor([made[number] for number in hot], device=scores.device)
        probs = runner.ops.softmax(scores).gather(1, ids[:, None]).flatten().tolist()
        logprobs |= zip(hot, map(_log, probs), strict=True)
    return logprobs


def _sampled(
    runner: ModelRunner, tasks: Sequence[DraftTask], logits: Tensor, rows: Sequence[range], top_n: int
) -> list[Guess | OutriderError]:
    scores = _scores(runner, rows_of(logits, rows), [_draw_input(task) for task in tasks])
    laws = quantise(scores, top_n, runner.ops)
    keys = [round_key(task.spec.seed, task.base_len, len(task.session), Purpose.DRAFT) for task in tasks]
    token_ids = laws.draw(key_column(runner, keys))
    sent = laws.distributions() if any(task.needs_law for task in tasks) else [None] * len(tasks)
    probs = laws.probs(token_ids) if any(task.wants_logprob for task in tasks) else [None] * len(tasks)
    return [
        Guess(token_id, law if task.needs_law else None, _log(prob) if prob and task.wants_logprob else None)
        for task, token_id, law, prob in zip(tasks, token_ids.tolist(), sent, probs, strict=True)
    ]


def _log(prob: float) -> float:
    return min(math.log(max(prob, LEAST_PROB)), 0.0)


def _scores(runner: ModelRunner, logits: Tensor, asks: Sequence[Ask]) -> Tensor:
    """Transformed scores, of which a row that has none is -inf throughout, and no task fails for its row."""
    try:
        return scores_behind(runner, logits, asks)
    except ValueError:
        if len(asks) == 1:
            return torch.full_like(logits, -torch.inf)
        return torch.cat([_scores(runner, logits[row : row + 1], [ask]) for row, ask in enumerate(asks)])
