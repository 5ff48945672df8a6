"""Several steps in one call: each row is below the first token after the row above.

What follows each row is found as step by step, bit for bit, and a task takes of it what it would have asked for: a
chain its guesses, and a tree of a head its next rows as far as they are those that were computed. Between two steps
nothing of Python happens, which takes longer than a step of a small head, and longer still while other threads want the
interpreter; and a GPU does not wait for the host.
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
from outrider.engine.devices import send
from outrider.engine.heads.fused import FusedHead, LineDraws
from outrider.engine.models.decoder import ChainDraws, ChainingDecoder, Decoder
from outrider.engine.noise import Keys
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draw import DrawInput, keys_below
from outrider.engine.sampling.transforms import divisor
from outrider.errors import CacheFull

MAX_DEPTH = 4
"""Steps of a head in one call: a tree may want none of the later ones, and they are computed nevertheless."""


class Ranked(NamedTuple):
    """Tokens that may follow a row, the likeliest first, and their shares; fewer where there are no more."""

    token_ids: list[int]
    shares: list[float]


Steps = Callable[[RowPlan, KVCache, Tensor], list[list[Ranked]]]
"""Computes a plan's rows and those below its wanted ones; what follows each of these, by step."""


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


class StepLine:
    """Steps of all tasks of a forward."""

    def __init__(self, decoder: Decoder, tasks: Sequence[LineTask], depth: int, steps: Steps) -> None:
        """All tasks have a line_depth of at least `depth`, which `steps` of the decoder makes at most."""
        self._decoder, self._tasks, self._make_steps = decoder, tasks, steps
        self.feeds = [task.draw_input.feed._replace(num_below=depth - 1) for task in tasks]
        self._levels: list[list[Ranked]] = []
        self.computed_ns = 0
        """Nanoseconds that the call took."""

    @classmethod
    def of(cls, runner: ModelRunner, tasks: Sequence[LineTask], max_chain: int) -> Self | None:
        """The next steps of these tasks, of a model at most max_chain; None where they are to be made one by one."""
        if not tasks:
            return None
        depth, head, steps = min(task.line_depth for task in tasks), line_decoder(runner), None
        if head is not None and depth:
            depth = min(depth, MAX_DEPTH)
            steps = _head_steps(head, tasks, depth)
        elif isinstance(runner.model, ChainingDecoder) and min(depth, max_chain) > 1:
            depth = min(depth, max_chain)
            steps = _chain_steps(runner, runner.model, tasks, depth)
        if steps is None:
            return None
        line = cls(runner.model, tasks, depth, steps)
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
        # Where some have more to read first, they come together in a later step.
        if wanted.shape[0] == len(self._tasks):
            started_ns = time.perf_counter_ns()
            self._levels = self._make_steps(plan, cache, wanted)
            self.computed_ns = time.perf_counter_ns() - started_ns
        return torch.empty(len(self._tasks), 0) if self._levels else self._decoder.forward(plan, cache, wanted)

    def steps(self) -> Sequence[Callable[[], None]]:
        """What each task takes."""
        return [partial(task.take_line, levels) for task, *levels in zip(self._tasks, *self._levels, strict=True)]


def _head_steps(head: FusedHead, tasks: Sequence[LineTask], depth: int) -> Steps | None:
    """Steps with all children of each row; None where some tasks are hot and others not."""
    specs = [task.draw_input.spec for task in tasks]
    hot = [divisor(spec.sampling) for spec in specs]
    if any(hot) != all(hot):
        return None
    keys = torch.from_numpy(_keys(tasks, depth)) if all(hot) else None
    # By way of numpy, as in key_column.
    temperatures = torch.from_numpy(np.array([each or 1.0 for each in hot]))
    scales = torch.from_numpy(np.array([task.line_scale for task in tasks]))
    draws = LineDraws(depth, max(task.max_children for task in tasks), temperatures, scales, keys)

    def steps(plan: RowPlan, cache: KVCache, wanted: Tensor) -> list[list[Ranked]]:
        found = head.line(plan, cache, wanted, draws)
        return [[*map(Ranked, *level)] for level in zip(*(each.tolist() for each in found), strict=True)]

    return steps


def _chain_steps(runner: ModelRunner, decoder: ChainingDecoder, tasks: Sequence[LineTask], depth: int) -> Steps:
    """Steps with the one token that is drawn after each row."""
    temperatures = np.array([divisor(task.draw_input.spec.sampling) for task in tasks])
    sent = send(temperatures, runner.device), send(_keys(tasks, depth), runner.device)
    draws = ChainDraws(*sent, runner.vocabulary_size)

    def steps(plan: RowPlan, cache: KVCache, wanted: Tensor) -> list[list[Ranked]]:
        return [[Ranked([each], []) for each in level] for level in decoder.chain(plan, cache, wanted, draws)]

    return steps


def _keys(tasks: Sequence[LineTask], depth: int) -> Keys:
    """Keys [depth, tasks] of the noise of each step."""
    return keys_below([task.draw_input for task in tasks], depth).reshape(depth, len(tasks))


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
