"""From samples to figures: medians, ratios of requests that stood side by side, and whether each target is met.

A ratio is the median over pairs of the same turn, prompt and temperature, because a noisy host touches the two of a
pair alike. Where two readings of a target are possible the stricter one is taken: a floor is that of the fastest read,
a speedup is held against S in full although plain decoding through the gateway pays no round trip, and the bytes of a
hop are those of both directions.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

from bench.common import Spread, spread
from bench.rounds.formulas import Costs, Prediction, is_divided, parts, predict
from bench.rounds.samples import (
    AUTO,
    BARE,
    CONTEXT_LEN,
    DRAFT,
    MEMORY,
    ONE_BY_ONE,
    PLAIN,
    ROLES,
    TARGET,
    Measurements,
    ModelShape,
    RequestSample,
    RoundSample,
    StepPoint,
    fixed,
)

BEST_OF = (2, 4, 6)
QUIET_SHARE = 0.8  # of the fastest read of the memory, which the median reaches on a quiet machine
# Of models as small as the embedded pair, where milliseconds say more than a ratio to a cache's bandwidth.
SMALL_TARGET_BYTES, SMALL_DRAFT_BYTES = 30_000_000, 3_000_000
SMALL_STEP_MS, SMALL_FIVE_ROWS_MS, SMALL_DRAFT_STEP_MS = 0.8, 1.1, 0.15
STEP_OVER_FLOOR, FIVE_ROWS_OVER_ONE = 1.25, 1.3
PLAIN_OVER_BARE, AUTO_OVER_PLAIN = 0.85, 0.97
OVERHEAD_MS = 0.25
SHARE_OF_FORMULA, SPEEDUP_AT_ZERO = 0.9, 1.5
HOP_BYTES = 200


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second of the fastest read with the reader that reached it, and the best reader's median."""

    reader: str
    fastest: float
    median: float


class RoundsSummary:
    """Figures of one run. Methods raise KeyError or ValueError about what was not measured."""

    def __init__(self, measurements: Measurements, target: ModelShape, draft: ModelShape) -> None:
        self.measurements = measurements
        self.shapes = {TARGET: target, DRAFT: draft}

    @property
    def temperatures(self) -> list[float]:
        """Temperatures of the requests, in their order."""
        return list(dict.fromkeys(each.temperature for each in self.measurements.requests))

    @property
    def settings(self) -> list[str]:
        """Settings of the requests: without a gateway, plain, by K, and the gateway's own choice."""
        found = {each.setting for each in self.measurements.requests}
        by_count = sorted(found - {BARE, ONE_BY_ONE, PLAIN, AUTO})
        return [name for name in (BARE, ONE_BY_ONE, PLAIN, *by_count, AUTO) if name in found]

    def bandwidth(self, buffer: str) -> Bandwidth:
        """How fast a buffer was read. The fastest read counts, because a busy machine would raise the floor."""
        speeds: dict[str, list[float]] = {}
        for each in self.measurements.reads:
            if each.buffer == buffer:
                speeds.setdefault(each.reader, []).append(each.num_bytes / each.ms * 1e3)
        reader = max(speeds, key=lambda name: max(speeds[name]))
        return Bandwidth(reader, max(speeds[reader]), max(median(values) for values in speeds.values()))

    @property
    def busy(self) -> bool:
        """Whether others used the machine so much that times mean little: a usual read is far from the fastest."""
        memory = self.bandwidth(MEMORY)
        return memory.median < QUIET_SHARE * memory.fastest

    def floor_ms(self, role: str) -> float:
        """A model's weights over the bandwidth at which as many bytes, or more than any cache holds, were read.

        The faster of the two counts: what could be read past all caches could be read with them.
        """
        fastest = max(self.bandwidth(buffer).fastest for buffer in (role, MEMORY))
        return self.shapes[role].step_bytes / fastest * 1e3

    def operators_ms(self, role: str, rows: int) -> Spread:
        """The step in PyTorch's operators."""
        return spread(each.ms for each in self.measurements.operators if (each.role, each.rows) == (role, rows))

    def steps(self) -> dict[StepPoint, Spread]:
        """All points of the bare engine loop."""
        found: dict[StepPoint, list[float]] = {}
        for each in self.measurements.steps:
            found.setdefault(each.point, []).append(each.ms)
        return {point: spread(values) for point, values in found.items()}

    def step_ms(self, role: str, rows: int, temperature: float | None = None) -> Spread:
        """A bare step at CONTEXT_LEN, by default at the first temperature."""
        own = self.temperatures[0] if temperature is None else temperature
        return self.steps()[StepPoint(role, rows, CONTEXT_LEN, own)]

    def ping_ms(self, role: str, *, rested: bool = False) -> Spread:
        """Empty round trips on a role's stream, one behind the other or each after a pause."""
        return spread(each.ms for each in self.measurements.pings if (each.role, each.rested) == (role, rested))

    def two_pings_ms(self, *, rested: bool = False) -> float:
        """Medians of both streams together, and what a round may cost besides."""
        return sum(self.ping_ms(role, rested=rested).median for role in ROLES) + OVERHEAD_MS

    def costs(self, temperature: float) -> Costs:
        """What the formulas need, at one temperature."""
        verify = {
            point.rows: found.median
            for point, found in self.steps().items()
            if (point.role, point.context_len, point.temperature) == (TARGET, CONTEXT_LEN, temperature)
        }
        draft_ms = self.step_ms(DRAFT, 1, temperature).median
        return Costs(verify, draft_ms, self.ping_ms(TARGET).median, self.ping_ms(DRAFT).median)

    def requests(self, setting: str, temperature: float) -> list[RequestSample]:
        """The requests of a setting."""
        wanted = setting, temperature
        return [each for each in self.measurements.requests if (each.setting, each.temperature) == wanted]

    def speeds(self, setting: str, temperature: float) -> dict[tuple[int, int, float], float]:
        """Tokens a second of each request, less the first token and what its prompt took in the bare loop beside it.

        Not since the client saw the first token: one that comes late would make all others seem to come fast.
        """
        prompts_s = {each.key: each.first_token_s for each in self.requests(BARE, temperature)}
        return {
            each.key: (len(each.token_ids) - 1) / (each.seconds - prompts_s[each.key])
            for each in self.requests(setting, temperature)
        }

    def speed(self, setting: str, temperature: float) -> Spread:
        """Tokens a second after the first one."""
        return spread(self.speeds(setting, temperature).values())

    def over(self, setting: str, base: str, temperature: float) -> Spread:
        """Speed of a setting over that of another, request by request."""
        bases = self.speeds(base, temperature)
        return spread(speed / bases[key] for key, speed in self.speeds(setting, temperature).items())

    def rounds(self, setting: str, temperature: float) -> list[RoundSample]:
        """The rounds of a setting but for the first of each request, which reads the prompt."""
        return [each for request in self.requests(setting, temperature) for each in request.rounds[1:]]

    def steady(self, setting: str, temperature: float) -> list[RoundSample]:
        """The rounds with a proposal less the first of each request, whose messages may carry the prompt."""
        requests = self.requests(setting, temperature)
        return [each for request in requests for each in speculative(request.rounds[1:])[1:]]

    def opening(self, setting: str, temperature: float) -> list[RoundSample]:
        """The first rounds with a proposal."""
        requests = self.requests(setting, temperature)
        return [each for request in requests for each in speculative(request.rounds)[:1]]

    def prediction(self, setting: str, temperature: float) -> Prediction:
        """What the rounds should have brought by c, v and R."""
        return predict(self.rounds(setting, temperature), self.costs(temperature))

    def best(self, temperature: float) -> str:
        """The fastest fixed setting among those that the target is set for, by its ratio to plain."""
        names = [fixed(count) for count in BEST_OF if self.requests(fixed(count), temperature)]
        return max(names, key=lambda name: self.over(name, PLAIN, temperature).median)

    def outside_ms(self, setting: str, temperature: float) -> Spread:
        """Time of a request that no round accounts for, for each round: text, and the way to the client."""
        return spread(
            (each.seconds * 1e3 - sum(own.round_us for own in each.rounds) / 1e3) / len(each.rounds)
            for each in self.requests(setting, temperature)
            if each.rounds
        )


