"""A histogram that one thread fills and any thread reads, for a scrape to export. Knows no name and no unit."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Self

from prometheus_client.utils import floatToGoString

Buckets = list[tuple[str, float]]
"""Upper bounds as Prometheus writes them, each with the number of values up to it; the last is +Inf."""


@dataclass(slots=True)
class Tally:
    """Counts values up to each of the bounds, which rise."""

    bounds: Sequence[float]
    total: float = 0.0
    """Sum of the values."""
    _counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Counts a value."""
        self.add_many(value, 1)

    def add_many(self, value: float, times: int) -> None:
        """Counts a value that came so often."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.total += times * value

    def add_tally(self, other: Self) -> None:
        """Counts all that another tally with the same bounds has counted."""
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, other._counts, strict=True)]
        self.total += other.total

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self._counts)

    @property
    def buckets(self) -> Buckets:
        """What was counted so far."""
        names = [*map(floatToGoString, self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(list(self._counts))), strict=True))


def tally_of(numbers: Mapping[int, int], bounds: Sequence[float]) -> Tally:
    """A tally of whole numbers that were counted one by one: each with how often it came."""
    tally = Tally(bounds)
    for number, times in numbers.items():
        tally.add_many(number, times)
    return tally
