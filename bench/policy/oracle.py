"""The best of fixed settings in a world: what a policy is compared with that knows all from the first moment."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from bench.policy.devices import Planner, Simulation, World
from gateway.rounds.planner import DraftOutlook, RoundPlan
from gateway.rounds.round import LOOKUP, DrafterId, GuessRequest, Makes, Place, Proposal, Round, TokenLog
from gateway.rounds.tuning import TUNING
from outrider.token_tree import TreeShape

COUNTS, TREES = (1, 2, 3, 4, 6, 8), ((4, 2), (8, 3), (16, 4), (32, 6))
FLOORS = (0.02, 0.1, 0.25, 0.5, 0.75)


@dataclass(frozen=True, slots=True)
class FixedChoice:
    """A fixed choice: guesses of a drafter a round, and rows of a lookup that promise more than a floor.

    With a depth guesses are the rows of a tree, so deep at most; with branches the draft runs ahead.
    """

    drafter: DrafterId | None = None
    draft_count: int = 0
    floor: float | None = None
    depth: int = 0
    branches: int = 0
    plain_on_miss: bool = False

    def __str__(self) -> str:
        named = "plain" if self.drafter is None else f"{self.drafter.name or 'draft'} {self.draft_count}"
        named += f" in trees of {self.depth}" if self.depth else ""
        named += f" with {self.branches} branches" if self.branches else ""
        return named if self.floor is None else f"{named}, lookup above {self.floor:g}"


class FixedPlanner:
    """Plans every round as a setting says."""

    def __init__(self, setting: Callable[[], FixedChoice]) -> None:
        """Takes what says the setting of the moment."""
        self._setting = setting

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *_exit: object) -> None:
        """Leaves everything as it is: no session is counted."""

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
        setting, is_first = self._setting(), len(log) == log.prompt_len
        if setting.floor is not None and not is_first and not went_on:
            rows = sum(value > setting.floor for value in look)
            if rows:
                return RoundPlan((GuessRequest(LOOKUP, rows),))
        drafter, number = setting.drafter, setting.draft_count
        if drafter is None or is_first:
            return RoundPlan((), TUNING.plain_budget if 2 * outstanding <= TUNING.plain_budget else 0)
        asked = GuessRequest(drafter, number, TreeShape(max_depth=setting.depth) if setting.depth else None)
        if setting.branches:
            ahead = replace(asked, branch_count=setting.branches, plain_on_miss=setting.plain_on_miss, went_on=went_on)
            return RoundPlan() if outstanding else RoundPlan((ahead,))
        if drafter.place is Place.HOSTED:
            return RoundPlan((asked,), TUNING.hosted_budget if 2 * outstanding <= TUNING.hosted_budget else 0)
        return RoundPlan() if outstanding else RoundPlan((asked,))

    def complete(self, plan: RoundPlan, drafted: Proposal, found: Proposal) -> Proposal:
        """All that was guessed."""
        return found if found.tree else drafted

    def observe(self, committed: Round) -> None:
        """Learns nothing."""


def speed(world: World, setting: FixedChoice, num_sessions: int, seconds: float, seed: int = 0) -> float:
    """Tokens a second of a setting with so many sessions, after a fifth of the time."""
    simulation = Simulation(world, seed, lambda: FixedPlanner(lambda: setting))
    simulation.load(num_sessions)
    simulation.run(seconds / 5)
    return simulation.run(seconds)


def best(world: World, num_sessions: int, seconds: float) -> FixedChoice:
    """The fastest setting under a load that lasts."""
    plain = FixedChoice()
    found = {plain: speed(world, plain, num_sessions, seconds)}

    def look(settings: Sequence[FixedChoice]) -> FixedChoice:
        for setting in settings:
            if setting not in found:
                found[setting] = speed(world, setting, num_sessions, seconds)
        return max(settings, key=found.__getitem__)

    chains = [FixedChoice(law.drafter, number) for law, number in product(world.drafters, COUNTS)]
    trees = [
        FixedChoice(law.drafter, rows, depth=depth)
        for law, (rows, depth) in product(world.drafters, TREES)
        if law.drafter.makes is Makes.TREE
    ]
    ahead = [
        replace(each, branches=branches, plain_on_miss=num_sessions > 1)
        for each, branches in product(chains, (2, 4, 8, 16, 32))
        if branches <= world.branches and each.drafter is not None and each.drafter.place is Place.REMOTE
    ]
    chosen = look([plain, *chains, *trees, *ahead])
    if world.looks and any(kind.copies or kind.found for kind in world.kinds):
        for base in {plain, chosen}:
            look([replace(base, floor=floor) for floor in FLOORS])
    return max(found, key=found.__getitem__)