def speculative(rounds: Iterable[RoundSample]) -> list[RoundSample]:
    """Those with a proposal."""
    return [each for each in rounds if each.draft_count]


@dataclass(frozen=True, slots=True)
class Criterion:
    """A figure, and the limit that it is to keep."""

    what: str
    measured: float
    limit: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether the measured figure keeps the limit."""
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit

    def line(self) -> str:
        """The outcome as a sentence."""
        side = "at most" if self.at_most else "at least"
        return f"{'met' if self.met else 'MISSED'}: {self.what}: {self.measured:.3g}, wanted {side} {self.limit:.3g}"


def criteria(summary: RoundsSummary) -> Iterator[Criterion]:
    """All targets that this run can judge.

    Where a target pass costs as much as a round trip, nobody asks that speculation pays.
    """
    is_small = summary.shapes[TARGET].step_bytes < SMALL_TARGET_BYTES
    one, five = summary.step_ms(TARGET, 1).median, summary.step_ms(TARGET, 5).median
    if is_small:
        yield Criterion("target step, one row, ms", one, SMALL_STEP_MS, True)
        yield Criterion("target step, five rows, ms", five, SMALL_FIVE_ROWS_MS, True)
    else:
        over_floor = one / summary.floor_ms(TARGET)
        yield Criterion("target step, one row, over bytes / bandwidth", over_floor, STEP_OVER_FLOOR, True)
        yield Criterion("target step, five rows over one row", five / one, FIVE_ROWS_OVER_ONE, True)
    if summary.shapes[DRAFT].step_bytes < SMALL_DRAFT_BYTES:
        yield Criterion("draft step, ms", summary.step_ms(DRAFT, 1).median, SMALL_DRAFT_STEP_MS, True)
    for temperature in summary.temperatures:
        at = f"temperature {temperature:g}"
        if not is_small:
            plain = summary.over(PLAIN, BARE, temperature).median
            yield Criterion(f"plain through the gateway over the bare loop, {at}", plain, PLAIN_OVER_BARE)
        if AUTO in summary.settings:
            yield Criterion(f"auto over plain, {at}", summary.over(AUTO, PLAIN, temperature).median, AUTO_OVER_PLAIN)
        if not is_small:
            best = summary.best(temperature)
            speedup = summary.over(best, PLAIN, temperature).median
            share = speedup / summary.prediction(best, temperature).over_synchronous
            yield Criterion(f"measured speedup over S, {best}, {at}", share, SHARE_OF_FORMULA)
            if temperature == 0:
                yield Criterion(f"speculative over plain, {best}, {at}", speedup, SPEEDUP_AT_ZERO)
    steady = [summary.steady(setting, each) for each in summary.temperatures for setting in summary.settings]
    divided = [each for rounds in steady for each in rounds if is_divided(each)]
    if divided:
        overhead_ms = median(parts(each)["overhead"] for each in divided)
        for rested in (False, True):
            what = f"gateway overhead a round, ms, two pings{' after a pause' if rested else ''} + {OVERHEAD_MS}"
            yield Criterion(what, overhead_ms, summary.two_pings_ms(rested=rested), True)
        yield Criterion("most bytes a hop, both ways", max(each.hop_bytes for each in divided), HOP_BYTES, True)
