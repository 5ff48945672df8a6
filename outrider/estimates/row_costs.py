"""Costs of steps by their rows: the meter of all who choose how many rows a step should have. Pure.

Rows may be dear or nearly free, in steps or evenly, and only measuring says which. What a step costs with a number of
rows that was seen is an average of its own; between two numbers lies a straight line. Who asks about a fixed part and
one for each row gets a line through all. Estimates move, and no outlier rules them, not even a first one.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Protocol

NUM_SEEDS = 3  # samples of which the median begins an average: one of them may be an outlier
MOVES = 0.1  # of a further sample's surprise, is believed: a load lasts for some tens of samples
# Of a number of rows' own samples less is: what is common to all numbers of rows is followed by all of them together.
ENTRY_MOVES = 0.01
OUTLIER = 4.0  # a sample counts as so many times what was expected at most
NUM_SAMPLES = 5  # of the latest, a median counts: two that a busy machine made slow say nothing
SLOPE_WEIGHT = 0.5  # of what is believed of the cost of a row before there are two entries, in squared rows
DRIFT = 0.03  # how much of a sample's surprise about one number of rows is believed of all others
FORGET_STEPS = 300  # a number of rows that none of so many steps had is unknown: the machine may have been busier
EXACT_ROWS = 32  # larger numbers of rows share an entry with their neighbours
LEAST_SPREAD = 0.5  # of numbers of rows, in squared rows, with which a step's fixed part is distinguished from its rows


class CostEstimate(Protocol):
    """A cost as it is now, learnt from samples; `known` when it is more than a first impression."""

    known: bool
    mean: float

    def add(self, sample: float) -> None:
        """Adds a sample, at least 0."""

    def renew(self) -> None:
        """Marks what was learnt as old: the next samples replace it as soon as there are enough."""


class Average:
    """A mean of samples that begins with the median of the first ones, and then with equal weights for all; later ones
    count as in an exponential moving average.
    """

    def __init__(self, moves: float = MOVES) -> None:
        """At least `moves` of a sample's surprise are believed."""
        self.known = False
        self.mean = 0.0
        self._moves = moves
        self._count = 0
        self._seeds: list[float] | None = []

    def add(self, sample: float) -> None:
        if self._seeds is None:
            self._count += 1
            self.mean += max(1 / self._count, self._moves) * (min(sample, OUTLIER * self.mean + 1.0) - self.mean)
            return
        self._seeds.append(sample)
        complete = len(self._seeds) == NUM_SEEDS
        if complete or not self.known:
            self.mean = median(self._seeds)
        if complete:
            self.known, self._seeds, self._count = True, None, NUM_SEEDS

    def renew(self) -> None:
        if self._seeds is None:
            self._seeds = []


class RecentMedian:
    """The median of the latest samples, which follows a new load at once."""

    def __init__(self) -> None:
        self.known = False
        self.mean = 0.0
        self._samples: deque[float] = deque(maxlen=NUM_SAMPLES)

    def add(self, sample: float) -> None:
        self._samples.append(sample)
        self.known, self.mean = True, median(self._samples)

    def renew(self) -> None:
        self._samples.clear()


class Line:
    """A straight line through costs by rows, by least squares; each step leaves `memory` of those before it."""

    def __init__(self, memory: float = 1.0) -> None:
        self._memory = memory
        self._weight = self._rows = self._costs = self._squares = self._products = 0.0

    def add(self, rows: float, cost: float, weight: float = 1.0) -> None:
        """Adds the rows of a step and its cost; takes one away that was added, where the weight is -1."""
        self._weight = self._memory * self._weight + weight
        self._rows = self._memory * self._rows + weight * rows
        self._costs = self._memory * self._costs + weight * cost
        self._squares = self._memory * self._squares + weight * rows**2
        self._products = self._memory * self._products + weight * rows * cost

    def move(self, rows: float, change: float) -> None:
        """Changes the cost of a step that was added."""
        self._costs += change
        self._products += rows * change

    @property
    def means(self) -> tuple[float, float]:
        """Mean number of rows, and mean cost."""
        weight = self._weight or 1.0
        return self._rows / weight, self._costs / weight

    def slope(self, believed: float, weight: float) -> float:
        """Cost of one more row, at least 0; drawn towards what is believed, which weighs so many squared rows."""
        mean_rows, _ = self.means
        spread = self._squares - mean_rows * self._rows
        together = self._products - mean_rows * self._costs
        return max(0.0, (together + weight * believed) / (spread + weight))

    @property
    def parts(self) -> tuple[float, float]:
        """The fixed part and that of a row, neither below 0; nothing counts as fixed while all steps look alike."""
        mean_rows, mean_cost = self.means
        if not mean_rows:
            return 0.0, 0.0
        row_cost = mean_cost / mean_rows
        if self._squares - mean_rows * self._rows < LEAST_SPREAD * self._weight:
            return 0.0, row_cost
        row_cost = min(self.slope(0.0, 0.0), row_cost)
        return mean_cost - row_cost * mean_rows, row_cost


@dataclass(frozen=True, slots=True)
class Metering:
    """How a meter learns, and what it believes of numbers of rows that it has not seen."""

    entry: Callable[[], CostEstimate]
    has_trend: bool = True
    """Whether all entries move a little with one of them, and further rows cost what rows cost on the whole. Else each
    number of rows is known by its own samples alone, and a larger step is like the largest that was seen."""
    unknown: float = 0.0
    """Cost before the first sample."""
    forget_steps: int = FORGET_STEPS
    """Steps after which a number of rows that none of them had counts as unknown."""


