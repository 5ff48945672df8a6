"""Plans and the choice of a drafter where the target has one in its own process."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from gateway.rounds.choice import Case
from gateway.rounds.planner import Drafting, DraftOutlook, RoundPlan, RoundPlanner
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import (
    ANY_DRAFT,
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

AWAY = DraftOutlook(FallbackReason.DRAFT_ABSENT)
OWN, OWN_TREES = (DrafterId("own", Place.HOSTED, makes) for makes in (Makes.CHAIN, Makes.TREE))


def planner_of(draft_count: int | None, *remote: DrafterId) -> RoundPlanner:
    return RoundPlanner(SpeculationPolicy(), draft_count, 500, 8, Drafting((OWN, *remote)))


def asking(count: int, budget: int = 0) -> RoundPlan:
    """A plan of so many guesses of the target's own drafter."""
    return RoundPlan((GuessRequest(OWN, count),), budget)


def log_of(length: int) -> TokenLog:
    """A log of a prompt of two tokens and an output."""
    log = TokenLog((1,) * length)
    log.prompt_len = 2
    return log


def test_guesses_begin_behind_the_prompt_without_another_message() -> None:
    """The prompt's own pass has none; what the target says after it comes unasked, and counts as drafting."""
    planner = planner_of(4)
    assert planner.plan(log_of(2), 0, AWAY, "own") == asking(4, TUNING.hosted_budget)
    assert planner._session.is_drafting
    assert planner.plan(log_of(3), TUNING.hosted_budget, AWAY, "own") == RoundPlan()


def test_what_is_to_be_tried_waits_for_its_turn() -> None:
    """Behind the prompt's own pass: a session that ends there must not take it from the others."""
    planner = planner_of(None)
    plan = planner.plan(log_of(2), 0, AWAY, "own")
    assert planner.choice.case is Case.EXPLORING
    assert (plan.asked(Place.HOSTED).count > 0, plan.plain_budget) == (True, 0)


