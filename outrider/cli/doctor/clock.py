"""Whether the clocks of this machine are sane: deadlines and figures rest on them. Compares with no other machine."""

import time
from dataclasses import dataclass

from outrider.cli.doctor.findings import Finding, ok, warning

CHECK = "clock"
# The year of this version: no clock that goes right shows an earlier one.
LEAST_WALL_S = 1_735_689_600.0
WORST_RESOLUTION_S = 0.001
MOST_DRIFT = 0.05
SHORTEST_S = 0.05


@dataclass(frozen=True, slots=True)
class Instant:
    """Both clocks at once, in seconds."""

    wall_s: float
    monotonic_s: float


def now() -> Instant:
    """Reads the clocks."""
    return Instant(time.time(), time.monotonic())


def resolution_s() -> float:
    """The smallest step of the clock that deadlines are measured with."""
    return time.get_clock_info("monotonic").resolution


def judge(before: Instant, after: Instant, resolution: float) -> Finding:
    """Judges two readings with some work between them."""
    if after.wall_s < LEAST_WALL_S:
        year = time.gmtime(after.wall_s).tm_year
        return warning(CHECK, f"The clock shows the year {year}.", "Set the clock, for instance with NTP.")
    if resolution > WORST_RESOLUTION_S:
        sentence = f"The clock advances in steps of {resolution * 1e3:g} ms, so that times of rounds mean little."
        return warning(CHECK, sentence, "Choose another clock source, see /sys/devices/system/clocksource.")
    passed_s, shown_s = after.monotonic_s - before.monotonic_s, after.wall_s - before.wall_s
    if passed_s >= SHORTEST_S and abs(shown_s - passed_s) > MOST_DRIFT * passed_s + SHORTEST_S:
        sentence = f"The time of day went on by {shown_s:.2f} s while {passed_s:.2f} s passed."
        return warning(CHECK, sentence, "Look whether the machine was suspended, or its clock is being set.")
    return ok(CHECK, f"Clocks agree, and advance in steps of {resolution * 1e9:.0f} ns.")
