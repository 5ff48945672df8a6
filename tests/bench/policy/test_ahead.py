"""The simulation of drafts that run ahead: what it gains, and that the policy ends it where it gains nothing."""

from collections import Counter

import pytest
from support.basics import grid, slow

from bench.policy.devices import Simulation
from bench.policy.oracle import FixedChoice, speed
from bench.policy.worlds import h100
from gateway.rounds.round import ANY_DRAFT

BRANCHES = 16


def chosen(num_sessions: int, branches: int) -> tuple[float, Counter[str]]:
    """Tokens a second of the policy, and what came of branches."""
    simulation = Simulation(h100(num_sessions, branches=branches))
    simulation.keeps_rounds = True
    simulation.load(num_sessions)
    simulation.run(1.0)
    tokens = simulation.run(5.0)
    return tokens, Counter(each.ahead.outcome.value for _, _, each in simulation.rounds if each.ahead is not None)


def test_a_draft_that_runs_ahead_is_as_fast_as_was_measured() -> None:
    """One stream of 8B with 1B and two guesses: 315 tokens a second over real services, 204 without branches."""
    world = h100(1, branches=BRANCHES)
    ahead, without = (speed(world, FixedChoice(ANY_DRAFT, 2, branches=branches), 1, 10.0) for branches in (BRANCHES, 0))
    assert ahead == pytest.approx(315, rel=0.2)
    assert without == pytest.approx(204, rel=0.2)
    assert ahead > 1.2 * without


@pytest.mark.parametrize("num_sessions", [1, *slow(4, 16), *grid(64)])
def test_the_policy_never_loses_by_branches(num_sessions: int) -> None:
    """With them it is at least 0.97 of what it is without, and of plain decoding, however many share a draft."""
    with_branches, outcomes = chosen(num_sessions, BRANCHES)
    without, none = chosen(num_sessions, 0)
    assert with_branches > 0.97 * max(without, speed(h100(num_sessions), FixedChoice(), num_sessions, 5.0))
    assert not none
    assert set(outcomes) == {"hit", "miss", "late"}
    assert num_sessions > 1 or (with_branches > 1.2 * without and outcomes["hit"] > outcomes["miss"])
