"""Acceptance of guesses, learnt from those that were tested: the learner of all who choose how much to guess. Pure.

What is counted is the same everywhere, guesses that were tested and those of them that were accepted, recent ones more
than others. It is kept by what distinguishes guesses: by depth for chains, by what a draft promises for trees,
and by what a guess stands on for lookups.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from outrider.token_tree import TokenTree

MEMORY = 0.98  # of what was counted, is left after a further test: texts change within some tens of rounds
MAX_DRAFT_COUNT = 8  # guesses of a chain, and depth of a tree: the ninth is hardly ever reached
MAX_TREE_ROWS = 32  # rows of a tree: more are hardly ever worth verifying
FIRST_RATE, FIRST_WEIGHT = 0.7, 4.0  # of a guess, before any was tested, and its weight in tested tokens
POOL_MEMORY = 0.995  # of what all sessions together have tested: one text is not like the next, and all should count
POOL_WEIGHT = 16.0  # of the pool's rate in that of a session, in tested tokens
HIGHEST = 0.999  # rate of acceptance: no guess is certain, however often it was right
MAX_PROMISES = 100.0  # trees whose values are averaged, after which old ones are forgotten


class GuessTally:
    """Tested guesses of one kind, and those of them that were accepted."""

    __slots__ = ("_memory", "accepted", "tested")

    def __init__(self, memory: float = MEMORY, tested: float = 0.0, accepted: float = 0.0) -> None:
        """Begins with so many, which are forgotten like others."""
        self._memory, self.tested, self.accepted = memory, tested, accepted

    def add(self, tested: float, accepted: float, num_tests: int = 1) -> None:
        """Adds what so many tests have shown, each of which leaves `memory` of what was before it."""
        kept = self._memory**num_tests
        self.tested = kept * self.tested + tested
        self.accepted = kept * self.accepted + accepted

    def fade(self, tested: float) -> None:
        """Forgets all but so many tests, with the same share of them accepted."""
        kept = min(1.0, tested / max(self.tested, 1e-9))
        self.tested, self.accepted = kept * self.tested, kept * self.accepted

    def share(self, prior: float = 0.0, weight: float = 0.0) -> float:
        """Share that is accepted, drawn towards a prior that weighs so many tests and is never forgotten."""
        return (self.accepted + weight * prior) / (self.tested + weight)


class AcceptanceRates:
    """Acceptance of the guess of each depth, recent rounds first; drawn towards a prior while little is known.

    The prior is that of another estimate, or else each depth is like the one before it.
    """

    def __init__(self, prior: "AcceptanceRates | None" = None) -> None:
        self._prior = prior
        memory = POOL_MEMORY if prior is None else MEMORY
        self._depths = [GuessTally(memory) for _ in range(MAX_DRAFT_COUNT)]
        self._num_changes = 0
        # What was asked for last, which is asked for more often than it changes, and the version that it is of.
        self._rates: list[float] = []
        self._tokens: list[float] = []
        self._known_version = -1

    @property
    def version(self) -> int:
        """Number that grows with whatever is learnt that these rates depend on."""
        return self._num_changes + (0 if self._prior is None else self._prior.version)

    def observe(self, accepted_count: int, evaluated_count: int) -> None:
        """Adds a chain of which so many guesses were tested, and so many of these accepted."""
        self._num_changes += 1
        for depth, tally in enumerate(self._depths[:evaluated_count]):
            tally.add(1, depth < accepted_count)

    def renew(self) -> None:
        """Marks what was learnt as old: the next tests weigh as much as all before them."""
        self._num_changes += 1
        for tally in self._depths:
            tally.fade(FIRST_WEIGHT)

    @property
    def rates(self) -> Sequence[float]:
        """The rate at each depth, given that all guesses before it are accepted."""
        self._renew_known()
        return self._rates

    def _renew_known(self) -> None:
        version = self.version
        if version == self._known_version:
            return
        priors = None if self._prior is None else self._prior.rates
        rates, last = [], FIRST_RATE
        for depth, tally in enumerate(self._depths):
            prior, weight = (last, FIRST_WEIGHT) if priors is None else (priors[depth], POOL_WEIGHT)
            last = min(tally.share(prior, weight), HIGHEST)
            rates.append(last)
        tokens, reached = [1.0], 1.0
        for rate in rates:
            reached *= rate
            tokens.append(tokens[-1] + reached)
        self._rates, self._tokens, self._known_version = rates, tokens, version

    @property
    def num_tested(self) -> float:
        """Tests of a first guess that are remembered."""
        return self._depths[0].tested

    @property
    def tested_depth(self) -> int:
        """Depth of the deepest guess that was ever tested."""
        return max((depth for depth, each in enumerate(self._depths, start=1) if each.tested), default=0)

    def hoped(self) -> list[float]:
        """Tokens as in `tokens`, if each rate were a standard error higher."""
        tokens, reached = [1.0], 1.0
        for rate, tally in zip(self.rates, self._depths, strict=True):
            reached *= min(rate + math.sqrt(rate * (1 - rate) / (tally.tested + FIRST_WEIGHT)), HIGHEST)
            tokens.append(tokens[-1] + reached)
        return tokens

    @property
    def mean(self) -> float:
        """Share of the guesses of all depths that are accepted."""
        tested, accepted = sum(each.tested for each in self._depths), sum(each.accepted for each in self._depths)
        return min(GuessTally(MEMORY, tested, accepted).share(FIRST_RATE, FIRST_WEIGHT), HIGHEST)

    def tokens(self) -> Sequence[float]:
        """Tokens that a round with K guesses is expected to commit, for K in [0, MAX_DRAFT_COUNT]."""
        self._renew_known()
        return self._tokens


def _first_sums(most_depth: int) -> list[float]:
    """Sums of the values of the best rows, by their number, where of all guesses at a place the first is right at
    FIRST_RATE, the second at that rate where the first is not, and so on.
    """
    missed = 1 - FIRST_RATE
    # As many rows lie so deep, with ranks that add up to so much.
    values = [
        FIRST_RATE**depth * missed**ranks
        for depth in range(1, most_depth + 1)
        for ranks in range(MAX_DRAFT_COUNT)
        for _ in range(math.comb(depth + ranks - 1, ranks))
    ]
    best = sorted(values, reverse=True)[:MAX_TREE_ROWS]
    return [*accumulate(best + [0.0] * (MAX_TREE_ROWS - len(best)), initial=0.0)]


FIRST_SUMS = [_first_sums(depth) for depth in range(MAX_DRAFT_COUNT + 1)]
"""Sums of values of trees before any was seen, by how deep they may lie, and then by their rows."""


class TreeGains:
    """Gains of the best rows of trees, by their number and how deep they may lie: the values that a drafter promises,
    corrected by how many it keeps of them.
    """

    def __init__(self) -> None:
        # By depth and number of rows the mean sum of values.
        self._sums = [[*each] for each in FIRST_SUMS]
        self._weights = [[FIRST_WEIGHT] * (MAX_TREE_ROWS + 1) for _ in self._sums]
        # Values that were promised, and rows that were kept.
        self._kept = GuessTally(POOL_MEMORY, FIRST_WEIGHT * FIRST_RATE, FIRST_WEIGHT * FIRST_RATE)
        self.num_promises = 0

    def promise(self, tree: TokenTree, count: int, max_depth: int) -> None:
        """Adds a proposal with values, of which so many rows were wanted, so deep at most.

        Nothing more was to be had within these limits. Beyond them it is as much more as it was before, in proportion:
        what was promised of another text would look better than what this one has within.
        """
        self.num_promises += 1
        count, max_depth = min(count, MAX_TREE_ROWS), min(max_depth, MAX_DRAFT_COUNT)
        ranked = sorted(zip(tree.values, tree.depths[1:], strict=True), reverse=True)
        before = [*self._sums[max_depth]]
        for depth in range(1, max_depth + 1):
            sums, weights, total = self._sums[depth], self._weights[depth], 0.0
            largest = sums[count]
            values = [value for value, own_depth in ranked if own_depth <= depth]
            for number in range(1, count + 1):
                total += values[number - 1] if number <= len(values) else 0.0
                weights[number] = min(weights[number] + 1, MAX_PROMISES)
                sums[number] += (total - sums[number]) / weights[number]
            change = sums[count] / largest
            sums[count + 1 :] = [max(change * each, sums[count]) for each in sums[count + 1 :]]
        within = self._sums[max_depth]
        changes = [now / was if was else 1.0 for now, was in zip(within, before, strict=True)]
        for deeper in self._sums[max_depth + 1 :]:
            deeper[:] = map(max, map(mul, changes, deeper), within)

    def observe(self, values: Sequence[float], accepted_count: int) -> None:
        """Adds a tree that was verified, and how many of its rows were kept."""
        self._kept.add(sum(values), accepted_count)

    @property
    def correction(self) -> float:
        """Share of what is promised that is kept."""
        return self._kept.share()

    def at(self, count: int, depth: int = MAX_DRAFT_COUNT) -> float:
        """Tokens that a round with the best `count` rows up to a depth is expected to commit."""
        return 1.0 + self.correction * self._sums[depth][count]
