"""What a lookup brings to the rounds of one request: guesses in the form of proposals."""

from collections.abc import Sequence
from typing import Self

from gateway.lookup.session import LookupSession
from gateway.lookup.votes import NOTHING, Look
from gateway.rounds.merging import one_hot
from gateway.rounds.round import LOOKUP, Proposal
from gateway.rounds.round import NOTHING as NO_GUESSES
from outrider.parameters import Rule


class LookupGuesses:
    """The lookup of one request; without a session it never finds anything."""

    def __init__(self, session: LookupSession | None = None, rule: Rule = Rule.MATCH, max_rows: int = 0) -> None:
        """Proposals fit the rule, and have at most max_rows rows."""
        self._session = session
        self._rule = rule
        self._max_rows = max_rows
        self._look: Look = NOTHING

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exit: object) -> None:
        if self._session is not None:
            self._session.close()

    def look(self, room: int) -> Look:
        """What is found behind the committed tokens, at most `room` deep; it stands until the next commit."""
        if self._session is not None and room:
            # Siblings under a rule that tests each with a uniform are worth less than the same rows in a chain.
            self._look = self._session.look(self._max_rows, room, chain=self._rule.needs_distributions)
        return self._look

    def proposal(self, count: int) -> Proposal:
        """The best `count` rows of what was found."""
        if not count:
            return NO_GUESSES
        look = self._look.cut(count)
        tree = one_hot(look.tree) if self._rule.needs_distributions else look.tree
        return Proposal(tree, drafter=LOOKUP, sources=look.sources)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Learns from committed tokens, whether or not what was found had been proposed."""
        if self._session is not None:
            self._session.observe(self._look, token_ids)
            self._session.extend(token_ids)
            self._look = NOTHING
