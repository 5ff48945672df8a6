"""What the calls of Rollback on one link took, and took back. Makes no call."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.process.metrics import Tally

# A call waits for the step that is running; the last is longer than its timeout.
BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


@dataclass(slots=True)
class Rollbacks:
    """The calls so far."""

    seconds: Tally = field(default_factory=lambda: Tally(BOUNDS_S))
    num_tokens: int = 0
    """Tokens that caches lost by them."""


def together(all_rollbacks: Sequence[Rollbacks]) -> Rollbacks:
    """The sum over several links."""
    summed = Rollbacks()
    for each in all_rollbacks:
        summed.seconds.add_tally(each.seconds)
        summed.num_tokens += each.num_tokens
    return summed
