"""Whether a step waits a moment for sessions that are about to come, because a step of their own would cost more.

A session whose draft guesses is away between two steps. Where most of a step's cost is fixed, as on an accelerator that
reads its weights, sessions that come a little late and get the next step for themselves make everybody's round longer
by that step, and they stay late for good: their answers are late too. Where rows are dear nothing is gained by
waiting, and no step waits. What steps cost and how long a session is away is measured. Belongs to the device thread.
"""

import time
from collections.abc import Callable, Collection, Hashable
from weakref import WeakKeyDictionary

from outrider.estimates.row_costs import Line

MEMORY = 0.98  # of a step's weight, is left after another: sessions come and go within some tens of steps
# How much later than last time a session may be and is still waited for, as a share of its absence and in seconds.
LATE_SHARE, LATE_S = 0.1, 0.0005
WORTH_JOINING = 0.95  # of the round of two groups, what that of one may take for them to become one
MAX_AWAY_S = 1.0  # no step waits for a session that was away longer


class Gathering:
    """Knows who is away, and says whether a step should wait for them."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Takes a clock that counts seconds."""
        self._clock = clock
        self.costs = Line(MEMORY)
        self._left_s: dict[Hashable, float] = {}
        # How long each was away last time, of those that have to be asked for each step.
        self._away_s: WeakKeyDictionary[Hashable, float] = WeakKeyDictionary()

    def left(self, session: Hashable) -> None:
        """A session has its answer, and the next step is its gateway's to ask for."""
        self._left_s[session] = self._clock()

    def stayed(self, session: Hashable) -> None:
        """A session has its answer, and goes on by itself."""
        self._away_s.pop(session, None)

    def came(self, session: Hashable, arrived_s: float) -> None:
        """A session is here, whose request arrived then; without an effect for one that had not left."""
        left_s = self._left_s.pop(session, None)
        if left_s is not None:
            self._away_s[session] = arrived_s - left_s

    def is_worth_waiting(self, here: Collection[Hashable], num_rows: int) -> bool:
        """Whether a step of these sessions, with so many rows together, should wait for others."""
        if not self._left_s or not here:
            return False
        fixed_s, row_s = self.costs.parts
        session_s = row_s * num_rows / len(here)
        due = sorted(each for each in self._due() if each[0] < fixed_s)
        if not due:
            return False
        # Once: it delays those who are here until the others come, and by their rows, and saves those a step.
        saved_s = fixed_s - len(here) * session_s
        if any(num * saved_s > (len(here) + num) * rest_s for num, (rest_s, _) in enumerate(due, start=1)):
            return True
        # Again and again: all together have a round as long as a step and an absence, two groups one of two steps, or
        # as long as the larger group has. Who goes on unasked has no absence to lose.
        if any(session not in self._away_s for session in here):
            return False
        away_s = max(away_s for _, away_s in due)
        step_s, other_s = fixed_s + len(here) * session_s, fixed_s + len(due) * session_s
        apart_s = max(step_s + other_s, max(step_s, other_s) + away_s)
        return step_s + other_s - fixed_s + away_s < WORTH_JOINING * apart_s

    def _due(self) -> list[tuple[float, float]]:
        """Seconds until each session is expected that is not late, and how long it was away last time."""
        due, now_s = [], self._clock()
        for session, left_s in list(self._left_s.items()):
            away_s = self._away_s.get(session)
            if away_s is not None and left_s + away_s + LATE_SHARE * away_s + LATE_S >= now_s:
                due.append((max(left_s + away_s - now_s, 0.0), away_s))
            elif away_s is not None or now_s - left_s > MAX_AWAY_S:
                # It has ended, or is late for a reason of its own.
                del self._left_s[session]
        return due
