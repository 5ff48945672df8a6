"""Plans and costs of rounds before which branches were asked for."""

import pytest

from gateway.rounds.choice import Choice
from gateway.rounds.planner import Drafting, DraftOutlook, RoundPlanner
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import (
    ANY_DRAFT,
    AheadRound,
    BranchOutcome,
    DrafterId,
    HopCost,
    Makes,
    Place,
    Proposal,
    Round,
    TokenLog,
    TokenOrigin,
    Verdict,
)
from gateway.rounds.tuning import TUNING
from outrider.parameters import Rule
from outrider.token_tree import TokenTree, TreeShape

AHEAD = ANY_DRAFT._replace(makes=Makes.AHEAD)
HOSTED = DrafterId("own", Place.HOSTED)
HIT, MISS, LATE = BranchOutcome.HIT, BranchOutcome.MISS, BranchOutcome.LATE
VERIFY_US, STEP_US, WAYS_US = 6_500, 1_300, 1_000


def known_policy(step_us: int = STEP_US) -> SpeculationPolicy:
    """A policy that knows what forwards of both models cost, and the ways."""
    policy = SpeculationPolicy()
    policy.costs.begin({1: VERIFY_US, 32: VERIFY_US}, {ANY_DRAFT: {1: step_us, 64: step_us}})
    for _ in range(40):
        policy.costs.of(ANY_DRAFT).acceptance.observe(3, 4)
        policy.costs.of(ANY_DRAFT).overhead_us.add(1, WAYS_US)
    return policy


def planner_of(
    draft_count: int | None, drafting: Drafting | None = None, policy: SpeculationPolicy | None = None
) -> RoundPlanner:
    return RoundPlanner(policy or known_policy(), draft_count, 500, 8, drafting or Drafting(), branches=16)


def log_of(length: int) -> TokenLog:
    """A log of a prompt of two tokens and an output."""
    log = TokenLog((1,) * length)
    log.prompt_len = 2
    return log


def round_after(outcome: BranchOutcome | None, count: int, round_us: int, sessions: int = 1) -> Round:
    """A round of three tokens after branches, or of one token where none fitted."""
    is_hit = outcome in {HIT, None}
    tree = TokenTree.chain((5, 6, 7, 8)[:count]) if is_hit else TokenTree()
    rows = (1, 2) if is_hit else ()
    verdict = Verdict(9, rows, 4, None, 3, VERIFY_US, 1, count + 1, sessions, hop=HopCost(0, VERIFY_US))
    verdict.is_of_branch, verdict.had_branches = outcome is HIT, outcome in {HIT, MISS}
    tokens, origins = (5, 6, 4) if is_hit else (4,), (TokenOrigin.ACCEPTED,) * len(rows)
    ahead = None if outcome is None else AheadRound(AHEAD, count, 16, outcome)
    proposal = Proposal(tree, is_ahead=True, compute_us=0 if outcome else count * STEP_US, forward_count=count)
    return Round(proposal, verdict, tokens, (*origins, TokenOrigin.CORRECTION), round_us, round_us, ahead=ahead)


def test_a_fixed_count_runs_ahead() -> None:
    """With as many branches as the gateway allows."""
    asked = planner_of(3).plan(log_of(9), 0, DraftOutlook()).asked(Place.REMOTE)
    assert (asked.drafter, asked.count, asked.branch_count, asked.went_on) == (AHEAD, 3, 16, False)
    went_on = planner_of(3).plan(log_of(9), 0, DraftOutlook(), went_on=True).asked(Place.REMOTE)
    assert went_on.went_on


@pytest.mark.parametrize(
    "drafting",
    [
        Drafting(rule=Rule.TYPICAL, drafters=(HOSTED,)),
        Drafting((DrafterId(makes=Makes.TREE),), TreeShape(max_depth=3)),
        Drafting((DrafterId("a+b", makes=Makes.TREE),), merges=True),
    ],
)
def test_no_branches_where_none_can_be_made(drafting: Drafting) -> None:
    """Of a target's own drafter, of trees in a shape, and of several drafts."""
    planner = planner_of(3, drafting)
    plan = planner.plan(log_of(9), 0, DraftOutlook(), "own" if drafting.at(Place.HOSTED) else "")
    assert plan.guesses
    assert all(each.branch_count == 0 for each in plan.guesses)


def branches_at(load: int, dear_us: int) -> int:
    """Branches of a session that the policy asks for, where a step of the draft takes so long with 64 rows."""
    policy = SpeculationPolicy()
    policy.costs.begin({1: VERIFY_US, 512: VERIFY_US}, {ANY_DRAFT: {1: STEP_US, 64: dear_us}})
    policy.costs.load = load
    planner = planner_of(None, policy=policy)
    planner._next = Choice(3, rounds=2, drafter=AHEAD)
    return planner.plan(log_of(9), 0, DraftOutlook()).asked(Place.REMOTE).branch_count


