"""Plans with lookups and trees: who guesses, how many rows, and when a stretch of unasked tokens ends for it."""

import math
import random
from collections.abc import Sequence

import pytest

from gateway.rounds.choice import fastest
from gateway.rounds.costs import SessionEstimates
from gateway.rounds.offers import FLOORS
from gateway.rounds.planner import Drafting, DraftOutlook, RoundPlan, RoundPlanner
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import (
    ANY_DRAFT,
    LOOKUP,
    NOTHING,
    DrafterId,
    FallbackReason,
    GuessRequest,
    HopCost,
    Makes,
    Place,
    Proposal,
    Round,
    TokenLog,
    Verdict,
)
from gateway.rounds.tuning import TUNING
from outrider.parameters import Rule
from outrider.token_tree import TokenTree, TreeShape

SURE = (0.95, 0.9, 0.86, 0.81, 0.77, 0.74, 0.7, 0.66)
AWAY = DraftOutlook(FallbackReason.DRAFT_ABSENT)
ALONE, BOTH = Drafting((LOOKUP,)), Drafting((ANY_DRAFT, LOOKUP))
MODEL, TREES = DrafterId("model"), DrafterId(makes=Makes.TREE)
TOGETHER = Drafting((DrafterId("lookup+model"), LOOKUP), merges=True)


def log_of(length: int) -> TokenLog:
    """A log of a prompt of two tokens and an output."""
    log = TokenLog((1,) * length)
    log.prompt_len = 2
    return log


def looked(count: int) -> RoundPlan:
    """A plan of so many rows of a lookup."""
    return RoundPlan((GuessRequest(LOOKUP, count),))


def chain(values: Sequence[float], drafter: DrafterId = LOOKUP, **costs: int) -> Proposal:
    """A chain of token 1 with values."""
    tree = TokenTree((1,) * len(values), tuple(range(len(values))), values=tuple(values))
    return Proposal(tree, drafter=drafter, **costs)  # type: ignore[arg-type]


class Machine:
    """A target whose forwards cost what a table says, by rows, in microseconds."""

    def __init__(self, costs: Sequence[float], asked_us: float = 500.0) -> None:
        self.costs, self.asked_us = costs, asked_us
        self.policy = SpeculationPolicy()
        self.noise = random.Random(7)

    def cost(self, rows: int) -> float:
        return self.costs[min(rows, len(self.costs)) - 1]

    def plain(self, count: int) -> None:
        """Tokens of an unasked stretch."""
        for _ in range(count):
            self._see(NOTHING, 0, unasked=True)

    def look(self, count: int, alpha: float) -> None:
        """A round with so many rows of a lookup."""
        accepted = 0
        while accepted < count and self.noise.random() < alpha:
            accepted += 1
        self._see(chain([alpha ** (depth + 1) for depth in range(count)]), accepted, unasked=False)

    def _see(self, proposal: Proposal, accepted: int, *, unasked: bool) -> None:
        count = len(proposal.tree)
        verify_us = self.cost(count + 1) * self.noise.uniform(0.98, 1.02)
        rows = tuple(range(1, accepted + 1))
        verdict = Verdict(5, rows, 1, None, min(accepted + 1, count), int(verify_us), 1, count + 1, 1)
        tokens = (1,) * (accepted + 1)
        round_us = int(verify_us + (20 if unasked else self.asked_us))
        self.policy.observe(Round(proposal, verdict, tokens, (), round_us), unasked=unasked)

    def best(self, alpha: float, most: int) -> int:
        """The rows that bring the most tokens a microsecond, by the true costs."""
        speeds = {0: 1 / (self.cost(1) + 20)}
        for count in range(1, most + 1):
            tokens = sum(alpha**depth for depth in range(count + 1))
            speeds[count] = tokens / (self.cost(count + 1) + self.asked_us)
        return max(speeds, key=speeds.__getitem__)


def num_rows(policy: SpeculationPolicy, values: list[float], session: SessionEstimates) -> int:
    """Rows of a lookup that a policy chooses."""
    choice = policy.choose_lookup(values, session, halts=False)
    return 0 if choice is None else choice.draft_count


