"""Costs of a head's steps by their rows, measured before it serves, so that a gateway knows them from the start.

What is measured are whole proposals, counted as the gateway counts those of rounds: a step's share of the time that its
sessions are charged, with the draws, and its share of the rows. Most rows of a step have logits that a guess is drawn
from, and those that only read what was accepted have none; so there are proposals of both kinds.
"""

import time
from itertools import product
from typing import Any

import torch

from outrider.drafters.drafter import Drafter, GuessLimits, HostedSession, guess
from outrider.engine.batching import Feed
from outrider.engine.runner import ForwardCounts, ModelRunner
from outrider.engine.session import Session
from outrider.parameters import SamplingParameters, SessionSpec

BUDGET_S = 0.2
"""Time within which proposals are made: a gateway learns of more rows while it serves."""
NUM_SESSIONS = (1, 2, 4, 8, 16, 32)
READ_COUNTS = (3, 1)
"""Tokens that a session reads before it guesses: its last one and two more that were accepted, or just that one."""
DRAFT_COUNT = 4
TURNS = 2
"""Proposals of each kind, of which the faster counts: what else runs makes some slower, and none faster."""


def measure_steps(
    head: Drafter[Any], target: ModelRunner, sampling: SamplingParameters, budget_s: float = BUDGET_S
) -> dict[int, int]:
    """Microseconds of a step of a head by its rows, as far as they fit its cache and the time.

    Runs on the calling thread, before the target serves. Leaves no session, and forwards that are not counted.
    """
    found: dict[int, int] = {}
    if head.runner is None:
        # Its guesses are rows of the target's own forwards.
        return found
    torch.set_num_threads(target.torch_threads)
    token_ids = tuple((101 * number) % target.vocabulary_size for number in range(max(READ_COUNTS)))
    sources = {count: target.open(token_ids[:count], 1) for count in READ_COUNTS}
    try:
        # What a head reads is there, and both have touched their weights for the first time.
        target.forward([*map(Feed, sources.values())])
        target.finish()
        _step(head, sources[1], sampling, 1)
        began_s = kind_s = time.perf_counter()
        for num_sessions, read_count in product(NUM_SESSIONS, READ_COUNTS):
            now_s = time.perf_counter()
            # One kind takes about twice as long as the last but one.
            is_late = now_s + 2 * (now_s - kind_s) > began_s + budget_s
            if is_late or num_sessions > head.runner.pool.num_blocks:
                break
            kind_s = now_s
            us, rows = min(_step(head, sources[read_count], sampling, num_sessions) for _ in range(TURNS))
            if rows:
                found[rows] = us
    finally:
        for session in sources.values():
            session.free()
        target.forward_counts = ForwardCounts()
    return found


def _step(head: Drafter[Any], source: Session, sampling: SamplingParameters, num_sessions: int) -> tuple[int, int]:
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
    hosted = [HostedSession.of(head, spec, None, None) for _ in range(num_sessions)]
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
