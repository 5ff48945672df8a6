"""Costs of a model's forwards by their rows, measured before it serves, so that a gateway knows them from the start."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.batching import Feed, RowPlan
from outrider.engine.cache import BLOCK_SIZE, KVCache
from outrider.engine.models.decoder import ChainDraws, ChainingDecoder
from outrider.engine.runner import ForwardCounts, ModelRunner
from outrider.engine.session import Session
from outrider.token_tree import EMPTY, TokenTree

BUDGET_S = 0.4
"""Time after which no more rows are tried: a gateway learns of more while it serves."""
MOST_ROWS = 128
TURNS = 3
"""Forwards of each number of rows, of which the fastest counts: what else runs makes some slower, and none faster."""
LEAST_SIZES = 2
"""Numbers of rows that are tried however long they take: one alone does not say what a row more costs, and of a model
with experts that is almost all that the first one cost."""


def measure_rows(runner: ModelRunner, budget_s: float = BUDGET_S) -> dict[int, int]:
    """Microseconds of a forward by its rows: 1, 2, 4 and so on, as far as they fit the model and the time.

    All rows are different tokens, which choose different experts where a model has these, as guesses in life do. Runs
    on the calling thread, before the model serves. Leaves no session, and forwards that are not counted.
    """
    torch.set_num_threads(runner.torch_threads)
    found: dict[int, int] = {}
    end_s, num_rows = time.perf_counter() + budget_s, 1
    most = min(MOST_ROWS, runner.context_len, runner.max_rows, runner.pool.num_blocks * runner.pool.block_size)
    token_ids = [(101 * number) % runner.vocabulary_size for number in range(most)]
    least_sizes = LEAST_SIZES if budget_s > 0 else 0
    while num_rows <= most and (time.perf_counter() < end_s or len(found) < least_sizes):
        # The first forward of all touches every weight for the first time.
        times_us = [_forward_us(runner, token_ids[:num_rows]) for _ in range(1 + (num_rows == 1))]
        while len(times_us) < TURNS + (num_rows == 1) and time.perf_counter() < end_s:
            times_us.append(_forward_us(runner, token_ids[:num_rows]))
        found[num_rows] = max(1, min(times_us))
        num_rows *= 2
    runner.forward_counts = ForwardCounts()
    return found


def warm_up(runner: ModelRunner) -> None:
    """Makes each step once that costs more the first time, because it is recorded or compiled then, and a prompt.

    Runs on the calling thread, before the model serves. Leaves no session, and forwards that are not counted.
    """
    room, shapes = min(runner.context_len, runner.pool.num_free * BLOCK_SIZE), runner.model.step_shapes
    for num_rows, longest in shapes:
        # One session with the longest rows, and others with one each.
        lengths = [longest] + [1] * (num_rows - longest)
        if max(longest, 2) <= runner.context_len and len(lengths) + longest // BLOCK_SIZE < runner.pool.num_free:
            _try([(runner.open([0], 1), TokenTree.chain([0] * (length - 1))) for length in lengths], runner)
    if shapes:
        _try([(runner.open([0] * min(runner.max_rows, room), 1), EMPTY)], runner)
        session = runner.open([0], 1)
        try:
            make_chain(runner, [session], _draws(runner, 2, 1))
        finally:
            session.free()
    runner.forward_counts = ForwardCounts()


def make_chain(runner: ModelRunner, sessions: Sequence[Session], draws: ChainDraws) -> list[list[int]]:
    """The tokens of a chain below each session, by step, made in one call; none by a model that makes no chains."""
    model, found = runner.model, list[list[int]]()

    def compute(plan: RowPlan, cache: KVCache, wanted: Tensor) -> Tensor:
        if isinstance(model, ChainingDecoder):
            found.extend(model.chain(plan, cache, wanted, draws))
        return torch.empty(len(wanted), 0)

    runner.forward([Feed(session, num_below=len(draws.keys) - 1) for session in sessions], compute=compute)
    return found


def _try(texts: Sequence[tuple[Session, TokenTree]], runner: ModelRunner) -> None:
    try:
        logits = runner.forward([Feed(*each) for each in texts]).logits
        draws = _draws(runner, 1, len(logits))
        runner.ops.choose(logits, draws.temperatures, draws.keys[0], draws.num_tokens)
    finally:
        for session, _ in texts:
            session.free()


def _draws(runner: ModelRunner, depth: int, num_rows: int) -> ChainDraws:
    keys = torch.zeros(depth, num_rows, dtype=torch.int64, device=runner.device)
    temperatures = torch.ones(num_rows, dtype=torch.float64, device=runner.device)
    return ChainDraws(temperatures, keys, runner.vocabulary_size)


def _forward_us(runner: ModelRunner, token_ids: list[int]) -> int:
    session = runner.open(token_ids[:1], 1)
    try:
        started_s = time.perf_counter()
        result = runner.forward([Feed(session, TokenTree.chain(tuple(token_ids[1:])))])
        # The number is there only when the device has computed it.
        result.logits[-1, 0].item()
        runner.finish()
        return int(1e6 * (time.perf_counter() - started_s))
    finally:
        session.free()
