"""Whole requests on a simulated clock with a draft that makes chains and trees, of a cost like that of an accelerator.

Half of all contexts are easy ones, where the draft is more often right, and says so; see docs/models.md.
"""

import random
from collections.abc import Sequence

import pytest
from support.basics import grid

from gateway.rounds.costs import RoundCosts
from gateway.rounds.planner import Drafting, DraftOutlook, RoundPlanner
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import DrafterId, GuessRequest, Makes, Place, Proposal, TokenLog, Verdict
from gateway.rounds.tuning import TUNING
from outrider.engine.growth import Child, Growth, Limits
from outrider.engine.models.simulated import rates_of
from outrider.token_tree import TokenTree, TreeShape

PROMPT_LEN = 64
RATES = (0.78, 0.1, 0.04, 0.02, 0.012)
WRONG = len(RATES)


class Devices:
    """Requests of one gateway: costs are microseconds, tokens are the ranks that the draft gave them, or WRONG."""

    def __init__(self, draft_us: float, row_us: float = 2, rates: Sequence[float] = RATES) -> None:
        self.draft_us, self.verify_us, self.row_us, self.message_us = draft_us, 6300, row_us, 1000
        self.kinds = [rates_of(rates, is_easy=is_easy) for is_easy in (True, False)]
        self.noise = random.Random(7)
        self.now_us = 0.0
        self.policy = SpeculationPolicy()
        self.asked: list[tuple[TreeShape | None, int, int]] = []
        """Of each plan with guesses the shape, the number of guesses and the room for them."""

    def run(self, tokens: int, count: int | None = None, shape: TreeShape | None = None) -> float:
        """Tokens a millisecond of requests of 256 tokens, with so many guesses a round or as the policy chooses."""
        began_us, self.asked = self.now_us, []
        for _ in range(tokens // 256):
            log = TokenLog((1,) * PROMPT_LEN, lambda: int(self.now_us) * 1000)
            drafting = Drafting((DrafterId(makes=Makes.TREE),), shape)
            with RoundPlanner(self.policy, count, PROMPT_LEN + 256, 64, drafting) as planner:
                self.decode(log, planner)
        return tokens // 256 * 256e3 / (self.now_us - began_us)

    def decode(self, log: TokenLog, planner: RoundPlanner) -> None:
        """All rounds of a request."""
        max_len = PROMPT_LEN + 256
        limit = len(log)
        while len(log) < max_len:
            outstanding = max(0, min(limit, max_len) - len(log))
            plan = planner.plan(log, outstanding, DraftOutlook())
            asked = plan.asked(Place.REMOTE)
            drafted, ranks = self.draft(asked.count, asked.shape, planner.room(log))
            if asked.count:
                self.asked.append((asked.shape, asked.count, planner.room(log)))
            proposal = planner.complete(plan, drafted, Proposal())
            rows = proposal.tree.follow(ranks)
            # What was cut off is not kept.
            end = ranks[len(rows)] if len(rows) < len(ranks) else WRONG
            cost_us = int(self.verify_us + self.row_us * len(proposal.tree))
            if not outstanding:
                self.now_us += self.message_us
                limit = len(log) + 1 + plan.plain_budget
            self.now_us += cost_us
            depth = max(proposal.tree.depths)
            evaluated = min(len(rows) + 1, depth)
            verdict = Verdict(len(log), rows, end, None, evaluated, cost_us, 1, len(proposal.tree) + 1, 1)
            planner.observe(log.commit(proposal, verdict))

    def draft(self, count: int, shape: TreeShape | None, room: int) -> tuple[Proposal, list[int]]:
        """A chain, or the best tree, and what the target says along it."""
        if not count:
            return Proposal(), []
        limits = Limits.of(shape, count, room) if shape is not None else Limits(count, min(count, room), 1)
        growth, levels = Growth(limits), 0
        kinds: dict[int, list[float]] = {}
        while wanted := growth.frontier():
            levels += 1
            for number in wanted:
                kinds[number] = self.kinds[self.noise.random() < 0.5]
                growth.expand(number, [Child(rank, rate) for rank, rate in enumerate(kinds[number])])
        ranks, number = [], 0
        while number in kinds:
            chances = kinds[number]
            rank = self.noise.choices(range(WRONG + 1), [*chances, 1 - sum(chances)])[0]
            ranks.append(rank)
            found = [n for n, node in enumerate(growth.nodes) if node.parent == number and node.token_id == rank]
            number = found[0] if found else -1
        tree = growth.tree()
        if shape is None:
            tree = TokenTree.chain(tree.token_ids)
            levels = len(tree)
        spent_us = int(self.draft_us * levels)
        self.now_us += spent_us
        return Proposal(tree, compute_us=spent_us, forward_count=levels, row_count=len(tree)), ranks


@pytest.mark.slow
@pytest.mark.parametrize("draft_us", [600, *grid(1460)])
def test_auto_finds_the_best_tree(draft_us: float) -> None:
    """Within 5 % of the best of fixed trees, all of which were tried, once 4,000 tokens have been seen."""
    fixed = [Devices(draft_us).run(6000, 31, TreeShape(max_depth=depth)) for depth in (3, 4, 5, 6, 7)]
    chains = [Devices(draft_us).run(6000, count) for count in (2, 3, 4, 5, 6)]
    devices = Devices(draft_us)
    devices.run(4000)
    chosen = devices.run(6000)
    # The room limits how deep a tree is, and not how many rows it has.
    assert any(count > room for shape, count, room in devices.asked if shape is not None)
    assert chosen >= 0.95 * max(fixed)
    assert chosen >= 1.2 * max(chains)


@pytest.mark.slow
def test_trees_are_given_up_where_rows_are_dear() -> None:
    """On a target for which each row costs a tenth of a forward, auto loses at most 6 % to the best chain."""
    chains = [Devices(600, row_us=630).run(6000, count) for count in (1, 2, 3, 4)]
    devices = Devices(600, row_us=630)
    devices.run(4000)
    assert devices.run(6000) >= 0.94 * max(chains)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [TreeShape(max_depth=2), TreeShape(max_children=3), TreeShape(expansions=(3, 1))])
def test_a_shape_that_a_request_names_is_asked_for(shape: TreeShape) -> None:
    """As it is, whatever depth would be best; how many rows it has is still chosen."""
    devices = Devices(600)
    devices.run(2000, None, shape)
    assert {each for each, _, _ in devices.asked} == {shape}
    assert len({count for _, count, _ in devices.asked}) > 1


def test_wider_trees_cost_their_drafter_more() -> None:
    """By the rows of a forward that trees of their own size have, and not by those of the usual size."""
    costs = RoundCosts(TUNING)
    trees = DrafterId(makes=Makes.TREE)
    costs.begin({1: 6300.0, 32: 6400.0}, {trees: {1: 500.0, 8: 4000.0}})
    estimates = costs.of(trees)
    for _ in range(20):
        for count, rows in ((4, 4), (16, 24)):
            tree = TokenTree(tuple(range(1, count + 1)), (0,) * count, values=(0.5 / count,) * count)
            estimates.observe_tree(Proposal(tree, forward_count=4, row_count=rows), GuessRequest(trees, count))
    more_us = estimates.round_us(16) - estimates.round_us(4)
    assert more_us == pytest.approx(4 * 2500 + costs.verify_us.at(17) - costs.verify_us.at(5), rel=0.01)
