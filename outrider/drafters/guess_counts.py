"""Number of tokens for a cheaper guesser to guess before a draft verifies them, by measured chances and costs.

With a chance b that a guess is what the draft draws, g guesses make E = (1 - b^(g + 1)) / (1 - b) tokens of one forward
of g + 1 rows (Leviathan, Kalman and Matias, 2023, arXiv 2211.17192). Pure, but for the clock of the code that measures;
it decides how long a proposal takes, and never what is proposed.
"""

from collections.abc import Callable, Sequence

from outrider.estimates.acceptance import GuessTally
from outrider.estimates.row_costs import Metering, RecentMedian, RowCosts

# Guesses whose median counts: one that a busy machine made slow says nothing.
NUM_SAMPLES = 5
# After so many steps the size that was seen longest ago counts as unknown, or a bad first sample would stay.
FORGET_STEPS = 64
# A step says nothing of larger ones, which are tried when guesses may pay, and then is known by its own samples.
LATEST = Metering(RecentMedian, has_trend=False, unknown=1.0, forget_steps=FORGET_STEPS)
# A clock may stand still.
MIN_SECONDS = 1e-9
# What guesses must promise, or a misjudged cost would lose more than they win.
MIN_GAIN = 1.1
# What a chance is before anything is known, as so many guesses, and how fast old ones are forgotten.
PRIOR_CHANCE, PRIOR_COUNT, DECAY = 0.5, 2.0, 0.97


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
        # What it is at first is forgotten too: a chance near 0 must be found out.
        self._tally = GuessTally(DECAY, PRIOR_COUNT, PRIOR_CHANCE * PRIOR_COUNT)

    @property
    def value(self) -> float:
        return self._tally.share()

    def add(self, num_tested: int, num_right: int) -> None:
        self._tally.add(num_tested, num_right, num_tested)


class RowSeconds(RowCosts):
    """Seconds of a step by its rows, as they were lately; 1 while nothing is known."""

    def __init__(self) -> None:
        super().__init__(metering=LATEST)

    def __call__(self, num_rows: int) -> float:
        """Seconds of a step of so many rows."""
        return max(self.at(num_rows), MIN_SECONDS)
