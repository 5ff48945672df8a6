"""Costs of a head's steps by their rows, measured before it serves, so that a gateway knows them from the start.

What is measured are proposals of several sessions, one row of each in a step, and counted is what the gateway counts of
those in rounds: the time that a session is charged, draws included, and the rows, both by step.
"""

import secrets
import time
from typing import Any

import torch

from outrider.drafters.drafter import Drafter, GuessLimits, HostedSession, guess
from outrider.engine.cache import BLOCK_SIZE
from outrider.engine.runner import ModelRunner
from outrider.engine.session import Session
from outrider.parameters import SamplingParameters, SessionSpec
from outrider.token_tree import EMPTY

BUDGET_S = 0.2
"""Time within which proposals are made: a gateway learns of more rows while it serves."""
MOST_SESSIONS = 32
SHARED_BLOCKS = 8
"""Blocks of text before the guesses: attention to it is a part of a step, and reading it once is enough."""
DRAFT_COUNT = 2
TURNS = 3
"""Proposals of each number of sessions, of which the fastest counts: what else runs makes some slower, none faster."""


def measure_steps(
    head: Drafter[Any], target: ModelRunner, sampling: SamplingParameters, budget_s: float = BUDGET_S
) -> dict[int, int]:
    """Microseconds of a step of a head by its rows: 1, 2, 4 and so on, as far as they fit its cache and the time.

    Runs on the calling thread, before the target serves. Leaves no session, and nothing that another one could find.
    """
    found: dict[int, int] = {}
    if head.runner is None:
        # Its guesses are rows of the target's own forwards.
        return found
    torch.set_num_threads(target.torch_threads)
    pool, context_len = head.runner.pool, min(target.context_len, head.runner.context_len)
    num_shared = min(SHARED_BLOCKS, context_len // (2 * BLOCK_SIZE), target.pool.num_blocks // 2, pool.num_blocks // 4)
    most = min(MOST_SESSIONS, pool.num_blocks // (num_shared + 1))
    source = target.open([0] * (num_shared * BLOCK_SIZE + 1), 1)
    salt, num_sessions, spent_s = secrets.token_bytes(32), 1, 0.0
    try:
        source.reserve()
        # What lies there makes no difference to what a step costs, as long as it is numbers.
        slots = torch.from_numpy(source.table.slots(0, len(source))).to(target.device)
        for kept in (target.cache.features, *target.cache.keys, *target.cache.values):
            kept[slots] = 0
        source.advance(len(source) - 1, EMPTY)
        # Reads the text, which is shared from then on, and touches all weights for the first time.
        _step(head, source, salt, sampling, 1)
        end_s = time.perf_counter() + budget_s
        # Twice as many take up to twice as long.
        while num_sessions <= most and time.perf_counter() + 2 * spent_s < end_s:
            started_s = time.perf_counter()
            step_us, num_rows = min(_step(head, source, salt, sampling, num_sessions) for _ in range(TURNS))
            if num_rows:
                found[num_rows] = step_us
            num_sessions, spent_s = 2 * num_sessions, time.perf_counter() - started_s
    finally:
        source.free()
    return found


def _step(
    head: Drafter[Any], source: Session, salt: bytes, sampling: SamplingParameters, num_sessions: int
) -> tuple[int, int]:
    """Microseconds and rows of a step of so many sessions that guess after the target's; 0 where there is no guess."""
    spec = SessionSpec(
        token_ids=tuple(source.token_ids),
        prompt_len=1,
        sampling=sampling,
        seed=0,
        max_len=len(source) + DRAFT_COUNT + 1,
        eos_token_ids=frozenset(),
        stop_token_ids=frozenset(),
    )
    hosted = [HostedSession.of(head, spec, None, salt) for _ in range(num_sessions)]
    for each in hosted:
        each.propose(source, GuessLimits(DRAFT_COUNT))
    guess(hosted, [each.part for each in hosted])
    proposal = hosted[0].part.proposal
    for each in hosted:
        each.part.free()
    if proposal is None or not proposal.tree:
        return 0, 0
    num_steps = max(proposal.times.forward_count, len(proposal.tree))
    return max(1, proposal.times.compute_us // num_steps), max(1, round(proposal.times.row_count / num_steps))
