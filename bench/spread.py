"""Medians and quartiles, and how they are printed. Not a mean anywhere: a noisy host must not rule a figure."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Quartiles of some values."""

    low: float
    median: float
    high: float
    count: int

    def show(self, form: str, scale: float = 1.0) -> str:
        """Median and quartiles, multiplied by a scale, for instance "1.20 (1.15 to 1.31)"."""
        low, median, high = (f"{value * scale:{form}}" for value in (self.low, self.median, self.high))
        return f"{median} ({low} to {high})"


def spread(values: Iterable[float]) -> Spread:
    """Quartiles by linear interpolation within the values. Raises ValueError when there are none."""
    numbers = sorted(values)
    if not numbers:
        raise ValueError("there is no median of no values")
    if len(numbers) == 1:
        return Spread(numbers[0], numbers[0], numbers[0], 1)
    low, median, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return Spread(low, median, high, len(numbers))


def median(values: Iterable[float]) -> float:
    """The median alone."""
    return spread(values).median


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    names = list(header)
    lines = [names, ["---"] * len(names), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
