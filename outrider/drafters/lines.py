"""Several steps of a head in one call of the compiled kernels: each row is below the first token after the row above.

What follows each row is found as step by step, bit for bit, and a task takes of it what it would have asked for: a
chain its guesses, a tree its next rows as far as they are those that were computed. Between two steps nothing of Python
happens, which takes longer than a step of a small head, and longer still while other threads want the interpreter.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from outrider.engine.batching import MAX_STEP_TOKENS, RowPlan
from outrider.engine.cache import KVCache
from outrider.engine.heads.fused import FusedHead, LineDraws
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draw import DrawInput, keys_below
from outrider.engine.sampling.transforms import divisor
from outrider.errors import CacheFull

MAX_DEPTH = 4
"""Steps in one call: a tree may want none of the later ones, and they are computed nevertheless."""


class Ranked(NamedTuple):
    """Tokens that may follow a row, the likeliest first, and their shares; fewer where there are no more."""

    token_ids: list[int]
    shares: list[float]


class LineTask(Protocol):
    """Task whose steps may be made in lines."""

    draw_input: DrawInput

    @property
    def line_depth(self) -> int:
        """Steps that it could take now, each of one row; 0 where it is not drawn as `Ops.rank` ranks."""

    @property
    def max_children(self) -> int:
        """Most tokens that are wanted after a row."""

    @property
    def line_scale(self) -> float:
        """Scale of the scores; see Ops.rank."""

    def take_line(self, levels: Sequence[Ranked]) -> None:
        """Takes what follows its row, and each row below that."""


class HeadLine:
    """Steps of all tasks of a forward."""

    def __init__(self, decoder: FusedHead, tasks: Sequence[LineTask], depth: int) -> None:
        """All tasks have a line_depth of at least `depth`, and all are hot or none is."""
        self._decoder, self._tasks = decoder, tasks
        specs = [task.draw_input.spec for task in tasks]
        self.feeds = [task.draw_input.feed._replace(num_below=depth - 1) for task in tasks]
        hot = [divisor(spec.sampling) for spec in specs]
        keys: Tensor | None = None
        if all(hot):
            keys = torch.from_numpy(keys_below([task.draw_input for task in tasks], depth).reshape(depth, len(tasks)))
        # By way of numpy, as in key_column.
        temperatures = torch.from_numpy(np.array([each or 1.0 for each in hot]))
        scales = torch.from_numpy(np.array([task.line_scale for task in tasks]))
        self._draws = LineDraws(depth, max(task.max_children for task in tasks), temperatures, scales, keys)
        self._levels: list[list[Ranked]] = []
        self.computed_ns = 0
        """Nanoseconds that the call took."""

    @classmethod
    def of(cls, runner: ModelRunner, tasks: Sequence[LineTask]) -> Self | None:
        """The next steps of these tasks; None where they are to be made one by one."""
        decoder = line_decoder(runner)
        if decoder is None or not tasks:
            return None
        depth = min(MAX_DEPTH, *(task.line_depth for task in tasks))
        is_hot = {task.draw_input.spec.sampling.temperature > 0 for task in tasks}
        if depth < 1 or len(is_hot) > 1:
            return None
        line = cls(decoder, tasks, depth)
        try:
            for feed in line.feeds:
                feed.session.reserve(feed.num_reserved, feed.start)
        except CacheFull:
            # There is room for the next step.
            return None
        return line

    @property
    def num_steps(self) -> int:
        """Steps that were made; 0 where they are still to be."""
        return len(self._levels)

    def compute(self, plan: RowPlan, cache: KVCache, wanted: Tensor) -> Tensor:
        """Computes the rows, and those below them; logits [W, V] like a decoder's where no step came of that."""
        if wanted.shape[0] != len(self._tasks):
            # Some have more to read first.
            return self._decoder.forward(plan, cache, wanted)
        started_ns = time.perf_counter_ns()
        ids, shares = self._decoder.line(plan, cache, wanted, self._draws)
        self.computed_ns = time.perf_counter_ns() - started_ns
        for step_ids, step_shares in zip(ids.tolist(), shares.tolist(), strict=True):
            self._levels.append([*map(Ranked, step_ids, step_shares)])
        return torch.empty(len(self._tasks), 0) if self._levels else self._decoder.forward(plan, cache, wanted)

    def steps(self) -> Sequence[Callable[[], None]]:
        """What each task takes."""
        return [partial(task.take_line, levels) for task, *levels in zip(self._tasks, *self._levels, strict=True)]


def line_decoder(runner: ModelRunner) -> FusedHead | None:
    """What makes lines: a compiled head whose ids are all the tokenizer's; None where steps are made one by one."""
    decoder = runner.model
    return decoder if isinstance(decoder, FusedHead) and runner.vocabulary_size == runner.config.vocab_size else None


def is_plain(draw_input: DrawInput, *, wants_logprob: bool) -> bool:
    """Whether guesses of a session are drawn as `Ops.rank` ranks; no matter what is cached."""
    return draw_input.is_plain and draw_input.feed.session.grammar is None and not wants_logprob


def may_be_line(draw_input: DrawInput, *, wants_logprob: bool) -> bool:
    """Whether the next step of a session is one row, of plain draws with the target's noise."""
    feed = draw_input.feed
    is_one_row = len(feed.depths) == 1 and feed.num_committed <= MAX_STEP_TOKENS
    return is_one_row and is_plain(draw_input, wants_logprob=wants_logprob)
