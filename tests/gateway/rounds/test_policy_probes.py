"""Whole requests through planner and policy on a simulated clock: what they learn about a draft, and at what cost."""

import random
from dataclasses import dataclass, field

import pytest

from gateway.rounds.planner import DraftOutlook, RoundPlanner
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import FallbackReason, Place, Proposal, TokenLog, Verdict
from outrider.token_tree import TokenTree

PROMPT_LEN = 64
VERIFY_US, ROW_US, MESSAGE_US, UNASKED_US = 20_000, 500, 600, 50
SLOW_US, FAST_US = 60_000, 2_000


@dataclass
class Simulation:
    """Requests of one gateway. The draft reads a token that it has not seen at a twentieth of the cost of a guess."""

    draft_us: int = FAST_US
    obstacle: FallbackReason | None = None
    policy: SpeculationPolicy = field(default_factory=SpeculationPolicy)
    noise: random.Random = field(default_factory=lambda: random.Random(3))
    now_us: int = 0
    drafted_rounds: int = 0
    rounds: int = 0

    def run(self, tokens: int, request_tokens: int = 512) -> float:
        """So many tokens in requests of that length; returns the share of rounds that had a proposal."""
        self.drafted_rounds = self.rounds = 0
        for _ in range(tokens // request_tokens):
            self.request(PROMPT_LEN + request_tokens)
        return self.drafted_rounds / self.rounds

    def request(self, max_len: int) -> None:
        """One request."""
        log = TokenLog((1,) * PROMPT_LEN, lambda: self.now_us * 1000)
        with RoundPlanner(self.policy, None, max_len, 32) as planner:
            self.decode(log, planner, max_len)

    def decode(self, log: TokenLog, planner: RoundPlanner, max_len: int) -> None:
        """All rounds of a request."""
        cached_len = PROMPT_LEN if planner.expects_draft() else 0
        limit = len(log)
        while len(log) < max_len:
            outstanding = max(0, min(limit, max_len) - len(log))
            plan = planner.plan(log, outstanding, DraftOutlook(self.obstacle))
            count = plan.asked(Place.REMOTE).count
            if count:
                proposal, verdict = self.draft(count, len(log), len(log) - cached_len)
                cached_len = len(log)
            else:
                proposal, verdict = Proposal(), Verdict(len(log), (), 1, None, 0, VERIFY_US)
                self.now_us += UNASKED_US if outstanding else MESSAGE_US
                if not outstanding or plan.plain_budget >= 2 * outstanding:
                    limit = len(log) + 1 + plan.plain_budget
            self.now_us += verdict.compute_us
            self.rounds += 1
            planner.observe(log.commit(proposal, verdict))

    def draft(self, count: int, base_len: int, catch_up_count: int) -> tuple[Proposal, Verdict]:
        """A speculative round."""
        accepted = 0
        while accepted < count and self.noise.random() < 0.7:
            accepted += 1
        draft_us = self.draft_us * count + self.draft_us * catch_up_count // 20
        self.now_us += draft_us + MESSAGE_US
        self.drafted_rounds += 1
        rows = tuple(range(1, accepted + 1))
        proposal = Proposal(TokenTree.chain((1,) * count), None, draft_us, catch_up_count)
        return proposal, Verdict(base_len, rows, 1, None, min(accepted + 1, count), VERIFY_US + ROW_US * count)


def test_a_slow_first_round_is_forgotten_at_once() -> None:
    """A cold start says nothing about the draft."""
    simulation = Simulation(draft_us=SLOW_US)
    log = TokenLog((1,) * PROMPT_LEN, lambda: simulation.now_us * 1000)
    with RoundPlanner(simulation.policy, None, PROMPT_LEN + 2, 32) as planner:
        planner.observe(log.commit(Proposal(), Verdict(len(log), (), 1, None, 0, VERIFY_US)))
        planner.observe(log.commit(*simulation.draft(1, len(log), 0)))
    simulation.draft_us = FAST_US
    assert simulation.run(5_000) > 0.9


@pytest.mark.slow
def test_a_draft_that_becomes_fast_is_found_out() -> None:
    """After a slow time, which ended speculation, a few thousand tokens are enough; requests may be long or short."""
    for request_tokens in (20, 50, 512):
        simulation = Simulation(draft_us=SLOW_US)
        simulation.run(5_000, request_tokens)
        simulation.draft_us = FAST_US
        simulation.run(4_500, request_tokens)
        assert simulation.run(5_000, request_tokens) > 0.7, request_tokens


@pytest.mark.slow
def test_probes_cost_a_few_hundredths() -> None:
    """While plain decoding wins, requests of any length lose almost nothing to looking for something better."""
    for draft_us in (15_000, SLOW_US):
        for request_tokens in (50, 512):
            simulation = Simulation(draft_us=draft_us)
            simulation.run(5_000, request_tokens)
            begun_us = simulation.now_us
            tokens = 20_000 // request_tokens * request_tokens
            assert simulation.run(tokens, request_tokens) > 0
            plain_us = tokens * (VERIFY_US + UNASKED_US) + tokens // request_tokens * MESSAGE_US
            assert simulation.now_us - begun_us < 1.04 * plain_us, (draft_us, request_tokens)


def test_a_probe_lasts_a_few_rounds_and_belongs_to_one_request() -> None:
    """Only the request that carries it out at once takes it; requests that wait for their turn do not use it up."""
    simulation = Simulation(draft_us=SLOW_US)
    simulation.run(5_000)
    policy = simulation.policy
    while policy.choose(8, ready=False).draft_count == 0:
        simulation.run(20, 20)
    assert all(policy.choose(8, ready=False).draft_count for _ in range(10))
    assert policy.choose(8).rounds == policy.tuning.probe_rounds
    assert policy.choose(8).draft_count == 0


def test_an_absent_draft_costs_no_probe() -> None:
    """While there is an obstacle nothing is used up, so that the first request without one probes."""
    simulation = Simulation(draft_us=SLOW_US)
    simulation.run(5_000)
    simulation.obstacle = FallbackReason.DRAFT_ABSENT
    assert simulation.run(5_000) == 0
    simulation.obstacle, simulation.draft_us = None, FAST_US
    assert simulation.run(1_024) > 0.7
