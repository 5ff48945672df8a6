"""Guesses for what comes after a verification, made while it is under way: a chain, then branches for its outcomes.

The answer to a request is the chain, as without branches. The task then goes on with the branches, in steps over all of
them, until the gateway says what came of the chain. What was computed for that outcome is the next chain, or its
beginning, and stays cached; everything else is dropped. Runs on the device thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple, Self

from outrider.drafters.tree_drafter import GrownTask
from outrider.engine.batching import Feed
from outrider.engine.branching import Branching
from outrider.engine.growth import ROOT
from outrider.engine.sampling.draw import DrawInput
from outrider.errors import OutriderError
from outrider.token_tree import Branch, TokenTree


@dataclass(slots=True, eq=False, kw_only=True)
class BranchingTask(GrownTask):
    """A session on its way to a chain of `draft_count` guesses, and then to branches."""

    growth: Branching
    computed: dict[int, int]
    """Rows that the session's tree has of an earlier task, by node; none at first."""
    on_found: Callable[[Self, TokenTree | list[Branch]], None]
    """Called with the chain, and later with the branches; before `on_done`."""
    has_chain: bool = False
    """Whether the chain was handed on."""
    has_branches: bool = False
    """Whether the branches were."""

    @property
    def proposal(self) -> TokenTree:
        """The chain, which is no tree of chosen rows: without their values."""
        return replace(self.growth.tree(with_logprobs=self.wants_logprob), values=())

    def begin(self) -> None:
        """Takes what was computed before, which may be all that is wanted."""
        if self.computed:
            self.rows = self.computed
            self.draw_input = DrawInput(Feed(self.session, self.session.tree), self.spec)
            self.go_on()

    def go_on(self) -> None:
        if self.growth.is_trunk_done:
            self._hand_on()
        if self.growth.are_branches_done and not self.has_branches:
            self.has_branches = True
            self.on_found(self, self.growth.branches(with_logprobs=self.wants_logprob))
        GrownTask.go_on(self)

    def finish(self) -> None:
        self._hand_on()
        GrownTask.finish(self)

    def fail(self, error: OutriderError) -> None:
        if self.has_chain:
            # Without the branches the session is what it was without run-ahead.
            GrownTask.finish(self)
        else:
            GrownTask.fail(self, error)

    def _hand_on(self) -> None:
        if not self.has_chain:
            self.has_chain = True
            self.on_found(self, self.proposal)


class Left(NamedTuple):
    """What is left of a task's growth when tokens have been committed."""

    growth: Branching
    root: int
    """Node of the last token that was committed."""
    rows: dict[int, int]
    """Rows of the session's tree by the nodes under it, and its own, 0."""

    def growth_for(
        self, trunk_len: int, branch_len: int, max_branches: int, room: int
    ) -> tuple[Branching, dict[int, int]]:
        """A growth that goes on from here, and the rows of its nodes; see Branching."""
        growth, numbers = self.growth.below(self.root, trunk_len, branch_len, max_branches, room)
        return growth, {numbers[number]: row for number, row in self.rows.items()}


def settle(task: BranchingTask, token_ids: Sequence[int]) -> Left | None:
    """Commits tokens to the session of a task that has ended, with all that was computed after them.

    None where the last of them was not computed: then nothing is known after it.
    """
    growth, session = task.growth, task.session
    has_rows = session.cached_len == len(session)
    computed = {
        number: row
        for number, row in task.rows.items()
        if has_rows and growth.is_computed(number) and row <= len(session.tree)
    }
    path = list(takewhile(computed.__contains__, growth.follow(token_ids)))
    if len(path) < len(token_ids) or ROOT not in computed:
        session.keep([computed[number] for number in path])
        session.extend(token_ids[len(path) :])
        return None
    root = path[-1] if path else ROOT
    under = {root}
    for number, node in enumerate(growth.nodes):
        if node.parent in under:
            under.add(number)
    kept = {number: row for number, row in computed.items() if number in under and number != root}
    session.keep([computed[number] for number in path], tuple(kept.values()))
    return Left(growth, root, {root: 0} | {number: row for row, number in enumerate(kept, start=1)})
