"""Estimates learnt from rounds: averages that begin safely, costs by rows and by load, acceptance by depth. Pure.

Estimates move, and no outlier rules them, not even a first one.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import cache
from statistics import median

from outrider.token_tree import TokenTree

NUM_SEEDS = 3  # samples of which the median begins an estimate
OUTLIER = 4.0  # a sample counts as so many times what was expected at most
MAX_DRAFT_COUNT = 8  # guesses of a chain
MAX_TREE_ROWS = 32
FIRST_RATE, FIRST_WEIGHT = 0.7, 4.0  # of a guess, before any was tested, and its weight in tested tokens
POOL_WEIGHT = 16.0  # of the pool's rate in that of a session, in tested tokens
SLOPE_WEIGHT = 0.5  # of what is believed of the cost of a row before there are two entries, in squared rows
DRIFT = 0.02  # how much of a sample's surprise about one number of rows is believed of all others
MEMORY_ROUNDS = 1000  # of each session, after which half of what was measured is forgotten
TRUST_ROUNDS = 4  # of each session, after which half of what was measured is believed
EXACT_ROWS = 32  # larger numbers of rows share an entry with their neighbours


class Average:
    """An exponential moving average that begins with the median of its first samples; `known` when it has them."""

    def __init__(self) -> None:
        self.known = False
        self.mean = 0.0
        self._seeds: list[float] | None = []

    def add(self, sample: float) -> None:
        """Adds a sample, at least 0."""
        if self._seeds is None:
            self.mean += 0.1 * (min(sample, OUTLIER * self.mean + 1.0) - self.mean)
            return
        self._seeds.append(sample)
        complete = len(self._seeds) == NUM_SEEDS
        if complete or not self.known:
            self.mean = median(self._seeds)
        if complete:
            self.known, self._seeds = True, None

    def renew(self) -> None:
        """Marks what was learnt as old: the next samples replace it like first ones, as soon as all are there."""
        if self._seeds is None:
            self._seeds = []


class RowTable:
    """Cost of a forward by its rows: an entry for each number that was seen, a straight line between and beyond.

    All entries follow a little when one of them changes, because what slows a machine slows every forward. After the
    last entry a row costs what rows cost on the whole; while there is only one, what a row costs in the model table,
    in proportion, and without that a tenth of the entry, or its share where that is less.
    """

    def __init__(self, model: "RowTable | None" = None) -> None:
        self.known = False
        """Whether there is an entry that is more than a first impression."""
        self._model = model
        self._rows: list[int] = []
        self._entries: dict[float, Average] = {}
        self._scale = 1.0
        # Over all entries, without the scale: what a straight line through them is made of.
        self._sum_rows = self._sum_squares = 0
        self._sum_costs = self._sum_products = 0.0

    def add(self, rows: float, cost: float) -> None:
        """Adds the cost of a forward."""
        key = _row_key(rows)
        if self.known:
            expected = self.at(key)
            cost = min(cost, OUTLIER * expected + 1.0)
            self._scale *= 1 + DRIFT * (cost / max(expected, 1e-9) - 1)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Average()
            insort(self._rows, key)
            self._sum_rows += key
            self._sum_squares += key**2
        before = entry.mean
        entry.add(cost / self._scale)
        self.known = self.known or entry.known
        self._sum_costs += entry.mean - before
        self._sum_products += key * (entry.mean - before)

    def at(self, rows: float) -> float:
        """Expected cost of a forward; 0 before the first sample."""
        entry = self._entries.get(rows)
        if entry is not None:
            return self._scale * entry.mean
        if not self._rows:
            return 0.0
        index = bisect_left(self._rows, rows)
        above = self._rows[min(index, len(self._rows) - 1)]
        below = self._rows[max(index - 1, 0)]
        cost_above, cost_below = self._scale * self._entries[above].mean, self._scale * self._entries[below].mean
        if rows >= above:
            return cost_above + self._row_cost() * (rows - above)
        if rows <= below:
            return max(cost_below - self._row_cost() * (below - rows), 0.1 * cost_below)
        return cost_below + (cost_above - cost_below) * (rows - below) / (above - below)

    @property
    def row_share(self) -> float:
        """Cost of one more row, as a share of a forward."""
        mean_cost = self._scale * self._sum_costs / max(len(self._rows), 1)
        return self._row_cost() / mean_cost if mean_cost > 0 else 0.1

    def _row_cost(self) -> float:
        """Cost of one more row by least squares over all entries, at least 0."""
        num_entries = len(self._rows)
        mean_rows, mean_cost = self._sum_rows / num_entries, self._sum_costs / num_entries
        spread = self._sum_squares - mean_rows * self._sum_rows
        together = self._sum_products - mean_rows * self._sum_costs
        share = min(0.1, 1 / mean_rows) if self._model is None else self._model.row_share
        return self._scale * max(0.0, (together + SLOPE_WEIGHT * share * mean_cost) / (spread + SLOPE_WEIGHT))

    def renew(self) -> None:
        """Marks what was learnt as old; see Average."""
        for entry in self._entries.values():
            entry.renew()


def _row_key(rows: float) -> int:
    """Entry of a number of rows: large ones share one when they differ by less than a sixteenth."""
    if rows <= EXACT_ROWS:
        return max(1, round(rows))
    step = 1 << (int(rows).bit_length() - 5)
    return round(rows / step) * step


class ByLoad:
    """An average for each load, in sessions; loads of the same order share one."""

    def __init__(self) -> None:
        self._averages: dict[int, Average] = {}
        self._added: dict[int, int] = {}
        self._counts: dict[int, int] = {}

    def add(self, load: int, sample: float, now: int = 0) -> None:
        """Adds a sample; `now` counts whatever samples grow old by."""
        key = _load_key(load)
        if key not in self._averages:
            self._averages[key] = Average()
        self._averages[key].add(sample)
        self._added[key] = now
        self._counts[key] = self._counts.get(key, 0) + 1

    def known(self, load: int) -> bool:
        """Whether this very load has been seen."""
        return _load_key(load) in self._averages

    def blend(self, load: int, model: float, now: int) -> float:
        """The average at this very load where there is one; of what a model says the more, the older it is, and the
        fewer rounds each session has had: while a load changes, rounds are like nothing that lasts.
        """
        key = _load_key(load)
        if key not in self._averages:
            return model
        each = max(load, 1)
        weight = MEMORY_ROUNDS / (MEMORY_ROUNDS + (now - self._added[key]) / each)
        weight *= self._counts[key] / (self._counts[key] + TRUST_ROUNDS * each)
        return weight * self._averages[key].mean + (1 - weight) * model

    def at(self, load: int, unknown: float = 0.0) -> float:
        """The average at this load, or at the one that is nearest to it; `unknown` before the first sample."""
        key = _load_key(load)
        if key not in self._averages:
            if not self._averages:
                return unknown
            key = min(self._averages, key=lambda each: (abs(each - key), -each))
        return self._averages[key].mean


@cache
def _load_key(load: int) -> int:
    return round(2 * math.log2(max(load, 1)))


class AcceptanceRates:
    """Acceptance of the guess of each depth, recent rounds first; drawn towards a prior while little is known.

    The prior is that of another estimate, or else each depth is like the one before it.
    """

    def __init__(self, prior: "AcceptanceRates | None" = None) -> None:
        self._prior = prior
        self._accepted = [0.0] * MAX_DRAFT_COUNT
        self._evaluated = [0.0] * MAX_DRAFT_COUNT

    def observe(self, accepted_count: int, evaluated_count: int) -> None:
        """Adds a chain of which so many guesses were tested, and so many of these accepted."""
        # Each round that tests a depth takes a fiftieth off the weight of its past.
        evaluated, accepted = self._evaluated, self._accepted
        for depth in range(min(evaluated_count, MAX_DRAFT_COUNT)):
            evaluated[depth] = 0.98 * evaluated[depth] + 1
            accepted[depth] = 0.98 * accepted[depth] + (depth < accepted_count)

    @property
    def rates(self) -> list[float]:
        """The rate at each depth, given that all guesses before it are accepted."""
        priors = None if self._prior is None else self._prior.rates
        rates, last = [], FIRST_RATE
        for depth in range(MAX_DRAFT_COUNT):
            prior, weight = (last, FIRST_WEIGHT) if priors is None else (priors[depth], POOL_WEIGHT)
            last = min((self._accepted[depth] + weight * prior) / (self._evaluated[depth] + weight), 0.999)
            rates.append(last)
        return rates

    @property
    def mean(self) -> float:
        """Share of the guesses of all depths that are accepted."""
        weight = sum(self._evaluated) + FIRST_WEIGHT
        return min((sum(self._accepted) + FIRST_WEIGHT * FIRST_RATE) / weight, 0.999)

    def tokens(self) -> list[float]:
        """Tokens that a round with K guesses is expected to commit, for K in [0, MAX_DRAFT_COUNT]."""
        tokens, reached = [1.0], 1.0
        for rate in self.rates:
            reached *= rate
            tokens.append(tokens[-1] + reached)
        return tokens


class TreeGains:
    """Gains of the best rows of trees, by their number and how deep they may lie: the values that a drafter promises,
    corrected by how many it keeps of them.
    """

    def __init__(self) -> None:
        # By depth and number of rows the mean sum of values; drawn towards that of a chain at first.
        self._sums = [
            [sum(FIRST_RATE**step for step in range(1, min(count, depth) + 1)) for count in range(MAX_TREE_ROWS + 1)]
            for depth in range(MAX_DRAFT_COUNT + 1)
        ]
        self._weights = [[FIRST_WEIGHT] * (MAX_TREE_ROWS + 1) for _ in self._sums]
        self._promised = self._kept = FIRST_WEIGHT * FIRST_RATE
        self.num_promises = 0

    def promise(self, tree: TokenTree, count: int, max_depth: int) -> None:
        """Adds a proposal with values, of which so many rows were wanted, so deep at most.

        Nothing more was to be had within these limits. Beyond them nothing is known, and it is no less than within.
        """
        self.num_promises += 1
        count, max_depth = min(count, MAX_TREE_ROWS), min(max_depth, MAX_DRAFT_COUNT)
        ranked = sorted(zip(tree.values, tree.depths[1:], strict=True), reverse=True)
        for depth in range(1, max_depth + 1):
            sums, weights, total = self._sums[depth], self._weights[depth], 0.0
            values = [value for value, own_depth in ranked if own_depth <= depth]
            for number in range(1, count + 1):
                total += values[number - 1] if number <= len(values) else 0.0
                weights[number] = min(weights[number] + 1, 50.0)
                sums[number] += (total - sums[number]) / weights[number]
            sums[count + 1 :] = [max(each, sums[count]) for each in sums[count + 1 :]]
        within = self._sums[max_depth]
        for deeper in self._sums[max_depth + 1 :]:
            deeper[:] = map(max, deeper, within)

    def observe(self, values: Sequence[float], accepted_count: int) -> None:
        """Adds a tree that was verified, and how many of its rows were kept."""
        self._promised = 0.98 * self._promised + sum(values)
        self._kept = 0.98 * self._kept + accepted_count

    @property
    def correction(self) -> float:
        """Share of what is promised that is kept."""
        return self._kept / self._promised

    def at(self, count: int, depth: int = MAX_DRAFT_COUNT) -> float:
        """Tokens that a round with the best `count` rows up to a depth is expected to commit."""
        return 1.0 + self.correction * self._sums[depth][count]
