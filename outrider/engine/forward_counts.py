"""How many forwards there were, of how many sessions and rows. The device thread counts, and any thread may read."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class ForwardCounts:
    """The forwards of one runner."""

    num_rows: int = 0
    batch_sizes: dict[int, int] = field(default_factory=dict)
    """How many forwards had each number of sessions."""

    def add(self, num_sessions: int, num_rows: int) -> None:
        """Counts a forward."""
        self.num_rows += num_rows
        self.batch_sizes[num_sessions] = self.batch_sizes.get(num_sessions, 0) + 1
