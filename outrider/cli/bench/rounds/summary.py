"""From samples to figures: medians, ratios of requests that stood side by side, and what a round should cost.

A ratio is the median over pairs of the same turn, prompt and temperature, because a noisy host touches the two of a
pair alike. A floor is that of the fastest read, and the bytes of a hop are those of both directions.

The formula is in units of one target step, the bare engine's forward over one row: c is a draft step, v what a further
row of a verification adds, R_t and R_d are empty round trips on the streams of target and draft. A round with K draft
tokens costs 1 + vK + cK + R_t + R_d; with tau tokens a round the speedup over plain decoding that pays a round trip for
every token is S = tau (1 + R_t) / (1 + vK + cK + R_t + R_d) (Leviathan et al. 2023, with the round trips added).
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from outrider.cli.bench.common import AUTO, PLAIN, Spread, spread
from outrider.cli.bench.rounds.samples import (
    BARE,
    DRAFT,
    ENGINE,
    MEMORY,
    PING,
    READ,
    TARGET,
    Measurements,
    ModelSize,
    RequestSample,
    RoundSample,
)

QUIET_SHARE = 0.8  # of the fastest read of the memory, which the median reaches on a quiet machine


@dataclass(frozen=True, slots=True)
class Costs:
    """The symbols of the formula. Steps are milliseconds of the target by rows."""

    verify_ms: Mapping[int, float]
    c: float
    target_ping: float
    draft_ping: float

    def v(self, draft_count: int) -> float:
        """Cost that each of K further rows adds to a target step, in target steps.

        Rows that were not measured lie on the straight line between their neighbours, or through the last two.
        """
        rows, known = draft_count + 1, sorted(self.verify_ms)
        found_ms = self.verify_ms.get(rows)
        if found_ms is None:
            right = min(max(bisect_left(known, rows), 1), len(known) - 1)
            low, high = known[right - 1], known[right]
            slope = (self.verify_ms[high] - self.verify_ms[low]) / (high - low)
            found_ms = self.verify_ms[low] + slope * (rows - low)
        return (found_ms / self.verify_ms[1] - 1) / draft_count

    def round_cost(self, draft_count: int) -> float:
        """A round in target steps; a plain round comes unasked, and costs one."""
        if not draft_count:
            return 1.0
        return 1 + (self.v(draft_count) + self.c) * draft_count + self.target_ping + self.draft_ping

    def speedup(self, rounds: Sequence[RoundSample]) -> float:
        """S of rounds as they were, so that the last and shorter ones of a request count as what they are.

        With the same K in all rounds it is the formula. Raises ValueError when there are no rounds.
        """
        if not rounds:
            raise ValueError("there is no speed without rounds")
        steps = sum(self.round_cost(each.draft_count) for each in rounds)
        return sum(each.num_tokens for each in rounds) * (1 + self.target_ping) / steps


def tokens_per_round(rounds: Sequence[RoundSample]) -> float:
    """Tokens a round, tau, all rounds counted."""
    return sum(each.num_tokens for each in rounds) / len(rounds)


def acceptance_rate(rounds: Sequence[RoundSample]) -> float | None:
    """Accepted over evaluated draft tokens; None when none was evaluated."""
    evaluated = sum(each.evaluated_count for each in rounds)
    return sum(each.accepted_count for each in rounds) / evaluated if evaluated else None


def parts(each: RoundSample) -> dict[str, float]:
    """Milliseconds of a round by its parts. A way is what is left of a wait: wire, protobuf, event loops.

    The overhead is the whole round without both computes: the sum of queues, ways and gateway.
    """
    parts_us = {
        "draft queue": each.draft_queue_us,
        "draft compute": each.draft_compute_us,
        "draft way": each.draft_wait_us - each.draft_queue_us - each.draft_compute_us,
        "verify queue": each.verify_queue_us,
        "verify compute": each.verify_compute_us,
        "verify way": each.verify_wait_us - each.verify_queue_us - each.verify_compute_us,
        "gateway": each.round_us - each.draft_wait_us - each.verify_wait_us,
        "overhead": each.round_us - each.draft_compute_us - each.verify_compute_us,
    }
    return {name: part_us / 1e3 for name, part_us in parts_us.items()}


class RoundsSummary:
    """Figures of one run. Methods raise KeyError or ValueError about what was not measured."""

    def __init__(self, measurements: Measurements, sizes: Mapping[str, ModelSize]) -> None:
        self.measurements, self.sizes = measurements, sizes

    @property
    def temperatures(self) -> list[float]:
        """Temperatures of the requests, in their order."""
        return list(dict.fromkeys(each.temperature for each in self.measurements.requests))

    @property
    def settings(self) -> list[str]:
        """Settings of the requests: without a gateway, plain, by K, and the gateway's own choice."""
        found = {each.setting for each in self.measurements.requests}
        by_count = sorted(found - {BARE, PLAIN, AUTO})
        return [name for name in (BARE, PLAIN, *by_count, AUTO) if name in found]

    def bandwidth(self, buffer: str) -> tuple[float, float]:
        """Bytes a second with which a buffer was read at best, which a busy machine lowers least, and usually."""
        reads = [each for each in self.measurements.times if (each.instrument, each.role) == (READ, buffer)]
        speeds = [each.num_bytes / each.ms * 1e3 for each in reads]
        return max(speeds), median(speeds)

    @property
    def busy(self) -> bool:
        """Whether others used the machine so much that times mean little: a usual read is far from the fastest."""
        fastest, usual = self.bandwidth(MEMORY)
        return usual < QUIET_SHARE * fastest

    def floor_ms(self, role: str) -> float:
        """A model's weights over the bandwidth at which as many bytes, or more than any cache holds, were read.

        The faster of the two counts: what could be read past all caches could be read with them.
        """
        fastest = max(self.bandwidth(buffer)[0] for buffer in (role, MEMORY))
        return self.sizes[role].step_bytes / fastest * 1e3

    def time_ms(self, instrument: str, role: str, rows: int = 0, temperature: float = 0.0) -> Spread:
        """Milliseconds that an instrument measured."""
        wanted = instrument, role, rows, temperature
        times = self.measurements.times
        return spread(each.ms for each in times if (each.instrument, each.role, each.rows, each.temperature) == wanted)

    def step_ms(self, role: str, rows: int, temperature: float | None = None) -> Spread:
        """A bare step, by default at the first temperature."""
        return self.time_ms(ENGINE, role, rows, self.temperatures[0] if temperature is None else temperature)

    def costs(self, temperature: float) -> Costs:
        """Costs that the formula needs, at one temperature."""
        row_counts = {each.rows for each in self.measurements.times if each.instrument == ENGINE}
        verify_ms = {rows: self.step_ms(TARGET, rows, temperature).median for rows in row_counts}
        others_ms = self.step_ms(DRAFT, 1, temperature), self.time_ms(PING, TARGET), self.time_ms(PING, DRAFT)
        return Costs(verify_ms, *(each.median / verify_ms[1] for each in others_ms))

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
        found = [request.rounds[1:] for request in self.requests(setting, temperature)]
        speculative = ([each for each in rounds if each.draft_count] for rounds in found)
        return [each for rounds in speculative for each in rounds[1:]]

    def formula(self, setting: str, temperature: float) -> float:
        """Speedup S of a setting's rounds by the formula."""
        return self.costs(temperature).speedup(self.rounds(setting, temperature))
