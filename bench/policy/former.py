"""The choice of guesses of another commit in the worlds of today: its own planner, policy and estimates.

Their files are copied into a package of another name, so that both stand beside each other in one process. All else,
tokens, trees and gathering, is today's, and so are the records of a round where drafters have ids. At f83426c a drafter
was a name, and its plans and rounds are translated.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from bench.policy.devices import MAX_LEN, Planner, Simulation, World
from bench.policy.texts import MAX_ROWS
from gateway.rounds.planner import DraftOutlook, RoundPlan
from gateway.rounds.round import LOOKUP, GuessRequest, Makes, Place, Proposal, Round, TokenLog
from outrider.cli.bench.common import REPOSITORY
from outrider.errors import InvalidRequest

ROUNDS, ESTIMATES = "gateway/rounds", "outrider/estimates"


def files_of(commit: str) -> dict[str, str]:
    """Text of each file of a commit that chooses guesses. Raises InvalidRequest where git has none."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout

    try:
        paths = git("ls-tree", "-r", "--name-only", commit, "--", ROUNDS, ESTIMATES).splitlines()
        return {path: git("show", f"{commit}:{path}") for path in paths if path.endswith(".py")}
    except (OSError, subprocess.CalledProcessError) as error:
        raise InvalidRequest("--old", commit, "a commit that git has, from f83426c on") from error


def import_files(files: Mapping[str, str], name: str) -> tuple[ModuleType, ModuleType]:
    """The planner's and the policy's modules of such files, which become a package of this name."""
    has_ids = "class DrafterId" in files[f"{ROUNDS}/round.py"]
    shared = (f"from {name}.rounds.round import", "from gateway.rounds.round import") if has_ids else ("", "")
    with TemporaryDirectory() as folder:
        for path, text in files.items():
            place = Path(folder, name, *Path(path).parts[1:])
            place.parent.mkdir(parents=True, exist_ok=True)
            moved = text.replace("from gateway.rounds", f"from {name}.rounds")
            moved = moved.replace("from outrider.estimates", f"from {name}.estimates")
            place.write_text(moved.replace(*shared), encoding="utf-8")
        sys.path.insert(0, folder)
        try:
            return import_module(f"{name}.rounds.planner"), import_module(f"{name}.rounds.policy")
        finally:
            sys.path.remove(folder)


@cache
def modules_of(commit: str) -> tuple[ModuleType, ModuleType]:
    """The planner's and the policy's modules of a commit."""
    return import_files(files_of(commit), f"former_{commit.encode().hex()}")


class FormerPlanner:
    """A planner to which a drafter is a name, and that lists guesses by their place."""

    def __init__(self, planners: ModuleType, policy: object, world: World) -> None:
        """Makes the planner of a module."""
        self._drafters = {law.drafter.place: law.drafter for law in world.drafters}
        remote, hosted = self._drafters.get(Place.REMOTE), self._drafters.get(Place.HOSTED)
        drafting = planners.Drafting(
            remote=None if remote is None else remote.name,
            own="" if hosted is None else hosted.name,
            may_grow_trees=remote is not None and remote.makes is Makes.TREE,
            own_makes_trees=hosted is not None and hosted.makes is Makes.TREE,
            looks=world.looks,
        )
        self._planner = planners.RoundPlanner(policy, None, MAX_LEN, MAX_ROWS, drafting)

    def __enter__(self) -> Planner:
        self._planner.__enter__()
        return self

    def __exit__(self, *reason: object) -> None:
        self._planner.__exit__(*reason)

    def looks_for(self, log: TokenLog) -> float:
        """Everything that a lookup finds."""
        return 0.0

    def plan(
        self,
        log: TokenLog,
        outstanding: int,
        draft: DraftOutlook,
        own: str = "",
        look: Sequence[float] = (),
        *,
        went_on: bool = False,
    ) -> RoundPlan:
        """It knows no branches, after which a target could have gone on."""
        assert not went_on
        plan = self._plan = self._planner.plan(log, outstanding, draft, own, look)
        guesses = [
            GuessRequest(self._drafters[place], count, shape)
            for place, count, shape in (
                (Place.REMOTE, plan.draft_count, plan.shape),
                (Place.HOSTED, plan.own_draft_count, plan.own_shape),
            )
            if count
        ]
        looked = [GuessRequest(LOOKUP, plan.look_count)] if plan.look_count else []
        return RoundPlan((*guesses, *looked), plan.plain_budget)

    def complete(self, plan: RoundPlan, drafted: Proposal, found: Proposal) -> Proposal:
        completed: Proposal = self._planner.complete(self._plan, _named(drafted), _named(found))
        return replace(completed, drafter=found.drafter if found.tree else drafted.drafter)

    def observe(self, committed: Round) -> None:
        verdict, proposal = committed.verdict, committed.proposal
        own = None if verdict.own is None else _named(verdict.own)
        self._planner.observe(replace(committed, proposal=_named(proposal), verdict=replace(verdict, own=own)))


def _named(proposal: Proposal) -> Proposal:
    """The proposal, whose drafter is a name."""
    name: Any = proposal.drafter.name
    return replace(proposal, drafter=name)


def former_simulation(commit: str, world: World) -> Simulation:
    """A world in which guesses are chosen as a commit does."""
    return simulation_with(*modules_of(commit), world)


def simulation_with(planners: ModuleType, policies: ModuleType, world: World) -> Simulation:
    """A world in which a planner's and a policy's modules choose."""
    policy = policies.SpeculationPolicy()
    has_ids = "drafters" in planners.Drafting.__dataclass_fields__
    if not hasattr(planners.RoundPlanner, "looks_for"):
        # Until then all rounds were searched.
        planners.RoundPlanner.looks_for = FormerPlanner.looks_for

    def new_planner() -> Planner:
        if not has_ids:
            return FormerPlanner(planners, policy, world)
        drafting = planners.Drafting(world.may_guess)
        planner: Planner = planners.RoundPlanner(policy, None, MAX_LEN, MAX_ROWS, drafting)
        return planner

    simulation = Simulation(world, 0, new_planner)
    if has_ids and hasattr(policy.costs, "begin"):
        policy.costs.begin(*simulation.measured)
    return simulation
