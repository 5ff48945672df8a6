"""Every target as one line: what was measured, the limit, and whether it is met. Pure; chooses nothing in our favour.

Where two readings of a target are possible the stricter one is taken: a floor is that of the fastest read, a
speedup is held against S in full although plain decoding through the gateway pays no round trip, and the bytes of a
hop are those of both directions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from bench.formulas import is_divided, parts
from bench.samples import AUTO, BARE, DRAFT, PLAIN, TARGET, RoundSample
from bench.spread import median
from bench.summary import Summary

# Of models as small as the embedded pair, where milliseconds say more than a ratio to a cache's bandwidth.
SMALL_TARGET_BYTES, SMALL_DRAFT_BYTES = 30_000_000, 3_000_000
SMALL_STEP_MS, SMALL_FIVE_ROWS_MS, SMALL_DRAFT_STEP_MS = 0.8, 1.1, 0.15
STEP_OVER_FLOOR, FIVE_ROWS_OVER_ONE = 1.25, 1.3
PLAIN_OVER_BARE, AUTO_OVER_PLAIN = 0.85, 0.97
OVERHEAD_MS = 0.25
SHARE_OF_FORMULA, SPEEDUP_AT_ZERO = 0.9, 1.5
HOP_BYTES = 200


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target."""

    what: str
    measured: float
    limit: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether the measured figure keeps the limit."""
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit

    def line(self) -> str:
        """The verdict as a sentence."""
        side = "at most" if self.at_most else "at least"
        return f"{'met' if self.met else 'MISSED'}: {self.what}: {self.measured:.3g}, wanted {side} {self.limit:.3g}"


def verdicts(summary: Summary) -> list[Verdict]:
    """All targets that this run can judge."""
    found = [*_engine(summary)]
    for temperature in summary.temperatures:
        found += _gateway(summary, temperature)
        found += _speculation(summary, temperature)
    return [*found, *_rounds(summary)]


def is_small(summary: Summary) -> bool:
    """Whether a target pass costs as much as a round trip: then no target asks that speculation pays."""
    return summary.shapes[TARGET].step_bytes < SMALL_TARGET_BYTES


def _engine(summary: Summary) -> Iterator[Verdict]:
    one, five = summary.step_ms(TARGET, 1).median, summary.step_ms(TARGET, 5).median
    if is_small(summary):
        yield Verdict("target step, one row, ms", one, SMALL_STEP_MS, True)
        yield Verdict("target step, five rows, ms", five, SMALL_FIVE_ROWS_MS, True)
    else:
        over_floor = one / summary.floor_ms(TARGET)
        yield Verdict("target step, one row, over bytes / bandwidth", over_floor, STEP_OVER_FLOOR, True)
        yield Verdict("target step, five rows over one row", five / one, FIVE_ROWS_OVER_ONE, True)
    if summary.shapes[DRAFT].step_bytes < SMALL_DRAFT_BYTES:
        yield Verdict("draft step, ms", summary.step_ms(DRAFT, 1).median, SMALL_DRAFT_STEP_MS, True)


def _gateway(summary: Summary, temperature: float) -> Iterator[Verdict]:
    at = f"temperature {temperature:g}"
    if not is_small(summary):
        plain = summary.over(PLAIN, BARE, temperature).median
        yield Verdict(f"plain through the gateway over the bare loop, {at}", plain, PLAIN_OVER_BARE)
    if AUTO in summary.settings:
        yield Verdict(f"auto over plain, {at}", summary.over(AUTO, PLAIN, temperature).median, AUTO_OVER_PLAIN)


def _speculation(summary: Summary, temperature: float) -> Iterator[Verdict]:
    if is_small(summary):
        return
    best = summary.best(temperature)
    at = f"{best}, temperature {temperature:g}"
    speedup = summary.over(best, PLAIN, temperature).median
    share = speedup / summary.prediction(best, temperature).over_synchronous
    yield Verdict(f"measured speedup over S, {at}", share, SHARE_OF_FORMULA)
    if temperature == 0:
        yield Verdict(f"speculative over plain, {at}", speedup, SPEEDUP_AT_ZERO)


def _rounds(summary: Summary) -> Iterator[Verdict]:
    rounds = [
        each
        for temperature in summary.temperatures
        for setting in summary.settings
        for each in summary.steady(setting, temperature)
        if is_divided(each)
    ]
    if not rounds:
        return
    overhead_ms = median(parts(each).overhead for each in rounds)
    for rested in (False, True):
        pings_ms = sum(summary.ping_ms(role, rested=rested).median for role in (TARGET, DRAFT))
        what = f"gateway overhead a round, ms, two pings{' after a pause' if rested else ''} + {OVERHEAD_MS}"
        yield Verdict(what, overhead_ms, pings_ms + OVERHEAD_MS, True)
    yield Verdict("most bytes a hop, both ways", max(map(hop_bytes, rounds)), HOP_BYTES, True)


def hop_bytes(each: RoundSample) -> int:
    """Bytes between the gateway and the one service to which they are more."""
    return max(each.draft_bytes, each.verify_bytes)