def test_stretches_are_extended_in_their_second_half() -> None:
    """With K for what comes; in their first half nothing is said. What has no room the target leaves out itself."""
    planner, stretch = planner_of(4), asking(4, TUNING.hosted_budget)
    assert planner.plan(log_of(3), 0, AWAY, "own") == stretch
    assert planner.plan(log_of(8), TUNING.hosted_budget - 5, AWAY, "own") == RoundPlan()
    assert planner.plan(log_of(40), TUNING.hosted_budget // 2, AWAY, "own") == stretch
    assert planner.plan(log_of(497), 0, AWAY, "own") == stretch


def test_what_is_left_of_an_answer_is_no_reason_to_choose_at_every_token() -> None:
    """A stretch that reaches to its end is looked at when a half of that is left, a quarter, and so on."""
    planner = RoundPlanner(SpeculationPolicy(), 0, 500, 64, Drafting((OWN,)))
    planned = []
    for log_len in range(460, 500):
        plan = planner.plan(log_of(log_len), 0 if log_len == 460 else 500 - log_len, AWAY, "own")
        planned += [500 - log_len] if plan.plain_budget else []
    assert planned == [40, 16, 7, 3, 1]


def test_a_stretch_ends_when_its_guesses_turn_out_to_be_worth_nothing() -> None:
    """At once, and not when it would have been extended."""
    planner = planner_of(None)
    policy = planner._policy
    policy.costs.begin({1: 10_000.0, 8: 10_100.0}, {OWN: {1: 100.0}})
    stretch = planner.plan(log_of(3), 0, AWAY, "own")
    assert (stretch.asked(Place.HOSTED).count > 0, stretch.plain_budget) == (True, TUNING.hosted_budget)
    outstanding = TUNING.hosted_budget - 5
    assert planner.plan(log_of(8), outstanding, AWAY, "own") == RoundPlan()
    for _ in range(50):
        policy.costs.of(OWN).acceptance.observe(0, 1)
        policy.costs.of(OWN).step_us.add(1, 20_000)
    policy._tables.round_us.clear()
    policy.candidates(OWN, 8)
    assert not policy.is_worth(OWN)
    ended = planner.plan(log_of(8), outstanding, AWAY, "own")
    assert (ended.guesses, ended.plain_budget) == ((), TUNING.plain_budget)
    assert planner.plan(log_of(9), TUNING.plain_budget - 1, AWAY, "own") == RoundPlan()


def test_a_larger_tree_is_looked_at_for_a_few_tokens() -> None:
    """And not for a stretch, which is many rounds; then a stretch of the best one follows."""
    planner = RoundPlanner(SpeculationPolicy(), None, 500, 64, Drafting((OWN_TREES,)))
    costs = planner._policy.costs
    costs.begin({1: 10_000.0, 32: 10_100.0}, {OWN: {1: 100.0}})
    plans = []
    for log_len in (3, 5):
        plans.append(planner.plan(log_of(log_len), 0, AWAY, "own"))
        plans.append(planner.choice.case)
        tree = TokenTree((1, 2), (0, 0), values=(0.7, 0.2))
        costs.of(OWN_TREES).observe_tree(Proposal(tree, forward_count=1), GuessRequest(OWN_TREES, 2))
    look, case, best, after = plans
    assert (case, after) == (Case.LARGER_TREE, Case.BEST)
    assert (look.plain_budget, best.plain_budget) == (TUNING.looked_budget, TUNING.hosted_budget)
    assert look.asked(Place.HOSTED).count > best.asked(Place.HOSTED).count


def test_a_tree_says_what_trees_of_its_own_size_bring() -> None:
    """One that was asked for before the number changed comes later, and says nothing of the new number."""
    planner = RoundPlanner(SpeculationPolicy(), 8, 500, 64, Drafting((OWN_TREES,), TreeShape()))
    gains = planner._policy.costs.of(OWN_TREES).gains
    assert gains is not None
    before = gains.at(8) - gains.at(4)
    log = log_of(2)
    planner.plan(log, 0, AWAY, "own")
    for _ in range(30):
        own = Proposal(TokenTree((1, 2, 3, 4), (0, 0, 1, 1), values=(0.7, 0.2, 0.4, 0.1)), drafter=OWN_TREES)
        verdict = Verdict(len(log), (1,), 5, None, 1, 1000, 1, 5, 1, own=own)
        planner.observe(log.commit(own, verdict))
        planner.plan(log, 8, AWAY, "own")
    assert gains.at(8) - gains.at(4) > 0.3 * before


def test_what_an_unasked_round_waits_for_is_a_part_of_its_cost() -> None:
    """Guesses of sessions that are not made at the same time let them wait for each other's forwards."""
    policy = SpeculationPolicy()
    policy.costs.begin({1: 8_000.0, 4: 11_000.0, 8: 14_000.0}, {OWN: {1: 1_000.0, 4: 2_000.0}})
    sessions = [policy.session(OWN) for _ in range(4)]
    for session in sessions:
        policy.enter(session)
        policy.mark(session, is_drafting=True)
    own = Proposal(TokenTree.chain((1,)), compute_us=2_000, forward_count=1, row_count=4, drafter=OWN)
    for session in sessions * 20:
        log = log_of(3)
        verdict = Verdict(len(log), (1,), 5, None, 1, 14_000, 1, 8, 4, hop=HopCost(queue_us=3_000), own=own)
        policy.observe(replace(log.commit(own, verdict), round_us=19_500), session, unasked=True)
    assert policy.costs.round_us(OWN, 1) == pytest.approx(19_500, rel=0.03)


def test_a_target_without_the_drafter_decodes_plainly() -> None:
    """After a fail-over, say: with the reason why there are no guesses, and with guesses again on the next target."""
    planner = planner_of(4)
    lacking = RoundPlan((), TUNING.waiting_budget, FallbackReason.DRAFT_ABSENT)
    assert planner.plan(log_of(9), 0, AWAY, "") == lacking
    assert planner.plan(log_of(30), 0, AWAY, "own").asked(Place.HOSTED).count == 4


@pytest.mark.parametrize("own", ["own", ""])
def test_a_fixed_count_is_the_draft_services(own: str) -> None:
    """Where there is one, unless the request names another."""
    expected = RoundPlan((GuessRequest(ANY_DRAFT, 4),))
    assert planner_of(4, ANY_DRAFT).plan(log_of(9), 0, DraftOutlook(), own) == expected


@pytest.mark.parametrize("shape", [TreeShape(), TreeShape(max_width=2)])
def test_a_shape_is_asked_for_with_every_stretch(shape: TreeShape) -> None:
    """Of as many rows as wanted even where there is little room, which limits the depth; some drafters make none."""
    planner = RoundPlanner(SpeculationPolicy(), 6, 500, 64, Drafting((OWN_TREES,), shape))
    guesses = (GuessRequest(OWN_TREES, 6, shape),)
    stretch = RoundPlan(guesses, TUNING.hosted_budget)
    assert planner.plan(log_of(2), 0, AWAY, "own") == stretch
    assert planner.plan(log_of(3), 0, AWAY, "own") == stretch
    assert planner.plan(log_of(40), TUNING.hosted_budget // 2, AWAY, "own") == stretch
    assert planner.plan(log_of(497), 0, AWAY, "own") == stretch
    assert stretch.asked(Place.HOSTED) == guesses[0]
    chains = RoundPlanner(SpeculationPolicy(), 6, 500, 64, Drafting((OWN,), shape))
    assert chains.plan(log_of(3), 0, AWAY, "own") == asking(6, TUNING.hosted_budget)


@pytest.mark.parametrize(("rule", "kinds"), [(Rule.MATCH, {OWN, OWN_TREES}), (Rule.RATIO, {OWN})])
def test_the_policy_may_choose_trees_where_nobody_asks(rule: Rule, kinds: set[DrafterId]) -> None:
    """For K = auto, under rules that do not test with distributions."""
    drafting = Drafting((OWN_TREES,), rule=rule)
    assert set(RoundPlanner(SpeculationPolicy(), None, 500, 8, drafting)._session.drafters) == kinds
    assert set(RoundPlanner(SpeculationPolicy(), 4, 500, 8, drafting)._session.drafters) == {OWN}
    shaped = replace(drafting, shape=TreeShape())
    assert set(RoundPlanner(SpeculationPolicy(), None, 500, 8, shaped)._session.drafters) == {max(kinds)}


@pytest.mark.slow
@pytest.mark.parametrize(("aside", "row_us", "expected"), [(0.9, 20, True), (0.05, 200, False)])
def test_trees_are_chosen_where_they_bring_more(aside: float, row_us: int, expected: bool) -> None:
    """Rows that stand aside are worth what they catch, and cost what rows cost: trees or chains, as it turns out."""
    policy, noise = SpeculationPolicy(), random.Random(5)
    drafting = Drafting((OWN_TREES,))
    planner, grown = RoundPlanner(policy, None, 10**6, 32, drafting), 0
    log, left = log_of(3), 0
    for number in range(4000):
        plan = planner.plan(log, left, AWAY, "own")
        left = plan.plain_budget or left
        asked = planner._plain_plan.asked(Place.HOSTED)
        count, shape = asked.count, asked.shape
        # Of a tree every row of the best path has one aside.
        depth = -(-count // 2) if shape is not None else count
        accepted = 0
        while accepted < depth:
            has_aside = shape is not None and 2 * accepted + 1 < count
            if noise.random() > (0.5 + 0.5 * aside if has_aside else 0.5):
                break
            accepted += 1
        tree = TokenTree.chain((1,) * count)
        if shape is not None:
            values = [each for level in range(depth) for each in (0.5 ** (level + 1), aside * 0.5 ** (level + 1))]
            tree = replace(tree, values=tuple(values[:count]))
        draft_us = (100 if shape is None else 160) * depth
        proposal = Proposal(tree, compute_us=draft_us, forward_count=depth, row_count=depth, drafter=OWN)
        us = 2000 + row_us * count
        verdict = Verdict(
            len(log), tuple(range(1, accepted + 1)), 1, None, min(accepted + 1, depth), us, 1, count + 1, 1
        )
        verdict.own = proposal if count else None
        if number > 3000:
            grown += shape is not None and count > 0
        planner.observe(Round(proposal, verdict, (1,) * (accepted + 1), (), us + draft_us + 10))
        left = max(0, left - accepted - 1)
    assert (grown > 700) is expected
    assert (grown < 300) is not expected


class Machine:
    """Rounds of a draft service and of the target's own drafter, whose costs in microseconds may change."""

    def __init__(self, message_us: float) -> None:
        self.message_us = message_us
        self.policy = SpeculationPolicy()
        self.session = self.policy.session(OWN, ANY_DRAFT)
        self.policy.enter(self.session)
        self.noise = random.Random(3)
        self.chosen: list[tuple[str, int]] = []

    def round(self, draft_count: int, drafter: DrafterId, unasked: bool) -> None:
        """One round, with guesses that are right two times in three."""
        accepted = 0
        while accepted < draft_count and self.noise.random() < 0.66:
            accepted += 1
        way_us = (0 if unasked else 50) if drafter == OWN or not draft_count else self.message_us
        # The target's device is the slower one for drafts.
        step_us = 300 if drafter == OWN else 100
        verdict = Verdict(5, tuple(range(1, accepted + 1)), 1, None, min(accepted + 1, draft_count), 2000, 1, 1)
        proposal = Proposal(
            TokenTree.chain((1,) * draft_count),
            compute_us=step_us * draft_count,
            forward_count=draft_count,
            row_count=draft_count,
            drafter=drafter,
        )
        round_us = int(2000 + step_us * draft_count + way_us)
        committed = Round(proposal, verdict, (1,) * (accepted + 1), (), round_us, round_us)
        self.policy.observe(committed, self.session, unasked=unasked)

    def run(self, num_choices: int) -> Counter[str]:
        """How often each drafter was chosen of those times that one was."""
        counts: Counter[str] = Counter()
        for _ in range(num_choices):
            choice = self.policy.choose(8, self.session)
            counts[choice.drafter.name if choice.draft_count else "plain"] += choice.rounds
            for _ in range(choice.rounds):
                self.round(choice.draft_count, choice.drafter, unasked=choice.drafter == OWN)
            for _ in range(choice.plain_budget):
                self.round(0, ANY_DRAFT, unasked=True)
        return counts


@pytest.mark.slow
def test_the_faster_drafter_is_chosen_and_the_other_one_looked_at() -> None:
    """A quick own draft beats a slow way, a quick way beats the target's slow own drafting; a change is noticed."""
    machine = Machine(message_us=3000)
    counts = machine.run(1500)
    assert counts["own"] > 0.9 * sum(counts.values())
    assert counts[""] > 3
    machine.message_us = 100
    machine.run(3000)
    counts = machine.run(500)
    assert counts[""] > 0.9 * sum(counts.values())


@pytest.mark.slow
def test_sessions_get_the_fastest_of_a_targets_drafters() -> None:
    """The unknown ones first; then one in sixteen has another, so that a change is noticed."""
    policy = SpeculationPolicy()
    costs_us = {"head": 100, "hosted": 300, "slow": 900}

    def pick(*names: str) -> str:
        return policy.pick([DrafterId(each, Place.HOSTED) for each in names]).name

    found: Counter[str] = Counter()
    for number in range(400):
        name = pick(*costs_us)
        assert number > 2 or name == list(costs_us)[number]
        found[name] += 1
        session = policy.session(DrafterId(name, Place.HOSTED))
        policy.enter(session)
        for _ in range(8):
            us = costs_us[name] if number < 200 else 1000 - costs_us[name]
            tree = TokenTree.chain((1,) * 4)
            proposal = Proposal(
                tree, compute_us=4 * us, forward_count=4, row_count=4, drafter=DrafterId(name, Place.HOSTED)
            )
            verdict = Verdict(5, (1, 2), 1, None, 3, 2000, 1, 1)
            round_us = 2000 + 4 * us
            policy.observe(Round(proposal, verdict, (1, 1, 1), (), round_us, round_us), session, unasked=True)
        policy.leave(session)
        if number == 199:
            assert found["head"] > 0.85 * 200
            assert found["slow"] > 2
            found.clear()
    assert found["slow"] > found["head"]
    assert pick("hosted") == "hosted"
    # One that never guesses anything is given up.
    assert [pick("silent", "slow") for _ in range(40)].count("silent") == 8
