"""How many guesses an engine's steps ask for: what brings most tokens a second, by what is kept and what steps cost."""

from collections import defaultdict
from dataclasses import dataclass, field

PRIOR_KEPT, PRIOR_SEEN = 3.0, 4.0  # guesses are taken for good before any is verified
DECAY = 0.98  # of what was seen, at each step
NEW = 0.2  # share of a step in the mean of its kind
MOST_TIMES = 3.0  # a step that took more of its kind's mean was held up by something else
MEASURED = 3  # steps after which a cost is known
PROBE_STEPS = 16  # steps between two that ask for another number


@dataclass(slots=True)
class Pace:
    """Chooses a number of guesses in [0, max_count]; learns from every step, for each power of two of rows."""

    max_count: int
    share: float = 1.0
    """Share of the rows for which guesses came when they were asked for."""
    _kept: list[float] = field(init=False)
    _seen: list[float] = field(init=False)
    _seconds: defaultdict[int, dict[int, float]] = field(init=False)
    _measured: defaultdict[tuple[int, int], int] = field(init=False)
    _usual: dict[int, int] = field(default_factory=dict)
    """Best number by kind when it was last chosen."""
    _num_chosen: int = 0

    def __post_init__(self) -> None:
        self._kept, self._seen = [PRIOR_KEPT] * self.max_count, [PRIOR_SEEN] * self.max_count
        self._seconds, self._measured = defaultdict(dict), defaultdict(int)

    def choose(self, num_rows: int) -> int:
        """Number of guesses for each of so many rows: one that has to be measured, or the best one."""
        kind = num_rows.bit_length()
        for count in (0, self.max_count, (self.max_count + 1) // 2):
            if self._measured[kind, count] < MEASURED:
                return count
        self._num_chosen += 1
        best = max(range(self.max_count + 1), key=lambda count: self.tokens(count) / self.seconds(num_rows, count))
        self._usual[kind] = best
        if self._num_chosen % PROBE_STEPS:
            return best
        others = [each for each in (0, best - 1, 0, best + 1) if 0 <= each <= self.max_count and each != best]
        return others[self._num_chosen // PROBE_STEPS % len(others)]

    def tokens(self, count: int) -> float:
        """Tokens that a row is expected to get from a step with so many guesses; at least 1."""
        reached, total = 1.0, 1.0
        for kept, seen in zip(self._kept[:count], self._seen[:count], strict=True):
            reached *= kept / seen
            total += self.share * reached
        return total

    def seconds(self, num_rows: int, count: int) -> float:
        """What such a step costs, by those that were measured on either side of it."""
        known = self._seconds[num_rows.bit_length()]
        low = max((each for each in known if each <= count), default=min(known))
        high = min((each for each in known if each >= count), default=max(known))
        if low == high:
            return known[low]
        return known[low] + (known[high] - known[low]) * (count - low) / (high - low)

    def step(self, num_rows: int, count: int, seconds: float) -> None:
        """Learns what a step cost from one call of the proposer to the next; all its rows were decoded in both.

        What becomes dearer or cheaper for the usual number does so for all: the machine or the sequences have changed.
        """
        kind = num_rows.bit_length()
        known, self._measured[kind, count] = self._seconds[kind], self._measured[kind, count] + 1
        mean = known.get(count, seconds)
        if self._measured[kind, count] <= MEASURED:
            # What holds up a step makes it longer, never shorter.
            known[count] = min(mean, seconds)
            return
        change = 1 + NEW * (min(seconds / mean, MOST_TIMES) - 1)
        known[count] = mean * change
        if count == self._usual.get(kind):
            for other in known.keys() - {count}:
                known[other] *= change

    def answered(self, num_asked: int, num_answered: int) -> None:
        """Learns for how many of the rows that were asked for guesses came."""
        self.share += NEW * (num_answered / num_asked - self.share)

    def verified(self, rows: list[tuple[int, int]]) -> None:
        """Learns how many of each row's guesses were kept: pairs of guessed and kept."""
        self._kept = [DECAY * each for each in self._kept]
        self._seen = [DECAY * each for each in self._seen]
        for guessed, kept in rows:
            for place in range(min(guessed, kept + 1)):
                self._seen[place] += 1
                self._kept[place] += place < kept
