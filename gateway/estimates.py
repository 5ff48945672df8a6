"""Moving estimates that no outlier rules, not even a first one. Pure arithmetic; knows no rounds."""

from statistics import median

NUM_SEEDS = 3  # samples of which the median begins an estimate
OUTLIER = 4.0  # a sample counts as so many times what was expected at most


class Decayed:
    """A mean of ratios, where each addition takes a fiftieth off the weight of the past."""

    def __init__(self, total: float, weight: float) -> None:
        self._total, self._weight = total, weight

    def add(self, total: float, weight: float) -> None:
        """Adds an observation of total over weight."""
        keep = 0.98 if weight else 1.0
        self._total, self._weight = keep * self._total + total, keep * self._weight + weight

    @property
    def mean(self) -> float:
        """The mean so far."""
        return self._total / self._weight


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
        """What was learnt is old: the next samples replace it as if they were the first, as soon as all are there."""
        if self._seeds is None:
            self._seeds = []


class Line:
    """Least squares of a cost over the number of rows, recent samples first.

    Samples may all have the same number of rows, so the slope is drawn towards a tenth of the mean cost a row.
    """

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._seeds: list[tuple[float, float]] = []

    def add(self, x: float, y: float) -> None:
        """Adds the cost y of x rows."""
        if self._weight:
            self._sum(x, min(y, OUTLIER * self.at(x) + 1.0))
            return
        self._seeds.append((x, y))
        if len(self._seeds) == NUM_SEEDS:
            most = OUTLIER * self.at(x) + 1.0
            for seed_x, seed_y in self._seeds:
                self._sum(seed_x, min(seed_y, most))

    def at(self, x: float) -> float:
        """Expected cost of x rows; 0 before the first sample, and never falling with x."""
        if not self._weight:
            return median(y for _, y in self._seeds) if self._seeds else 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        together = self._xy / self._weight - mean_x * mean_y
        pull = 0.05
        slope = max(0.0, (together + pull * 0.1 * mean_y) / (spread + pull))
        return max(mean_y + slope * (x - mean_x), 0.1 * mean_y)

    def _sum(self, x: float, y: float) -> None:
        sums = (self._weight, self._x, self._y, self._xx, self._xy)
        new = (1.0, x, y, x * x, x * y)
        self._weight, self._x, self._y, self._xx, self._xy = (
            0.97 * old + added for old, added in zip(sums, new, strict=True)
        )