# Of a device that others share, where what slows a step slows every other one too.
TREND = Metering(partial(Average, ENTRY_MOVES))


class RowCosts:
    """Cost of a step by its rows: an entry for each number that was seen often enough, a straight line between and
    beyond.

    While there is only one entry, a further row costs what it costs in the model table, in proportion, and without that
    a tenth of the entry, or its share where that is less.
    """

    def __init__(self, model: "RowCosts | None" = None, metering: Metering = TREND) -> None:
        self.known = False
        """Whether there is an entry that is more than a first impression."""
        self._model = model
        self._metering = metering
        # Numbers of rows whose entries count: first impressions do while there is nothing else.
        self._rows: list[int] = []
        self._entries: dict[float, CostEstimate] = {}
        self._seen: dict[float, int] = {}  # the step that had so many rows last
        self._scale = 1.0
        # Through all entries that count, without the scale.
        self._line = Line()
        self._num_steps = 0

    def begin(self, costs: Mapping[int, float]) -> None:
        """Begins with what steps have cost before, by their rows, in place of first impressions.

        Raises ValueError when more than these is known already.
        """
        if self.known:
            raise ValueError("costs of steps are known already")
        if not costs:
            return
        self._rows, self._entries, self._line = [], {}, Line()
        for rows, cost in sorted(costs.items()):
            entry = self._entries[rows] = self._metering.entry()
            for _ in range(NUM_SEEDS):
                entry.add(cost)
            self._rows.append(rows)
            self._line.add(rows, cost)
        self.known = True

    def add(self, rows: float, cost: float) -> None:
        """Adds the cost of a step."""
        # Large numbers of rows share an entry when they differ by less than a sixteenth.
        step = 1 if rows <= EXACT_ROWS else 1 << (int(rows).bit_length() - 5)
        key = max(1, round(rows / step) * step)
        if self.known and self._metering.has_trend:
            expected = self.at(key)
            cost = min(cost, OUTLIER * expected + 1.0)
            if key in self._rows:
                self._scale *= 1 + DRIFT * (cost / max(expected, 1e-9) - 1)
        entry, was_known = self._entries.pop(key, None) or self._metering.entry(), self.known
        # Last, as the one that was seen last.
        self._entries[key] = entry
        before = entry.mean
        entry.add(cost / self._scale)
        self.known = was_known or entry.known
        if self.known and not was_known:
            # From now on they do not: one of them may be an outlier.
            self._rows, self._line = [], Line()
        if key in self._rows:
            self._line.move(key, entry.mean - before)
        elif entry.known or not self.known:
            insort(self._rows, key)
            self._line.add(key, entry.mean)
        self._num_steps += 1
        self._seen[key] = self._num_steps
        oldest = next(iter(self._entries))
        is_old = self._seen.get(oldest, 0) <= self._num_steps - self._metering.forget_steps
        if is_old and self._rows != [oldest]:
            forgotten = self._entries.pop(oldest)
            self._seen.pop(oldest, None)
            if oldest in self._rows:
                self._line.add(oldest, forgotten.mean, -1.0)
                self._rows.remove(int(oldest))

    def at(self, rows: float) -> float:
        """Expected cost of a step."""
        entry = self._entries.get(rows)
        if entry is None:
            return self._beside(rows)
        own = self._scale * entry.mean
        # What is slow once may be an outlier. What is fast once is none.
        return own if entry.known or not self.known else min(own, self._beside(rows))

    def _beside(self, rows: float) -> float:
        """Expected cost by the costs of other numbers of rows."""
        if not self._rows:
            return self._metering.unknown
        index = bisect_left(self._rows, rows)
        above = self._rows[min(index, len(self._rows) - 1)]
        below = self._rows[max(index - 1, 0)]
        cost_above, cost_below = self._scale * self._entries[above].mean, self._scale * self._entries[below].mean
        if rows >= above:
            # Further rows cost at most what the last ones do, which may be less than on the whole: of a model with
            # experts they read hardly any that are new.
            row_cost, last = self._row_cost(), self._rows[-1]
            index = bisect_right(self._rows, last / 2) - 1
            if index >= 0:
                change = self._scale * (self._entries[last].mean - self._entries[self._rows[index]].mean)
                row_cost = min(row_cost, max(0.0, change / (last - self._rows[index])))
            return cost_above + row_cost * (rows - above)
        if rows <= below:
            return max(cost_below - self._row_cost() * (below - rows), 0.1 * cost_below)
        return cost_below + (cost_above - cost_below) * (rows - below) / (above - below)

    @property
    def table(self) -> dict[int, float]:
        """Costs of the numbers of rows that were seen."""
        return {rows: self.at(rows) for rows in self._rows}

    @property
    def row_share(self) -> float:
        """Cost of one more row, as a share of a step."""
        mean_cost = self._scale * self._line.means[1]
        return self._row_cost() / mean_cost if mean_cost > 0 else 0.1

    def _row_cost(self) -> float:
        """Cost of one more row, on the whole."""
        if not self._metering.has_trend:
            return 0.0
        mean_rows, mean_cost = self._line.means
        share = min(0.1, 1 / mean_rows) if self._model is None else self._model.row_share
        return self._scale * self._line.slope(share * mean_cost, SLOPE_WEIGHT)

    def renew(self) -> None:
        """Marks what was learnt as old; see CostEstimate."""
        for entry in self._entries.values():
            entry.renew()
