"""Drafters in the target's process that need no model: one is always right, one never, one says anything."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.drafters.drafter import NO_PROPOSAL, DrafterProposal, DrafterSession, GuessLimits
from outrider.engine.session import Session
from outrider.estimates.timing import ComputeTimes
from outrider.parameters import DraftDistribution, Rule, SessionSpec
from outrider.token_tree import TokenTree

Guesses = Callable[[SessionSpec, Sequence[int], int], Sequence[int]]
"""Guesses for a session after its tokens, so many."""


@dataclass(eq=False)
class ToyDraft(DrafterSession):
    """A session, whose proposal needs `steps` steps; `begun` are the lengths after which it was asked for guesses."""

    guesses: Guesses
    spec: SessionSpec
    steps: int
    begun: list[int] = field(default_factory=list)
    freed: int = 0
    left: int = 0
    tree: TokenTree = field(default_factory=TokenTree)

    def __post_init__(self) -> None:
        DrafterSession.__init__(self)

    @property
    def is_reading(self) -> bool:
        return self.left > 3

    def propose(self, session: Session, limits: GuessLimits) -> None:
        draft_count = limits.draft_count
        token_ids = self.guesses(self.spec, tuple(session.token_ids), draft_count) if draft_count else ()
        rule = self.spec.acceptance.rule
        distributions = [DraftDistribution((token_id,), (1,)) for token_id in token_ids]
        self.tree = TokenTree.chain(token_ids, distributions if rule.needs_distributions else ())
        if draft_count:
            self.begun.append(draft_count)
        self.proposal, self.left = None, self.steps

    def truncate(self, length: int) -> None:
        assert length >= 1
        self.proposal = NO_PROPOSAL

    def free(self) -> None:
        self.freed += 1
        self.proposal = NO_PROPOSAL


class ToyDrafter:
    """Keeps what it has opened."""

    name = "toy"
    rules = frozenset(Rule)
    makes_trees = False
    runner = None

    def __init__(self, guesses: Guesses, steps: int = 1) -> None:
        self.guesses = guesses
        self.steps = steps
        self.drafts: list[ToyDraft] = []

    def open(self, spec: SessionSpec, salt: bytes | None) -> ToyDraft:
        self.drafts.append(ToyDraft(self.guesses, spec, self.steps))
        return self.drafts[-1]

    def advance(self, drafts: Sequence[ToyDraft]) -> None:
        for draft in drafts:
            draft.left -= 1
            if draft.left <= 0:
                draft.proposal = DrafterProposal(draft.tree, ComputeTimes(1, 2, 3, 4), 5)


def oracle(tokens: Sequence[int]) -> Guesses:
    """Knows what plain decoding says."""
    return lambda spec, token_ids, count: tokens[len(token_ids) : len(token_ids) + count]


def adversary(tokens: Sequence[int], vocabulary_size: int) -> Guesses:
    """Never says what plain decoding says."""
    return lambda spec, token_ids, count: [
        (token_id + 1) % vocabulary_size for token_id in tokens[len(token_ids) : len(token_ids) + count]
    ]


def dice(vocabulary_size: int) -> Guesses:
    """Says anything, the same after the same tokens."""
    return lambda spec, token_ids, count: random.Random(repr(token_ids)).choices(range(vocabulary_size), k=count)
