"""Guesses of a lookup for the rounds of one request, in the form of proposals."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from gateway.lookup.datastore.reader import Datastore
from gateway.lookup.memory import Memories
from gateway.lookup.rates import LookupRates
from gateway.lookup.session import LookupSession
from gateway.lookup.votes import NOTHING, Look
from gateway.rounds.merging import one_hot
from gateway.rounds.round import LOOKUP, Proposal
from gateway.rounds.round import NOTHING as NO_GUESSES
from outrider.grammar import Grammar
from outrider.parameters import Rule
from outrider.token_tree import TokenTree

# The source of guesses that a grammar leaves no choice about; one alone saves less than a proposal costs.
GRAMMAR = "grammar"
MIN_FORCED = 2
# What finding it may cost a request, in seconds of the processor, on the loop that all requests share. A look at a
# grammar that a person would write takes a tenth of a millisecond, and at an ambiguous one up to a hundred times that;
# one look alone may be slow by chance, as where memory is cleaned up in its midst.
FREE_LOOK_S = 0.001
MAX_FORCED_S = 0.004


@dataclass(frozen=True, slots=True)
class LookupSources:
    """Sources of a gateway beside the text of a request: memories of tenants, and a datastore; each may be None."""

    memories: Memories | None = None
    datastore: Datastore | None = None

    def session(self, prompt: Sequence[int], prediction: Sequence[int], salt: str) -> LookupSession:
        """Lookups of a request of the tenant with this salt; without memories it learns for itself alone."""
        memory = None if self.memories is None else self.memories.of(salt)
        rates = LookupRates() if memory is None else memory.rates
        return LookupSession(prompt, prediction=prediction, memory=memory, datastore=self.datastore, rates=rates)


class LookupGuesses:
    """The lookup of one request; without a session it never finds anything.

    Its context is that of the request: a long prompt is read meanwhile, and what was said is remembered at the end.
    """

    def __init__(
        self,
        session: LookupSession | None = None,
        rule: Rule = Rule.MATCH,
        max_rows: int = 0,
        grammar: Grammar | None = None,
        clock_s: Callable[[], float] = time.thread_time,
    ) -> None:
        """Proposals fit the rule, and have at most max_rows rows. What a grammar forces comes before what is found,
        until looks at the grammar took 4 ms in all beyond a free millisecond each, by a clock of this thread alone;
        of two looks that follow each other the faster one counts.
        """
        self._session = session
        self._grammar = grammar
        self._forced: Sequence[int] = ()
        self._left_s = MAX_FORCED_S
        self._last_look_s = 0.0
        self._clock_s = clock_s
        self._output: list[int] = []
        self._rule = rule
        self._max_rows = max_rows
        self._look: Look = NOTHING
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._session is not None:
            self._reading = asyncio.create_task(self._session.read(), name="lookup reader")
        return self

    async def __aexit__(self, *_exit: object) -> None:
        if self._reading is not None:
            self._reading.cancel()
        if self._session is not None:
            self._session.close()

    def look(self, room: int, least: float = 0.0) -> Look:
        """Guesses found after the committed tokens, at most `room` deep; they hold until the next commit.

        Rows that are worth `least` or less are left out, and where it is infinite nothing is searched for.
        """
        forced = self._look_for_forced(min(room, self._max_rows))
        if len(forced) >= MIN_FORCED:
            # They have all there is of probability, by the mask that the target draws with.
            tree = TokenTree(tuple(forced), tuple(range(len(forced))), values=(1.0,) * len(forced))
            self._look = Look(tree, (GRAMMAR,) * len(forced))
        elif self._session is not None and self._session.is_ready and room and least < math.inf:
            # Siblings under a rule that tests each with a uniform are worth less than the same rows in a chain.
            is_chain = self._rule.needs_distributions
            self._look = self._session.look(self._max_rows, room, least, chain=is_chain)
        return self._look

    def _look_for_forced(self, room: int) -> Sequence[int]:
        """At most `room` tokens that the grammar leaves no choice about, until finding them has cost too much."""
        if self._grammar is not None and room and len(self._forced) < MIN_FORCED:
            began_s = self._clock_s()
            self._forced = self._grammar.forced(self._output)
            took_s = max(self._clock_s() - began_s - FREE_LOOK_S, 0.0)
            self._left_s -= min(took_s, self._last_look_s)
            self._last_look_s = took_s
            if self._left_s < 0:
                self._grammar = None
        return self._forced[:room]

    def proposal(self, count: int) -> Proposal:
        """The best `count` rows of what was found."""
        if not count:
            return NO_GUESSES
        look = self._look.cut(count)
        tree = one_hot(look.tree) if self._rule.needs_distributions else look.tree
        return Proposal(tree, drafter=LOOKUP, sources=look.sources)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Learns from committed tokens, whether or not what was found had been proposed."""
        self._output += token_ids
        if self._forced:
            # What follows in a forced run is forced too.
            length = len(token_ids)
            self._forced = self._forced[length:] if list(self._forced[:length]) == list(token_ids) else ()
        if self._session is None:
            self._look = NOTHING
        else:
            self._session.observe(self._look, token_ids)
            self._session.extend(token_ids)
            self._look = NOTHING