STAIRCASE = [1000.0 + 10 * row for row in range(6)] + [1900.0 + 10 * row for row in range(12)]


@pytest.mark.parametrize("alpha", [0.2, 0.6, 0.8, 0.9, 0.97])
def test_an_edge_behind_six_rows_is_found_within_200_rounds(alpha: float) -> None:
    """A simulated staircase: rows are taken up to the edge, or far past it where they are worth a second stair."""
    machine = Machine(STAIRCASE)
    session = machine.policy.session()
    values = [alpha ** (depth + 1) for depth in range(16)]
    for number in range(200):
        count = num_rows(machine.policy, values, session)
        if count == 0:
            machine.plain(2)
        # Now and then what is found is shorter or longer than what is best.
        machine.look(machine.noise.randint(1, 16) if number % 4 == 0 else count or 1, alpha)
        machine.plain(1)
    found, best = num_rows(machine.policy, values, session), machine.best(alpha, 16)
    tokens = [sum(alpha**depth for depth in range(count + 1)) for count in (found, best)]
    costs = [machine.cost(count + 1) + (machine.asked_us if count else 20) for count in (found, best)]
    assert tokens[0] / costs[0] >= 0.97 * tokens[1] / costs[1]
    if 0.5 < alpha < 0.85:
        assert found == 5


def test_nothing_found_is_nothing_sent() -> None:
    """An empty look leaves the plan as it is without lookups: a stretch that is not even extended in its first half."""
    planner = RoundPlanner(SpeculationPolicy(), None, 500, 8, ALONE)
    assert planner.plan(log_of(9), 0, AWAY) == RoundPlan((), TUNING.plain_budget)
    assert planner.plan(log_of(10), TUNING.plain_budget - 1, AWAY, look=()) == RoundPlan()


def test_a_growing_match_ends_a_stretch() -> None:
    """When it is worth more than what the target says alone; a doubtful one does not."""
    machine = Machine([1000.0 + 20 * row for row in range(12)])
    machine.plain(20)
    machine.look(4, 0.9)
    planner = RoundPlanner(machine.policy, None, 500, 8, ALONE)
    planner.plan(log_of(9), 0, AWAY)
    assert planner.plan(log_of(10), TUNING.plain_budget - 1, AWAY, look=(0.05, 0.01)) == RoundPlan()
    assert planner.plan(log_of(11), TUNING.plain_budget - 2, AWAY, look=SURE) == looked(8)


def test_the_prompts_own_pass_has_no_guesses() -> None:
    """Whatever a lookup would find in it."""
    planner = RoundPlanner(SpeculationPolicy(), None, 500, 8, ALONE)
    assert planner.plan(log_of(2), 0, AWAY, look=SURE).asked(Place.LOOKUP).count == 0


def test_a_fixed_count_is_the_lookups_where_nobody_else_guesses() -> None:
    """And the draft's where there is one."""
    assert RoundPlanner(SpeculationPolicy(), 3, 500, 8, ALONE).plan(log_of(9), 0, AWAY, look=SURE) == looked(3)
    assert RoundPlanner(SpeculationPolicy(), 3, 500, 8, BOTH).plan(log_of(9), 0, DraftOutlook(), look=SURE) == (
        RoundPlan((GuessRequest(ANY_DRAFT, 3),))
    )


@pytest.mark.parametrize(
    ("drafting", "draft_count", "length", "least"),
    [
        (ALONE, 3, 9, 0.0),
        (BOTH, 3, 9, math.inf),
        (TOGETHER, 3, 9, 0.0),
        (Drafting(), None, 9, math.inf),
        (BOTH, None, 2, math.inf),
        (BOTH, None, 9, 0.0),
    ],
)
def test_lookups_search_where_they_may_guess(
    drafting: Drafting, draft_count: int | None, length: int, least: float
) -> None:
    """Not for another's fixed number, nor beside the prompt; alone on a target whatever is found may be of use."""
    assert RoundPlanner(SpeculationPolicy(), draft_count, 500, 8, drafting).looks_for(log_of(length)) == least


