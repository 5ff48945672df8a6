"""What guesses: one interface for every drafter of a process. Read this first to add one.

A drafter has a part for each session, which makes one proposal at a time, after the tokens that the session holds. A
proposal depends on these tokens, on how much is asked for, on noise and on sampling alone, never on what was computed
before. All of it runs on the device thread. A proposal that a target's own drafter makes is decided within the step
that it was made for, so that nothing undecided exists between two messages.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import structlog

from outrider.engine.runner import ModelRunner
from outrider.engine.session import Session
from outrider.estimates.timing import ComputeTimes
from outrider.grammar import Grammar
from outrider.parameters import Rule, SessionSpec
from outrider.token_tree import EMPTY, TokenTree, TreeShape

log = structlog.get_logger()


class GuessLimits(NamedTuple):
    """Most guesses that a proposal may have: a chain, or the rows of a tree of a shape, none deeper than max_depth."""

    draft_count: int = 0
    shape: TreeShape | None = None
    max_depth: int = 0

    def within(self, room: int) -> "GuessLimits":
        """Limits for a session with room for so many more tokens; less than 0 is none.

        A chain has no more guesses than that. A tree may have as many rows as are wanted, and no deeper ones.
        """
        room = max(0, room)
        is_tree = self.shape is not None and room > 0
        return GuessLimits(self.draft_count if is_tree else min(self.draft_count, room), self.shape, room)


NO_GUESSES = GuessLimits()


class DrafterProposal(NamedTuple):
    """Guesses of a drafter, their cost, and how many committed tokens had to be read first."""

    tree: TokenTree
    times: ComputeTimes
    caught_up_count: int


NO_PROPOSAL = DrafterProposal(EMPTY, ComputeTimes(), 0)


class DrafterSession(ABC):
    """A session's part in a drafter."""

    def __init__(self) -> None:
        self.proposal: DrafterProposal | None = NO_PROPOSAL
        """The one that was asked for last; None while it is on its way."""
        self.grammar: Grammar | None = None
        """What its guesses have to follow, None for nothing; apart from what decides about the answer."""

    @property
    def is_reading(self) -> bool:
        """Whether many tokens are to be read first, for which other sessions need not wait."""
        return False

    @property
    def reads_features(self) -> bool:
        """Whether it needs the target's features of all committed tokens but the last."""
        return False

    @property
    def num_rows_beside(self) -> int:
        """Number of rows that the target's next forward computes for it beside the proposal."""
        return 0

    @abstractmethod
    def propose(self, session: Session, limits: GuessLimits) -> None:
        """Begins a proposal after the tokens of the target's session, or just reads them where the limit is 0.

        Whatever was begun before ends. What reads features must find all but the last token cached.
        """

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Takes back the committed tokens from a length on; what was begun ends."""

    def free(self) -> None:
        """Gives back what is kept; what was begun ends."""
        self.proposal = NO_PROPOSAL


SessionT = TypeVar("SessionT", bound=DrafterSession)


class Drafter(Protocol[SessionT]):
    """Makes proposals for all sessions of a process."""

    name: str
    """Name by which requests ask for it."""
    rules: frozenset[Rule]
    """Rules that its proposals may be tested by."""
    makes_trees: bool
    """Whether a shape may be asked for."""

    @property
    def runner(self) -> ModelRunner | None:
        """Runner of its model, where it has one of its own."""

    def open(self, spec: SessionSpec, salt: bytes | None) -> SessionT:
        """A session's part; with a salt it shares what is read of equal tokens with those of the same salt."""

    def advance(self, sessions: Sequence[SessionT]) -> None:
        """Makes one step of all sessions, none of which has its proposal."""


class HostedSession(NamedTuple):
    """A session's part in a drafter, with that drafter. A failure costs the guesses and nothing else."""

    drafter: Drafter[Any]
    part: DrafterSession

    @classmethod
    def of(cls, drafter: Drafter[Any], spec: SessionSpec, grammar: Grammar | None, salt: bytes | None) -> Self:
        part: DrafterSession = drafter.open(spec, salt)
        # What is committed is decided by the follower of the target's own.
        part.grammar = None if grammar is None else grammar.session()
        return cls(drafter, part)

    def propose(self, session: Session, limits: GuessLimits) -> None:
        """Begins a proposal; one that fails is empty."""
        try:
            self.part.propose(session, limits)
        except Exception:
            # Guesses are worth no request, and what a bug says is for the log.
            log.exception("drafting failed", drafter=self.drafter.name, num_sessions=1)
            self.part.free()


def advance(drafter: Drafter[Any], parts: Sequence[DrafterSession]) -> None:
    """Makes one step of all parts without a proposal; those of a step that fails have an empty one."""
    busy = [part for part in parts if part.proposal is None]
    if not busy:
        return
    try:
        drafter.advance(busy)
    except Exception:
        log.exception("drafting failed", drafter=drafter.name, num_sessions=len(busy))
        for part in busy:
            part.free()


def guess(sessions: Sequence[HostedSession], awaited: Sequence[DrafterSession]) -> None:
    """Lets drafters go on until all awaited proposals are there, but for those that have much to read first.

    Such a one gets one step of its drafter, with as many rows as that reads at a time, and then its turn again; so
    does a session that is not awaited.
    """
    drafters = {each.drafter.name: each.drafter for each in sessions}
    while True:
        for name, drafter in drafters.items():
            advance(drafter, [each.part for each in sessions if each.drafter.name == name])
        if not any(part.proposal is None and not part.is_reading for part in awaited):
            return
