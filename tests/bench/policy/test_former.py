"""The choice of another commit in today's worlds."""

from pathlib import Path

import pytest

from bench.policy.devices import Law, Simulation, World
from bench.policy.former import ESTIMATES, ROUNDS, files_of, import_files, simulation_with
from bench.policy.texts import TextKind
from bench.policy.worlds import world
from gateway.rounds.round import ANY_DRAFT, LOOKUP
from outrider.cli.bench.common import REPOSITORY
from outrider.errors import InvalidRequest

NAMED = {
    f"{ROUNDS}/__init__.py": "",
    f"{ROUNDS}/round.py": "",
    f"{ROUNDS}/policy.py": "class SpeculationPolicy: pass",
    f"{ROUNDS}/planner.py": """
from dataclasses import dataclass
from gateway.rounds.policy import SpeculationPolicy
@dataclass
class Drafting:
    remote: str | None
    own: str
    may_grow_trees: bool
    own_makes_trees: bool
    looks: bool
@dataclass
class RoundPlan:
    draft_count: int
    plain_budget: int = 0
    own_draft_count: int = 0
    look_count: int = 0
    shape: None = None
    own_shape: None = None
class RoundPlanner:
    def __init__(self, policy, draft_count, max_len, max_draft_count, drafting):
        assert isinstance(policy, SpeculationPolicy) and drafting == Drafting("", "", False, False, True)
        self.seen = set()
    def __enter__(self): pass
    def __exit__(self, *reason): pass
    def plan(self, log, outstanding, draft, own, look):
        if outstanding:
            return RoundPlan(0)
        return RoundPlan(0, look_count=len(look)) if look else RoundPlan(2)
    def complete(self, plan, drafted, found):
        return found if found.tree else drafted
    def observe(self, committed):
        self.seen.add(committed.proposal.drafter)
""",
}
"""Planner of a kind that is gone: its drafters are names."""


def test_todays_files_choose_as_today() -> None:
    """Copied into another package they make the same tokens of a world."""
    files = {
        path.relative_to(REPOSITORY).as_posix(): path.read_text()
        for folder in (ROUNDS, ESTIMATES)
        for path in Path(REPOSITORY, folder).glob("*.py")
    }
    modules = import_files(files, "former_today")
    tokens = []
    for simulation in (Simulation(world(20)), simulation_with(*modules, world(20))):
        simulation.load(4)
        tokens.append(simulation.run(3.0))
    assert tokens[0] == tokens[1]


def test_a_drafter_may_be_a_name() -> None:
    """Its plan is read as one of today, and rounds name their drafters."""
    flat = World("flat", lambda rows: 5_000, (Law(ANY_DRAFT, lambda rows: 100),), (TextKind(), TextKind(found=0.5)))
    simulation = simulation_with(*import_files(NAMED, "former_named"), flat)
    simulation.keeps_rounds = True
    simulation.load(4)
    simulation.run(2.0)
    drafters = {each.proposal.drafter for _, _, each in simulation.rounds if each.proposal.tree}
    assert drafters == {ANY_DRAFT, LOOKUP}
    assert {len(each.proposal.tree) for _, _, each in simulation.rounds} >= {2, 4}


def test_a_commit_that_is_not_there_is_named() -> None:
    """An option's refusal says which."""
    with pytest.raises(InvalidRequest, match="no-such-commit"):
        files_of("no-such-commit")
