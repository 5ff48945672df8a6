"""Guesses for what comes after a verification, made while it is under way: a chain, then branches for its outcomes.

The answer to a request is the chain, as without branches. The task then goes on with the branches, in steps over all of
them, until the gateway says what came of the chain. What was computed for that outcome is the next chain, or its
beginning, and stays cached; everything else is dropped.

With noise of its own the draft draws each guess of a branch with the key with which it would draw if it were asked
after the outcome: what is verified next is the same with branches and without. So a branch is the next chain only right
after its outcome, and a guess of the trunk, which may have been tested, is never proposed again. See
docs/decisions/exactness/0050-a-branch-is-the-next-proposal.md. Runs on the device thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from outrider.drafters.model_drafter import Guesser, Step, drawable_scores, log_of
from outrider.drafters.tree_drafter import GrownTask
from outrider.engine.batching import Feed
from outrider.engine.branching import OUTCOME_CHILDREN, Branching
from outrider.engine.growth import ROOT, Child
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draft_distribution import quantise
from outrider.engine.sampling.draw import DrawInput, rows_of
from outrider.errors import OutriderError
from outrider.parameters import DraftDistribution
from outrider.token_tree import Branch, TokenTree

LEAST_RATE = 1e-3
"""In the place of the chance of a guess that ends the request, after which there is no outcome."""


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

    def can_go_on_from(self, number: int) -> bool:
        """Whether what was computed after a node holds where its token is the last one that was committed."""
        return True

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


@dataclass(slots=True, eq=False, kw_only=True)
class DrawnBranchingTask(BranchingTask):
    """One whose guesses are drawn with noise of its own, each with the key of the round that it is for."""

    rate: float
    """Chance that a guess is accepted where those before it are."""
    scale: float = field(default=1.0, init=False)

    @property
    def guesser(self) -> Guesser:
        return drawn_each

    def can_go_on_from(self, number: int) -> bool:
        # What was drawn after other nodes was drawn for this round, whose verdict may have been made by it.
        return number in self.growth.roots

    def guess_key(self, number: int) -> int:
        """The key of the guess after a node."""
        return self.draft_key(self.growth.nodes[number].depth, base_depth=self.growth.base_depth(number))

    def take_drawn(self, level: Sequence[tuple[list[Child], Child]]) -> None:
        """Adds what may follow the newest rows and what was drawn after them; see take_level."""
        for number, (children, guess) in zip(self.newest, level, strict=True):
            self.growth.expand(number, children, guess)
        self.go_on()

    def guess(self, token_id: int, prob: float, distribution: DraftDistribution) -> Child:
        """A guess that was drawn. How long a chain is must not depend on that, where the rule tests with uniforms."""
        is_last = token_id in self.ends
        return Child(
            token_id,
            LEAST_RATE if is_last else self.rate,
            is_last and not self.needs_distribution,
            log_of(prob) if self.wants_logprob else 0.0,
            distribution if self.needs_distribution else None,
        )


def drawn_each(
    runner: ModelRunner, tasks: Sequence[DrawnBranchingTask], logits: Tensor, ranges: Sequence[range], top_n: int
) -> list[Step]:
    """What may follow each task's newest rows, logits[ranges[i]], and a guess drawn after each of them."""
    rows = rows_of(logits, ranges)
    owners = [(task, number) for task in tasks for number in task.newest]
    laws = quantise(drawable_scores(runner, rows, [task.draw_input for task in tasks]), top_n, runner.ops)
    keys = [task.guess_key(number) for task, number in owners]
    drawn = laws.draw(torch.from_numpy(np.array(keys, dtype=np.int64)))
    ranked = laws.distributions()
    found = zip(owners, drawn.tolist(), laws.probs(drawn), ranked, strict=True)
    guesses = [task.guess(token_id, prob, law) for (task, _), token_id, prob, law in found]
    if any(task.ranked is not task.spec for task in tasks):
        # At temperature 0 a distribution has one token, and the second best is wanted.
        inputs = [DrawInput(task.draw_input.feed, task.ranked) for task in tasks]
        ranked = quantise(drawable_scores(runner, rows, inputs), OUTCOME_CHILDREN, runner.ops).distributions()
    level = iter(
        (
            [
                Child(token_id, weight / sum(law.weights), token_id in task.ends)
                for token_id, weight in zip(law.token_ids[:OUTCOME_CHILDREN], law.weights, strict=False)
            ],
            guess,
        )
        for (task, _), law, guess in zip(owners, ranked, guesses, strict=True)
    )
    return [partial(task.take_drawn, [next(level) for _ in task.newest]) for task in tasks]


class Left(NamedTuple):
    """What is left of a task's growth when tokens have been committed."""

    growth: Branching
    root: int
    """Node of the last token that was committed."""
    rows: dict[int, int]
    """Rows of the session's tree by the nodes under it, and its own, 0."""

    @property
    def guess_count(self) -> int:
        """How many guesses were handed on for this outcome."""
        return self.growth.guess_count(self.root)

    def growth_for(
        self, trunk_len: int, branch_len: int, max_branches: int, room: int
    ) -> tuple[Branching, dict[int, int]]:
        """A growth that goes on from here, and the rows of its nodes; see Branching."""
        growth, numbers = self.growth.below(self.root, trunk_len, branch_len, max_branches, room)
        return growth, {numbers[number]: row for number, row in self.rows.items() if number in numbers}


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
    root = path[-1] if path else ROOT
    if len(path) < len(token_ids) or ROOT not in computed or not task.can_go_on_from(root):
        session.keep([computed[number] for number in path])
        session.extend(token_ids[len(path) :])
        return None
    under = {root}
    for number, node in enumerate(growth.nodes):
        if node.parent in under:
            under.add(number)
    kept = {number: row for number, row in computed.items() if number in under and number != root}
    session.keep([computed[number] for number in path], tuple(kept.values()))
    return Left(growth, root, {root: 0} | {number: row for row, number in enumerate(kept, start=1)})
