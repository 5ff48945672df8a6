"""Costs of a model's forwards by their rows, measured before it serves, so that a gateway knows them from the start."""

import time

import torch

from outrider.engine.batching import Feed
from outrider.engine.runner import ForwardCounts, ModelRunner
from outrider.token_tree import TokenTree

BUDGET_S = 0.4
"""Time after which no more rows are tried: a gateway learns of more while it serves."""
MOST_ROWS = 128
TURNS = 3
"""Forwards of each number of rows, of which the fastest counts: what else runs makes some slower, and none faster."""


def measure_rows(runner: ModelRunner, budget_s: float = BUDGET_S) -> dict[int, int]:
    """Microseconds of a forward by its rows: 1, 2, 4 and so on, as far as they fit the model and the time.

    Runs on the calling thread, before the model serves. Leaves no session, and forwards that are not counted.
    """
    torch.set_num_threads(runner.torch_threads)
    found: dict[int, int] = {}
    began_s, num_rows = time.perf_counter(), 1
    most = min(MOST_ROWS, runner.context_len, runner.max_rows, runner.pool.num_blocks * runner.pool.block_size)
    token_ids = [(101 * number) % runner.vocabulary_size for number in range(most)]
    while num_rows <= most and time.perf_counter() - began_s < budget_s:
        # The first forward of all touches every weight for the first time.
        times_us = [_forward_us(runner, token_ids[:num_rows]) for _ in range(TURNS + (num_rows == 1))]
        found[num_rows] = max(1, min(times_us))
        num_rows *= 2
    runner.forward_counts = ForwardCounts()
    return found


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
