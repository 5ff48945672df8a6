"""From samples to figures: medians, ratios of requests that stood side by side, and what the formulas say of them.

Pure, and knows no table. A ratio is the median over pairs of the same turn, prompt and temperature, because a noisy
host touches the two of a pair alike.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from bench.formulas import Costs, Prediction, predict
from bench.samples import (
    AUTO,
    BARE,
    DRAFT,
    ONE_BY_ONE,
    PLAIN,
    TARGET,
    Measurements,
    RequestSample,
    RoundSample,
    StepPoint,
    fixed,
)
from bench.spread import Spread, median, spread

CONTEXT_LEN = 128  # at which steps are compared with floors, and c and v are taken
MEMORY = "memory"  # the buffer that no cache holds
BEST_OF = (2, 4, 6)
QUIET_SHARE = 0.8  # of the fastest read of the memory, which the median reaches on a quiet machine

Key = tuple[int, int, float]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the floor of one model depends on."""

    name: str
    step_bytes: int
    """Bytes of weights that a step touches."""
    key_value_bytes: int
    """Bytes of keys and values that a step reads at CONTEXT_LEN."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second of the fastest read with the reader that reached it, and the best reader's median."""

    reader: str
    fastest: float
    median: float


class Summary:
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
        heat = self.temperatures[0] if temperature is None else temperature
        return self.steps()[StepPoint(role, rows, CONTEXT_LEN, heat)]

    def ping_ms(self, role: str, *, rested: bool = False) -> Spread:
        """Empty round trips on a role's stream, one behind the other or each after a pause."""
        return spread(each.ms for each in self.measurements.pings if (each.role, each.rested) == (role, rested))

    def costs(self, temperature: float) -> Costs:
        """What the formulas need, at one temperature."""
        verify = {
            point.rows: found.median
            for point, found in self.steps().items()
            if (point.role, point.context_len, point.temperature) == (TARGET, CONTEXT_LEN, temperature)
        }
        draft_ms = self.step_ms(DRAFT, 1, temperature).median
        return Costs(verify, draft_ms, self.ping_ms(TARGET).median, self.ping_ms(DRAFT).median)

    @property
    def busy(self) -> bool:
        """Whether others used the machine so much that times mean little: a usual read is far from the fastest."""
        memory = self.bandwidth(MEMORY)
        return memory.median < QUIET_SHARE * memory.fastest

    def requests(self, setting: str, temperature: float) -> list[RequestSample]:
        """The requests of a setting."""
        return [
            each for each in self.measurements.requests if (each.setting, each.temperature) == (setting, temperature)
        ]

    def speed(self, setting: str, temperature: float) -> Spread:
        """Tokens a second after the first one."""
        return spread(self._speeds(setting, temperature).values())

    def over(self, setting: str, base: str, temperature: float) -> Spread:
        """Speed of a setting over that of another, request by request."""
        bases = self._speeds(base, temperature)
        return spread(speed / bases[key] for key, speed in self._speeds(setting, temperature).items())

    def _speeds(self, setting: str, temperature: float) -> dict[Key, float]:
        """Tokens a second of each request, less the first token and what its prompt took in the bare loop beside it.

        Not since the client saw the first token: one that comes late would make all others seem to come fast.
        """
        prompts_s = {each.key: each.first_token_s for each in self.requests(BARE, temperature)}
        return {
            each.key: (len(each.token_ids) - 1) / (each.seconds - prompts_s[each.key])
            for each in self.requests(setting, temperature)
        }

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
        return spread(_outside_ms(each) for each in self.requests(setting, temperature) if each.rounds)


def speculative(rounds: Iterable[RoundSample]) -> list[RoundSample]:
    """Those with a proposal."""
    return [each for each in rounds if each.draft_count]


def _outside_ms(request: RequestSample) -> float:
    rounds_ms = sum(each.round_us for each in request.rounds) / 1e3
    return (request.seconds * 1e3 - rounds_ms) / len(request.rounds)
