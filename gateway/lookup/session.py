"""Lookups of one request."""

import asyncio
from array import array
from collections.abc import Sequence

from gateway.lookup.chains import Chains, Context
from gateway.lookup.datastore.reader import Datastore
from gateway.lookup.memory import TenantMemory
from gateway.lookup.prediction import PredictionCursor
from gateway.lookup.rates import Kind, LookupRates
from gateway.lookup.votes import Ground, Look, Vote, Voter

SLICE = 2048  # tokens that are read at a time


class LookupSession:
    """Guesses for one request from its own text, its prediction, its tenant's memory and a datastore.

    It learns from committed tokens alone, never from guesses.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        prediction: Sequence[int] = (),
        memory: TenantMemory | None = None,
        datastore: Datastore | None = None,
        rates: LookupRates,
    ) -> None:
        """Reads nothing of the prompt yet, see `read`. The rates are shared by all requests.

        Without a memory nothing of the request is kept. A prediction is a text that the answer may begin like.
        """
        self._rates = rates
        self._unread = array("i", prompt)
        self._own = Chains(2 * len(prompt))
        self._prediction = PredictionCursor(prediction) if prediction else None
        self._memory = memory
        self._datastore = datastore

    @property
    def is_ready(self) -> bool:
        """Whether the prompt has been read, so that a look takes no time."""
        return not self._unread

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
        if self._prediction is not None:
            self._prediction.follow(token_ids)

    def look(self, max_rows: int, max_depth: int, least: float = 0.0, *, chain: bool = False) -> Look:
        """The best guesses after the committed tokens, at most so many, each worth more than `least`; empty where
        nothing matches.

        As a chain it is the best single path.
        """
        self._read(len(self._unread))
        tokens = self._own.tokens
        context = Context(tokens)
        voters = [Voter(Kind.OWN, *match) for match in self._own.repeats(context)]
        if self._prediction is not None:
            found = self._prediction.find(context)
            voters += [] if found is None else [Voter(Kind.PREDICTION, *found)]
        if self._memory is not None:
            voters += [Voter(Kind.TENANT, *match) for match in self._memory.matches(context)]
        table = None
        if self._datastore is not None:
            corpus, table = self._datastore.tokens, self._datastore.tables
            voters += [Voter(Kind.DATASTORE, corpus, place, length) for place, length in self._datastore.find(tokens)]
        vote = Vote(self._rates.means, tokens[-1] if tokens else -1, table)
        return vote.grow(voters, max_rows, max_depth, least, chain=chain)

    def observe(self, look: Look, token_ids: Sequence[int]) -> None:
        """Learns which guesses were right, from the tokens that were committed where it was looked."""
        if not look.grounds:
            return
        rows = look.tree.follow(token_ids)
        children: dict[int, list[Ground]] = {}
        for ground, parent in zip(look.grounds, look.tree.parents, strict=True):
            children.setdefault(parent, []).append(ground)
        # After the last row that was right none was, unless nothing is known of what follows.
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
        """The request has ended: its tokens go into the memory, if all were read. A second time does nothing."""
        if self._memory is not None and self.is_ready:
            self._memory.add(self._own.tokens)
        self._memory = None

    def _read(self, count: int) -> None:
        if count:
            self._own.extend(self._unread[:count])
            del self._unread[:count]
