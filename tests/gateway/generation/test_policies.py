"""A policy for each target, and what it is told of what services have measured."""

from dataclasses import replace

import pytest

from gateway.generation.policies import MOST_POLICIES, Policies
from gateway.rounds.planner import Drafting, RoundPlanner
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import NOTHING, DrafterId, HopCost, Place, Round, Verdict
from gateway.sessions.peer import ModelInfo

FAST = ModelInfo(
    "target", 1, "model", "hash", "cuda-bfloat16", 1024, 4096, (), frozenset({0}), 8, 0, 32_768, {}, row_costs={1: 100}
)
SLOW = replace(FAST, instance_id=2, numerics_id="cpu-bfloat16", row_costs={1: 9000})
DRAFT = replace(FAST, role="draft", instance_id=3, model_hash="other", row_costs={1: 30})
REMOTE = DrafterId("draft")


def learn(policy: SpeculationPolicy, compute_us: int, numerics_id: str, count: int = 100, address: str = "") -> None:
    """Lets a policy learn from plain tokens, with forwards that took so long."""
    hop = HopCost()
    verdict = Verdict(5, (), 1, None, 0, compute_us, 1, 1, 1, hop=hop, numerics_id=numerics_id, address=address)
    for _ in range(count):
        policy.observe(Round(NOTHING, verdict, (1,), (), compute_us), unasked=True)


def test_targets_of_different_speed_have_costs_of_their_own() -> None:
    """The slow one takes over while the fast one is away, which then goes on with what was learnt of it."""
    policies = Policies()
    fast = policies.of(FAST, {})
    learn(fast, 120, FAST.numerics_id)
    slow = policies.of(SLOW, {})
    assert policies.latest is slow
    assert slow.costs.verify_us.at(1) == 9000
    learn(slow, 8000, SLOW.numerics_id)
    assert policies.of(FAST, {}) is fast
    assert fast.costs.verify_us.at(1) == pytest.approx(120, rel=0.02)
    assert slow.costs.verify_us.at(1) == pytest.approx(8000, rel=0.02)


def test_a_session_that_has_moved_teaches_nothing() -> None:
    """Its rounds are those of another target than its policy's."""
    policy = Policies().of(FAST, {})
    learn(policy, 9000, SLOW.numerics_id)
    assert policy.costs.verify_us.at(1) == 100
    assert policy.costs.num_rounds == 0


def test_equal_targets_have_costs_and_loads_of_their_own_and_acceptance_together() -> None:
    """How often guesses are right is known of all of one model at once, whatever their numerics."""
    policies, one, two = Policies(), replace(FAST, address="one", row_costs={}), replace(FAST, address="two")
    busy, idle = policies.of(one, {}), policies.of(two, {})
    assert busy is not idle
    learn(busy, 900, one.numerics_id, address="one")
    learn(busy, 5, one.numerics_id, address="two")
    assert busy.costs.verify_us.at(1) == pytest.approx(900, rel=0.02)
    assert idle.costs.num_rounds == 0
    policies.of(one, {})
    # Without measurements of its own a further one begins with what is known of its like.
    assert policies.of(replace(one, address="three"), {}).costs.verify_us.at(1) == pytest.approx(900, rel=0.02)
    assert policies.of(replace(two, address="four"), {}).costs.verify_us.at(1) == 100
    acceptance = [each.costs.of(REMOTE).acceptance for each in (busy, idle, policies.of(SLOW, {}))]
    assert acceptance[0] is acceptance[1] is acceptance[2]
    assert policies.of(replace(FAST, model_hash="other"), {}).costs.of(REMOTE).acceptance is not acceptance[0]


def test_each_target_has_the_guesses_that_its_own_costs_are_worth() -> None:
    """Rows are free on one of two equal targets and dear on the other, and a session that moves has the other's K."""
    policies = Policies()
    costs = {"free": {1: 10_000, 9: 10_000}, "dear": {1: 10_000, 9: 90_000}}
    draft = replace(DRAFT, row_costs={1: 300, 9: 300})
    targets = {each: replace(FAST, address=each, row_costs=costs[each]) for each in costs}

    def policy_at(address: str) -> SpeculationPolicy:
        return policies.of(targets[address], {REMOTE.name: draft})

    policy_at("free").costs.of(REMOTE).acceptance.observe(700, 1000)
    planner = RoundPlanner(policy_at("free"), None, 100, 8, Drafting((REMOTE,)), policy_at=policy_at)
    with planner:
        assert planner.preview().draft_count > 0
        verdict = Verdict(5, (), 1, None, 0, 10_000, 1, 1, 1, numerics_id=FAST.numerics_id, address="dear")
        planner.observe(Round(NOTHING, verdict, (1,), (), 10_000))
        assert planner.preview().draft_count == 0
    assert not policy_at("free")._sessions
    assert not policy_at("dear")._sessions


@pytest.mark.parametrize("changes", [{"model_hash": "new"}, {"numerics_id": "cpu-int8"}])
def test_a_target_that_replaces_another_brings_its_own_measurements(changes: dict[str, str]) -> None:
    """Other weights, or another type of the same ones; what is known of the old one is not believed of it."""
    policies, hosted = Policies(), DrafterId("eagle3", Place.HOSTED)
    old = replace(SLOW, drafter_costs={hosted.name: {1: 500}})
    learn(policies.of(old, {}), 7000, old.numerics_id)
    costs = policies.of(replace(old, **changes, row_costs={1: 3000}, drafter_costs={hosted.name: {1: 80}}), {}).costs
    assert costs.verify_us.at(1) == 3000
    assert costs.of(hosted).step_us.at(1) == 80


def test_the_same_target_started_again_is_known() -> None:
    """What was learnt while serving is better than what is measured before."""
    policies = Policies()
    learn(policies.of(SLOW, {}), 8000, SLOW.numerics_id)
    again = policies.of(replace(SLOW, instance_id=4, row_costs={1: 9900}), {})
    assert again.costs.verify_us.at(1) == pytest.approx(8000, rel=0.02)


def test_measurements_of_a_draft_that_comes_later_are_known() -> None:
    """Whichever target is there."""
    policies = Policies()
    assert not policies.of(FAST, {REMOTE.name: None}).costs.is_known(REMOTE)
    for target in (FAST, SLOW):
        assert policies.of(target, {REMOTE.name: DRAFT}).costs.of(REMOTE).step_us.at(1) == 30


def test_targets_are_forgotten_with_their_links() -> None:
    """After a thousand that came and went, one is left; and of many that are there, none is forgotten."""
    policies = Policies()
    for number in range(1000):
        policies.of(replace(FAST, address=str(number)), {})
        policies.keep({str(number)})
    assert [address for address, *_ in policies._known] == ["999"]
    many = [replace(FAST, address=str(number)) for number in range(2 * MOST_POLICIES)]
    known = [policies.of(each, {}) for each in many]
    policies.keep({each.address for each in many})
    assert all(policies.of(each, {}) is policy for each, policy in zip(many, known, strict=True))


def test_few_are_remembered_of_what_was_at_an_address() -> None:
    """The ones that were there last."""
    policies = Policies()
    first = policies.of(FAST, {})
    for number in range(1000):
        policies.of(replace(SLOW, model_hash=str(number)), {})
        policies.keep({FAST.address})
    assert len(policies._known) == MOST_POLICIES
    assert policies.of(FAST, {}) is not first
