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
        _try([(runner.open([0], 1), EMPTY)], runner, num_below=1)
    runner.forward_counts = ForwardCounts()


def _try(texts: Sequence[tuple[Session, TokenTree]], runner: ModelRunner, num_below: int = 0) -> None:
    model = runner.model

    def compute(plan: RowPlan, cache: KVCache, wanted: Tensor) -> Tensor:
        keys = torch.zeros(1 + num_below, len(wanted), dtype=torch.int64, device=runner.device)
        temperatures = torch.ones(len(wanted), dtype=torch.float64, device=runner.device)
        if num_below and isinstance(model, ChainingDecoder):
            model.chain(plan, cache, wanted, ChainDraws(temperatures, keys, runner.vocabulary_size))
        logits = model.forward(plan, cache, wanted)
        runner.ops.choose(logits, temperatures, keys[0], runner.vocabulary_size)
        return logits

    try:
        runner.forward([Feed(*each, num_below=num_below) for each in texts], compute=compute)
    finally:
        for session, _ in texts:
            session.free()


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
