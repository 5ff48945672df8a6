"""Kinds of simulated texts: how often guesses about them are right, and what a lookup finds in them."""

import random
from dataclasses import dataclass

from gateway.rounds.round import LOOKUP, Round

MAX_ROWS = 32
"""Most guesses of a round."""


@dataclass(frozen=True, slots=True)
class TextKind:
    """A kind of text: how often guesses about it are right."""

    share: float = 1.0
    """Share of the requests that it is of."""
    rates: tuple[float, ...] = (0.7,)
    """Rates at which each drafter's guesses are accepted, given those before; the first guess is `first` times that."""
    first: float = 1.0
    copies: float = 0.0
    """Chance of each token to begin a passage that repeats what was said before."""
    copied: float = 0.9
    """Chance of each token of such a passage to be followed by another one of it."""
    found: float = 0.0
    """Chance that a lookup finds something where nothing is repeated."""
    right: float = 0.3
    """Chance that such a guess is right."""
    belief: float = 1.0
    """What lookups and trees promise, over what they keep."""
    others: tuple[float, ...] = (0.4, 0.2, 0.1)
    """Share of its second choice, its third and so on among the tokens that a drafter's first one is not."""
    spread: float = 0.0
    """How much less a drafter errs in half of all rounds, and more in the others, which its trees know."""


class Passages:
    """Passages of one text that repeat what was said before, as far as a lookup has followed them."""

    def __init__(self, kind: TextKind, dice: random.Random) -> None:
        self.chance = 0.0
        """Chance that a guess which a lookup found last is right."""
        self._kind, self._dice = kind, dice
        self._num_copied = 0
        """Tokens of the passage so far; 0 outside of one."""

    def find(self, room: int) -> tuple[float, ...]:
        """Values of the rows that a lookup finds now, at most as many as there is room for."""
        kind = self._kind
        if self._num_copied > 2:
            self.chance, num_rows = kind.copied, MAX_ROWS
        elif self._dice.random() < kind.found:
            self.chance, num_rows = kind.right, 4
        else:
            return ()
        value = min(self.chance * kind.belief, 0.98)
        return tuple(value**depth for depth in range(1, min(num_rows, room) + 1))

    def follow(self, committed: Round) -> None:
        """Goes on by a round's tokens, which may repeat something."""
        is_look = committed.proposal.drafter == LOOKUP and committed.verdict.evaluated_count > 0
        if is_look and self._num_copied > 2 and committed.accepted_count < committed.draft_count:
            self._num_copied = 0
            return
        for _ in committed.token_ids:
            if self._num_copied and (is_look or self._dice.random() < self._kind.copied):
                self._num_copied += 1
            else:
                self._num_copied = int(self._dice.random() < self._kind.copies)
