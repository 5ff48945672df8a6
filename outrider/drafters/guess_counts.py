"""Number of tokens for a cheaper guesser to guess before a draft verifies them, by measured chances and costs.

With a chance b that a guess is what the draft draws, g guesses make E = (1 - b^(g + 1)) / (1 - b) tokens of one forward
of g + 1 rows (Leviathan, Kalman and Matias, 2023, arXiv 2211.17192). Pure, but for the clock of the code that measures;
it decides how long a proposal takes, and never what is proposed.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence

# Steps whose median counts: one that a busy machine made slow says nothing.
NUM_SAMPLES = 5
# After so many steps the size that was seen longest ago counts as unknown, or a bad first sample would stay.
FORGET_STEPS = 64
# A clock may stand still.
MIN_SECONDS = 1e-9
# What guesses must promise, or a misjudged cost would lose more than they win.
MIN_GAIN = 1.1
# What a chance is before anything is known, as so many guesses, and how fast old ones are forgotten.
PRIOR_CHANCE, PRIOR_COUNT, DECAY = 0.5, 2.0, 0.97


def expected_tokens(chance: float, count: int) -> float:
    """Tokens of a forward that verifies `count` guesses: E of the module's text, count + 1 for a chance of 1."""
    return sum(chance**depth for depth in range(count + 1))


def share_guesses(
    chances: Sequence[float], limits: Sequence[int], num_tokens: int, seconds: Callable[[int, int], float]
) -> list[int]:
    """Number of guesses for each session, so that a step makes the most tokens a second.

    None where that would not be MIN_GAIN times as many as without any.
    Session i has the chance chances[i], and room for limits[i] guesses. The step makes num_tokens tokens without any,
    those of other sessions too. seconds(n, g) is what it takes with n guesses in all, g of the longest.
    """
    gains = sorted(
        (-(chance**depth), depth, number)
        for number, (chance, limit) in enumerate(zip(chances, limits, strict=True))
        for depth in range(1, limit + 1)
    )
    best_rate, best_count = MIN_GAIN * num_tokens / seconds(0, 0), 0
    tokens, longest = float(num_tokens), 0
    for count, (loss, depth, _) in enumerate(gains, start=1):
        tokens, longest = tokens - loss, max(longest, depth)
        rate = tokens / seconds(count, longest)
        if rate > best_rate:
            best_rate, best_count = rate, count
    chosen = [number for _, _, number in gains[:best_count]]
    return [chosen.count(number) for number in range(len(chances))]


class Chance:
    """Share of guesses of one kind that were right lately."""

    def __init__(self) -> None:
        self._tested, self._right = PRIOR_COUNT, PRIOR_CHANCE * PRIOR_COUNT

    @property
    def value(self) -> float:
        return self._right / self._tested

    def add(self, num_tested: int, num_right: int) -> None:
        kept = DECAY**num_tested
        self._tested, self._right = kept * self._tested + num_tested, kept * self._right + num_right


class RowSeconds:
    """Seconds of a step by its rows: medians of the last ones, a line between neighbours, and beyond them the same."""

    def __init__(self) -> None:
        # In the order in which they were seen last.
        self._samples: dict[int, deque[float]] = {}
        self._rows: list[int] = []
        self._medians: dict[int, float] = {}
        self._num_steps = 0

    def add(self, num_rows: int, seconds: float) -> None:
        samples = self._samples.pop(num_rows, None)
        if samples is None:
            samples = deque(maxlen=NUM_SAMPLES)
            insort(self._rows, num_rows)
        samples.append(max(seconds, MIN_SECONDS))
        self._samples[num_rows] = samples
        self._medians[num_rows] = sorted(samples)[len(samples) // 2]
        self._num_steps += 1
        if self._num_steps % FORGET_STEPS == 0:
            oldest = next(iter(self._samples))
            del self._samples[oldest]
            self._rows.remove(oldest)

    def __call__(self, num_rows: int) -> float:
        """Seconds of a step of so many rows; 1 while nothing is known."""
        rows, medians = self._rows, self._medians
        if not rows:
            return 1.0
        place = bisect_left(rows, num_rows)
        if place == len(rows):
            return medians[rows[-1]]
        after = rows[place]
        if after == num_rows or not place:
            return medians[after]
        before = rows[place - 1]
        share = (num_rows - before) / (after - before)
        return (1 - share) * medians[before] + share * medians[after]
