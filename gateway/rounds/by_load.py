"""Averages by load, because what a round costs depends on how many sessions share the target. Pure."""

import math
from functools import cache

from gateway.rounds.tuning import PolicyTuning
from outrider.estimates.row_costs import MOVES, Average


class ByLoad:
    """An average for each load, in sessions; loads of the same order share one."""

    def __init__(self, moves: float = MOVES) -> None:
        """At least `moves` of a sample's surprise are believed, however many there were before."""
        self._moves = moves
        self._averages: dict[int, Average] = {}
        self._added: dict[int, int] = {}
        self._counts: dict[int, int] = {}

    def add(self, load: int, sample: float, now: int = 0, num_rounds: int = 1) -> None:
        """Adds a sample of so many rounds, all of one forward; `now` counts whatever samples grow old by."""
        key = load_key(load)
        if key not in self._averages:
            self._averages[key] = Average(self._moves)
        self._averages[key].add(sample)
        self._added[key] = now
        self._counts[key] = self._counts.get(key, 0) + num_rounds

    def known(self, load: int) -> bool:
        """Whether this very load has been seen."""
        return load_key(load) in self._averages

    def blend(self, load: int, model: float, now: int, tuning: PolicyTuning) -> float:
        """The average at this very load where there is one; of what a model says the more, the older it is, and the
        fewer rounds each session has had: while a load changes, rounds are like nothing that lasts.
        """
        key = load_key(load)
        if key not in self._averages:
            return model
        each = max(load, 1)
        weight = tuning.memory_rounds / (tuning.memory_rounds + (now - self._added[key]) / each)
        weight *= self._counts[key] / (self._counts[key] + tuning.trust_rounds * each)
        return weight * self._averages[key].mean + (1 - weight) * model

    def count(self, load: int, now: int, most_age: int) -> int:
        """Rounds at this very load; 0 where the last one is that old."""
        key = load_key(load)
        return self._counts.get(key, 0) if now - self._added.get(key, now - most_age) < most_age else 0

    def at(self, load: int, unknown: float = 0.0) -> float:
        """The average at this load, or at the one that is nearest to it; `unknown` before the first sample."""
        return self._averages[self._nearest(load_key(load))].mean if self._averages else unknown

    def scaled(self, load: int, unknown: float = 0.0) -> float:
        """The average of a time that sessions spend on waiting for each other: of a larger load only its share."""
        if not self._averages:
            return unknown
        key = self._nearest(load_key(load))
        return self._averages[key].mean * min(1.0, 2 ** ((load_key(load) - key) / 2))

    def _nearest(self, key: int) -> int:
        return min(self._averages, key=lambda each: (abs(each - key), -each))


@cache
def load_key(load: int) -> int:
    """Number of all loads of the same order, two to a doubling."""
    return round(2 * math.log2(max(load, 1)))
