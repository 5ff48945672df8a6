"""A policy for each target, and what it is told of what services have measured."""

from dataclasses import replace

import pytest

from gateway.generation.policies import MOST_POLICIES, Policies
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import NOTHING, DrafterId, HopCost, Place, Round, Verdict
from gateway.sessions.peer import ModelInfo

FAST = ModelInfo(
    "target", 1, "model", "hash", "cuda-bfloat16", 1024, 4096, (), frozenset({0}), 8, 0, 32_768, {}, row_costs={1: 100}
)
SLOW = replace(FAST, instance_id=2, numerics_id="cpu-bfloat16", row_costs={1: 9000})
DRAFT = replace(FAST, role="draft", instance_id=3, model_hash="other", row_costs={1: 30})
REMOTE = DrafterId("draft")


def learn(policy: SpeculationPolicy, compute_us: int, numerics_id: str, count: int = 100) -> None:
    """Lets a policy learn from plain tokens, with forwards that took so long."""
    verdict = Verdict(5, (), 1, None, 0, compute_us, 1, 1, 1, hop=HopCost(), numerics_id=numerics_id)
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


def test_few_targets_are_remembered() -> None:
    """The ones that were there last."""
    policies = Policies()
    first = policies.of(FAST, {})
    for number in range(MOST_POLICIES):
        policies.of(replace(SLOW, model_hash=str(number)), {})
    assert policies.of(FAST, {}) is not first
