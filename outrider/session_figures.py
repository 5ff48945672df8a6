"""What the answers of one stream cost, for its span. Opens no span, and tells nothing of a token."""

from dataclasses import dataclass

from outrider.compute_times import ComputeTimes
from outrider.process import tracing

# What took longer gets an event of its own; everything else is in the sums.
SLOW_US = 500_000


@dataclass(slots=True)
class SessionFigures:
    """Sums over a stream."""

    num_answers: int = 0
    num_forwards: int = 0
    queue_us: int = 0
    compute_us: int = 0

    def add(self, times: ComputeTimes) -> None:
        """Counts an answer."""
        self.num_answers += 1
        self.num_forwards += times.forward_count
        self.queue_us += times.queue_us
        self.compute_us += times.compute_us
        # The first one read the prompt.
        if self.num_answers == 1 or times.queue_us + times.compute_us > SLOW_US:
            name = "first answer" if self.num_answers == 1 else "slow answer"
            tracing.event(name, queue_us=times.queue_us, compute_us=times.compute_us, forwards=times.forward_count)

    def tell(self) -> None:
        """Writes the sums into the open span."""
        tracing.note(
            answers=self.num_answers, forwards=self.num_forwards, queue_us=self.queue_us, compute_us=self.compute_us
        )