def test_nothing_is_searched_for_while_guesses_rest() -> None:
    """After all sessions together have lost too much with them."""
    policy = SpeculationPolicy()
    planner = RoundPlanner(policy, None, 500, 8, Drafting((LOOKUP,)))
    assert planner.looks_for(log_of(9)) == 0
    while not policy.rest:
        policy.costs.account.observe(policy.costs.load, 3_000.0, 1, 1_000.0, is_pure=False)
    assert planner.looks_for(log_of(9)) == math.inf


@pytest.mark.parametrize(("fixed_us", "row_us", "least"), [(10_000, 1, 0.6), (0, 1_000, math.inf)])
def test_rows_that_are_worth_nothing_are_seldom_searched_for(fixed_us: float, row_us: float, least: float) -> None:
    """One round of sixteen says what lookups offer, all of it; the others search above the price of rows then."""
    policy = SpeculationPolicy()
    policy.costs.begin({1 << power: fixed_us + row_us * (1 << power) for power in range(9)}, {})
    planner, found = RoundPlanner(policy, None, 5_000, 8, ALONE), []
    for length in range(9, 809):
        searched = planner.looks_for(log_of(length))
        look = tuple(value for value in SURE if value > searched)
        planner.plan(log_of(length), TUNING.plain_budget, AWAY, look=look)
        verdict = Verdict(length, (), 1, None, 0, int(fixed_us + 16 * row_us), 1, 16, 16)
        planner.observe(Round(NOTHING, verdict, (1,), (), verdict.compute_us))
        found.append(searched)
    others = [searched for searched in found[-16:] if searched > FLOORS[0]]
    assert others == pytest.approx([least * 15 / 16] * 15)
    assert policy.costs.offers.above()[0].share == 1.0


def test_of_draft_and_lookup_the_faster_one_guesses() -> None:
    """A draft that is right four times of five, and a lookup that is surer or less sure."""
    policy, noise = SpeculationPolicy(), random.Random(5)
    planner = RoundPlanner(policy, None, 10_000, 8, BOTH)
    for length in range(9, 600):
        plan = planner.plan(log_of(length), 0, DraftOutlook())
        count = plan.asked(Place.REMOTE).count
        accepted = next((each for each in range(count) if noise.random() > 0.8), count)
        proposal = Proposal(TokenTree.chain((1,) * count), compute_us=300 * count, forward_count=count, row_count=count)
        rows = tuple(range(1, accepted + 1))
        verdict = Verdict(length, rows, 1, None, min(accepted + 1, count), 2000 + 50 * count, 1, count + 1, 1)
        round_us = 2000 + 350 * count + (500 if count else 20)
        planner._unasked = count == 0
        planner.observe(Round(proposal, verdict, (1,) * (accepted + 1), (), round_us))
    assert planner.plan(log_of(601), 0, DraftOutlook(), look=SURE).asked(Place.LOOKUP).count == 8
    assert planner.plan(log_of(602), 0, DraftOutlook(), look=(0.4, 0.1)).asked(Place.LOOKUP).count == 0


def test_merged_guesses_are_cut_by_value() -> None:
    """A draft's chain gets values from its rates; rows that are not worth verifying are left out, unless K is given."""
    costs = [1000.0 + (10 if row < 4 else 600) * row for row in range(20)]
    machine = Machine(costs)
    for count in (1, 2, 3, 4, 5, 8, 12):
        machine.look(count, 0.9)
    drafted = Proposal(parts=(Proposal(TokenTree.chain((1, 2, 3)), drafter=MODEL),), hop=HopCost())
    found, plan = chain((0.9, 0.8, 0.01, 0.009)), RoundPlan((GuessRequest(ANY_DRAFT, 3), GuessRequest(LOOKUP, 4)))
    auto = RoundPlanner(machine.policy, None, 500, 32, TOGETHER)
    proposal = auto.complete(plan, drafted, found)
    assert proposal.drafter.name == "lookup+model"
    assert proposal.tree.token_ids[:2] == (1, 2)
    assert len(proposal.tree) < 6
    fixed = RoundPlanner(machine.policy, 3, 500, 32, TOGETHER)
    assert len(fixed.complete(plan, drafted, found).tree) == 6