def test_the_policy_asks_for_as_many_branches_as_their_rows_are_worth() -> None:
    """Fewer, the dearer rows are to the draft, and the more sessions have some; never none."""
    by_price = [branches_at(1, price * STEP_US) for price in (1, 4, 40, 4000)]
    by_load = [branches_at(load, 2 * STEP_US) for load in (1, 2, 4, 16, 128)]
    for found in (by_price, by_load):
        assert found == sorted(found, reverse=True)
        assert (found[0], found[-1]) == (16, 1)
        assert len(set(found)) > 3


def test_branches_that_miss_more_than_expected_are_worth_more() -> None:
    """What came of them is learnt, but not from those that came too late."""
    policy = known_policy()
    policy.costs.most_branches = 16
    session = policy.session(ANY_DRAFT, AHEAD)
    before = policy.costs.round_us(AHEAD, 3)
    for outcome, is_dearer in ((LATE, False), (MISS, True)):
        for _ in range(40):
            policy.costs.of(AHEAD).observe_ahead(
                round_after(outcome, 3, 9_000), AheadRound(AHEAD, 3, 16, outcome), is_usual=False
            )
        assert (policy.costs.round_us(AHEAD, 3) > before) == is_dearer
    assert session.drafters


def test_a_target_that_takes_no_branches_ends_run_ahead() -> None:
    """From then on its draft is asked for guesses alone, however often the request fixes their number."""
    planner = planner_of(3)
    plans = [planner.plan(log_of(9 + each), 0, DraftOutlook(), takes_branches=each < 1) for each in range(3)]
    asked = [each.asked(Place.REMOTE) for each in plans]
    assert [each.branch_count for each in asked] == [16, 0, 0]
    assert [each.drafter for each in asked] == [AHEAD, ANY_DRAFT, ANY_DRAFT]
    assert {each.count for each in asked} == {3}


def test_branches_are_shared_by_the_sessions() -> None:
    """A step of the draft has no more rows of all of them than an accelerator makes at the price of one."""
    policy = known_policy()
    policy.costs.load = 64
    asked = planner_of(3, policy=policy).plan(log_of(9), 0, DraftOutlook()).asked(Place.REMOTE)
    assert asked.branch_count == TUNING.branch_rows // 64
    assert asked.plain_on_miss


@pytest.mark.parametrize(
    ("outcome", "of_branch", "had"), [(HIT, True, True), (MISS, False, True), (LATE, False, False)]
)
def test_a_round_says_what_came_of_branches(outcome: BranchOutcome, of_branch: bool, had: bool) -> None:
    """Of those that were asked for in the round before it."""
    planner = planner_of(3)
    first, second = round_after(None, 3, 12_000), round_after(None, 3, 7_000)
    second.verdict.is_of_branch, second.verdict.had_branches = of_branch, had
    for length, each in ((9, first), (12, second)):
        planner.plan(log_of(length), 0, DraftOutlook())
        planner.observe(each)
    assert first.ahead is None
    assert second.ahead == AheadRound(AHEAD, 3, 16, outcome)


def test_a_cheap_draft_is_waited_for_on_a_miss_and_a_dear_one_is_not() -> None:
    """By what a plain token costs beyond what it brings."""
    assert not known_policy(step_us=200).costs.of(AHEAD).is_plain_on_miss(3)
    assert known_policy(step_us=2_500).costs.of(AHEAD).is_plain_on_miss(3)


def test_hits_hide_the_draft_and_the_ways() -> None:
    """A round that runs ahead is expected to take little more than the target's forward, as far as branches are made
    within that.
    """
    costs = known_policy().costs
    fitting, late = costs.round_us(AHEAD, 3), costs.round_us(AHEAD, 7)
    assert VERIFY_US < fitting < costs.round_us(ANY_DRAFT, 3) - STEP_US
    assert late > 8 * STEP_US + WAYS_US


def test_the_policy_runs_ahead_while_that_pays() -> None:
    """It begins where the formula says so, and ends when rounds take longer than it says."""
    policy = known_policy()
    session = policy.session(ANY_DRAFT, AHEAD)
    policy.enter(session)
    assert policy.choose(8, session).drafter == AHEAD
    for _ in range(30):
        for outcome in (HIT, HIT, MISS):
            policy.observe(round_after(outcome, 4, 30_000), session, unasked=False)
            choice = policy.choose(8, session)
            if choice.draft_count:
                policy.observe(round_after(HIT, choice.draft_count, 30_000), session, unasked=False)
    assert policy.choose(8, session).drafter == ANY_DRAFT


def test_a_plain_token_after_a_miss_is_no_plain_decoding() -> None:
    """What it took says nothing of that: it may have waited for branches."""
    policy = known_policy()
    session = policy.session(ANY_DRAFT, AHEAD)
    policy.enter(session)
    before = policy.costs.round_us(ANY_DRAFT, 0)
    for _ in range(20):
        policy.observe(round_after(MISS, 4, 50_000), session, unasked=False)
    assert policy.costs.round_us(ANY_DRAFT, 0) == before
