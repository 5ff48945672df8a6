"""What a service says of its time: what an answer cost, and how busy the service is."""

import time
from dataclasses import dataclass, field
from typing import NamedTuple


class ComputeTimes(NamedTuple):
    """Plain form of the message: waiting and device time in microseconds and rows, shared batches counted whole."""

    queue_us: int = 0
    compute_us: int = 0
    forward_count: int = 0
    row_count: int = 0
    prompt_row_count: int = 0


@dataclass(frozen=True, slots=True)
class ServiceLoad:
    """Plain form of the message."""

    waiting_tokens: int = 0
    own_waiting_tokens: int = 0
    owner_count: int = 1
    free_blocks: int = 0
    cached_blocks: int = 0
    step_us: int = 0
    step_rows: int = 0
    prefill_us_per_token: float = 0.0
    is_draining: bool = False
    drain_left_ms: int = 0
    came_s: float = 0.0
    """When it came, on the clock of the loop that has heard it."""


@dataclass(slots=True)
class Meter:
    """Adds up the cost of one answer. `arrived_ns` is when its request came, on time.perf_counter_ns."""

    arrived_ns: int = field(default_factory=time.perf_counter_ns)
    _queue_ns: int | None = None
    _compute_ns: int = 0
    _forward_count: int = 0
    _row_count: int = 0
    _prompt_row_count: int = 0

    def add(
        self, started_ns: int, ended_ns: int, num_rows: int, num_prompt_rows: int = 0, num_forwards: int = 1
    ) -> None:
        """Counts a forward over so many rows, some of prompts, with the sampling that followed it; or several."""
        if self._queue_ns is None:
            self._queue_ns = max(0, started_ns - self.arrived_ns)
        self._compute_ns += ended_ns - started_ns
        self._forward_count += num_forwards
        self._row_count += num_rows
        self._prompt_row_count += num_prompt_rows

    def extend(self, num_ns: int) -> None:
        """Counts more time on the device, with no forward."""
        self._compute_ns += num_ns

    def times(self) -> ComputeTimes:
        return ComputeTimes(
            (self._queue_ns or 0) // 1000,
            self._compute_ns // 1000,
            self._forward_count,
            self._row_count,
            self._prompt_row_count,
        )
