"""How long a request waits for its services, and when it gives up. Knows no services."""

from dataclasses import dataclass, field

from gateway.deadline import RoundDeadline
from outrider.errors import OutriderError, PeerLost

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0


@dataclass(frozen=True, slots=True)
class Patience:
    """With a target: seconds until it is looked at, for which its device may finish nothing, and may be away."""

    deadline: RoundDeadline = field(default_factory=RoundDeadline)
    stall_s: float = 30.0
    rebuild_budget_s: float = 30.0


class Outage:
    """The time within one round in which a request has no target. Begins with the first fault."""

    def __init__(self, budget_s: float, now_s: float) -> None:
        self.until_s = now_s + budget_s
        self._budget_s = budget_s
        self._num_faults = 0

    def pause_s(self, fault: OutriderError, now_s: float) -> float:
        """Seconds to wait before the next attempt; raises PeerLost when the budget is used up.

        The first fault of an outage begins its time, because the round before it may have taken long.
        """
        self._num_faults += 1
        if self._num_faults == 1:
            self.until_s = now_s + self._budget_s
            return 0.0
        if now_s >= self.until_s:
            message = f"{fault.message}, and no target took the request over within {self._budget_s:g} seconds"
            raise PeerLost(message) from fault
        return float(min(FIRST_PAUSE_S * 2 ** (self._num_faults - 2), LONGEST_PAUSE_S, self.until_s - now_s))
