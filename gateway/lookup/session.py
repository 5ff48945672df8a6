"""What one request looks up."""

import asyncio
from array import array
from collections.abc import Sequence

from gateway.lookup.chains import Chains
from gateway.lookup.rates import Kind, LookupRates
from gateway.lookup.votes import Ground, Look, Vote, Voter

SLICE = 2048  # tokens that are read at a time


class LookupSession:
    """Guesses for one request from its own text. It learns from committed tokens alone, never from guesses."""

    def __init__(self, prompt: Sequence[int], *, rates: LookupRates) -> None:
        """Reads nothing yet: see `read`. The rates are shared by all requests."""
        self._rates = rates
        self._unread = array("i", prompt)
        self._own = Chains(2 * len(prompt))

    async def read(self) -> None:
        """Reads the prompt in slices, between which others have their turn; without it the first look reads it."""
        while self._unread:
            self._read(SLICE)
            await asyncio.sleep(0)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Takes tokens that were committed, in order."""
        if self._unread:
            self._unread.extend(token_ids)
        else:
            self._own.extend(token_ids)

    def look(self, max_rows: int, max_depth: int, *, chain: bool = False) -> Look:
        """The best guesses behind the committed tokens, at most so many; empty where nothing matches.

        As a chain it is the best single path.
        """
        self._read(len(self._unread))
        voters = [Voter(Kind.OWN, match) for match in self._own.repeats()]
        vote = Vote(self._rates.means, self._own.tokens[-1])
        return vote.grow(voters, max_rows, max_depth, chain=chain)

    def observe(self, look: Look, token_ids: Sequence[int]) -> None:
        """Learns which guesses were right, from the tokens that were committed where it was looked."""
        if not look.grounds:
            return
        rows = look.tree.follow(token_ids)
        children: dict[int, list[Ground]] = {}
        for ground, parent in zip(look.grounds, look.tree.parents, strict=True):
            children.setdefault(parent, []).append(ground)
        # Behind the last row that was right none was, unless nothing is known of what follows.
        for row, accepted in zip((0, *rows), (*rows, 0)[: len(token_ids)], strict=False):
            shares: dict[int, float] = {}
            for number, share in children.get(row, ()):
                shares[number] = shares.get(number, 0.0) + share
            said = look.grounds[accepted - 1].number if accepted else None
            # Who votes only about what others left is tested only where these were wrong.
            for number in sorted(shares, key=self._rates.means.__getitem__, reverse=True):
                self._rates.observe(number, shares[number], accepted=number == said)
                if number == said:
                    break

    def close(self) -> None:
        """Ends the request."""

    def _read(self, count: int) -> None:
        if count:
            self._own.extend(self._unread[:count])
            del self._unread[:count]
