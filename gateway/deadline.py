"""How long to wait for a draft or a target: a multiple of its usual time, so that no machine needs a setting. Pure."""

from dataclasses import dataclass

SMALL_CATCH_UP = 32  # committed tokens that a draft reads in passing
CATCH_UP_TOKEN_S = 0.005  # allowance for each further one
MISSED_MOST_S = 1.0  # misses raise the deadline to this at most; only answers raise it further


@dataclass(slots=True)
class DraftDeadline:
    """Deadline of a draft's answer: factor times the moving average of its answers, between least_s and most_s."""

    least_s: float = 0.25
    most_s: float = 5.0
    factor: float = 20.0
    _mean_s: float | None = None

    def seconds(self, catch_up_count: int) -> float:
        """Time to wait for an answer for which the draft has to read catch_up_count tokens first."""
        usual_s = self.most_s if self._mean_s is None else self.factor * self._mean_s
        allowance_s = CATCH_UP_TOKEN_S * max(0, catch_up_count - SMALL_CATCH_UP)
        return min(max(usual_s, self.least_s), self.most_s) + allowance_s

    def observe(self, answer_s: float, catch_up_count: int) -> None:
        """Learns from an answer."""
        if catch_up_count <= SMALL_CATCH_UP:
            self._mean_s = answer_s if self._mean_s is None else 0.9 * self._mean_s + 0.1 * answer_s

    def missed(self) -> None:
        """Learns from a deadline that passed, which says only that the draft is slower; it may even hang.

        So the deadline itself is no answer's time: fed back, it would raise the next one without end.
        """
        most_s = MISSED_MOST_S / self.factor
        self._mean_s = most_s if self._mean_s is None else max(self._mean_s, min(2 * self._mean_s, most_s))


@dataclass(slots=True)
class RoundDeadline:
    """When to ask whether the target still works: factor times the moving average of its answers, within bounds.

    Passing it costs one question and no request, so it may be short. `most_s` bounds what a slow start would teach.
    """

    least_s: float = 2.0
    most_s: float = 30.0
    factor: float = 20.0
    _mean_s: float = 0.0

    def seconds(self) -> float:
        """Time to wait for a verdict before the target is looked at."""
        return min(max(self.factor * self._mean_s, self.least_s), self.most_s)

    def observe(self, answer_s: float) -> None:
        """Learns from an answer."""
        self._mean_s += 0.1 * (min(answer_s, self.most_s) - self._mean_s)