def test_a_draft_that_is_away_leaves_the_lookup() -> None:
    """Of several drafters that are to guess together."""
    planner = RoundPlanner(SpeculationPolicy(), 4, 500, 8, TOGETHER)
    assert planner.plan(log_of(9), 0, AWAY, look=SURE) == looked(4)
    assert planner.plan(log_of(9), 0, AWAY).fallback_reason is FallbackReason.DRAFT_ABSENT


def test_a_shape_is_handed_on() -> None:
    """With as many rows as are asked for, however little room there is in depth."""
    shaped = RoundPlanner(SpeculationPolicy(), 8, 100, 32, Drafting((TREES,), TreeShape(3, 2)))
    assert shaped.plan(log_of(97), 0, DraftOutlook()) == RoundPlan((GuessRequest(TREES, 8, TreeShape(3, 2)),))
    assert shaped.plan(log_of(99), 0, DraftOutlook()).guesses == ()


def grown(rates: Sequence[float], count: int, noise: random.Random, *, as_tree: bool) -> tuple[Proposal, int]:
    """A chain, perhaps called a tree, whose guess at each depth is right at its rate; and how many are."""
    values, value = [], 1.0
    for rate in rates[:count]:
        value *= rate
        values.append(value)
    accepted = next((depth for depth in range(count) if noise.random() > rates[depth]), count)
    tree = TokenTree((1,) * count, tuple(range(count)), values=tuple(values) if as_tree else ())
    return Proposal(tree, compute_us=200 * count, forward_count=count, row_count=count), accepted


def test_a_chain_and_the_same_chain_as_a_tree_get_the_same_count() -> None:
    """What a round brings is counted in places that were decided, so trees are not thought worse than they are."""
    counts = []
    for as_tree in (False, True):
        policy, noise = SpeculationPolicy(), random.Random(4)
        key = TREES if as_tree else ANY_DRAFT
        for number in range(400):
            count = 1 + number % 8
            proposal, accepted = grown((0.8,) * 8, count, noise, as_tree=as_tree)
            policy.costs.of(proposal.learner).observe_tree(proposal, GuessRequest(count=count))
            verdict = Verdict(
                5, tuple(range(1, accepted + 1)), 1, None, min(accepted + 1, count), 2000 + 90 * count, 1, count + 1, 1
            )
            policy.observe(Round(proposal, verdict, (1,) * (accepted + 1), (), 2500 + 290 * count), unasked=False)
        counts.append(fastest(policy.candidates(key, 8)[1:]).draft_count)
    assert abs(counts[0] - counts[1]) <= 1
    assert min(counts) >= 4


def test_promises_that_are_not_kept_are_corrected() -> None:
    """A drafter whose values are twice too large gets half the rows' worth, and so a smaller proposal."""
    found = {}
    for honesty in (1.0, 0.4):
        machine = Machine([1000.0 + 130 * row for row in range(40)])
        noise = random.Random(9)
        for _ in range(300):
            proposal, _ = grown((0.8,) * 8, 8, noise, as_tree=True)
            accepted = next((depth for depth in range(8) if noise.random() > 0.8 * honesty), 8)
            machine.policy.costs.of(proposal.learner).observe_tree(proposal, GuessRequest(count=8))
            verdict = Verdict(5, tuple(range(1, accepted + 1)), 1, None, min(accepted + 1, 8), 2170, 1, 9, 1)
            machine.policy.observe(Round(proposal, verdict, (1,) * (accepted + 1), (), 4400), unasked=False)
        machine.plain(5)
        found[honesty] = machine.policy.cut_count(proposal)
    assert found[0.4] < found[1.0]


@pytest.mark.parametrize("rule", [Rule.RATIO, Rule.BLOCK])
def test_under_uniforms_no_row_is_left_out(rule: Rule) -> None:
    """Not for its value: it must be tested as it was drawn."""
    planner = RoundPlanner(SpeculationPolicy(), None, 500, 32, Drafting(rule=rule))
    drafted = chain((0.5, 0.001, 0.0001), drafter=ANY_DRAFT)
    assert planner.complete(RoundPlan((GuessRequest(ANY_DRAFT, 3),)), drafted, NOTHING).tree == drafted.tree
