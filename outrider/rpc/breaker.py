"""Circuit breaker: keeps sessions from a service that fails, and tries now and then whether it works again.

Only real work proves a service well, so a breaker that all requests share tries work, by one session at a time and ever
more seldom.
"""

import time
from collections.abc import Callable

# Failures in a row that open the breaker, and pauses between trials. A draft may be late now and then, and requests do
# without it; a target is late only when it hangs, and then there is nothing else that a request could do.
BREAKERS = {"draft": (2, (0.5, 10.0)), "target": (1, (0.0, 0.0))}
TRIAL_COST = 0.05  # share of the time that trials may cost; pauses grow beyond the longest where they are dear


class CircuitBreaker:
    """Opens after some failures in a row. While it is open every session is blocked, but now and then one on trial.

    Trials begin a pause after the failure before; pauses_s has the first pause and the longest. A session is known by
    any value that no other session has.
    """

    def __init__(
        self, failures_to_open: int, pauses_s: tuple[float, float], clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.cause: type[Exception] | None = None  # what the last failure that counted was
        self._failures_to_open = failures_to_open
        self._clock_s = clock_s
        self._failures = 0
        self._first_s, self._longest_s = pauses_s
        self._pause_s = self._first_s
        self._resume_s = 0.0
        self._on_trial: object = None

    @property
    def is_open(self) -> bool:
        """Whether the service has failed so often that sessions do better without it."""
        return self._failures >= self._failures_to_open

    def blocks(self, session: object) -> bool:
        """Whether a session must leave the service alone now."""
        if not self.is_open or session == self._on_trial:
            return False
        return self._on_trial is not None or self._clock_s() < self._resume_s

    def rested_s(self) -> float:
        """Seconds since it might have been tried again."""
        return self._clock_s() - self._resume_s

    def enter(self, session: object) -> None:
        """A session that is not blocked asks the service for work; while the breaker is open it is on trial."""
        if self.is_open:
            self._on_trial = session

    def failed(self, session: object, cause: Exception, cost_s: float = 0.0) -> None:
        """The service failed a session, which lost cost_s. While open, only the one on trial says anything new."""
        if self.is_open:
            if session != self._on_trial:
                return
            self._pause_s = min(2 * self._pause_s, max(self._longest_s, cost_s / TRIAL_COST))
        self.cause = type(cause)
        self._failures += 1
        self._rest()

    def answered(self) -> None:
        """The service did its work: the breaker closes. Pauses only halve, so that a flapping one rests long."""
        self._failures, self._on_trial = 0, None
        self._pause_s = max(self._pause_s / 2, self._first_s)

    def left(self, session: object) -> None:
        """A session ended; if it was on trial, nothing was learnt, and the next trial comes after a pause."""
        if session == self._on_trial:
            self._rest()

    def renew(self) -> None:
        """Another incarnation of the service is there, which has not failed anybody yet."""
        self._failures, self._on_trial, self._pause_s = 0, None, self._first_s

    def _rest(self) -> None:
        self._on_trial = None
        self._resume_s = self._clock_s() + self._pause_s
