"""The arithmetic of the report: what a speculative round should cost and bring, and of what it was made.

Everything is in units of one target step, the bare engine's forward over one row: c is a draft step, v what a further
row of a verification adds, R_t and R_d are empty round trips on the streams of target and draft. A round with K draft
tokens costs 1 + vK + cK + R_t + R_d; with tau tokens a round the speedup over plain decoding that pays a round trip for
every token is S = tau (1 + R_t) / (1 + vK + cK + R_t + R_d) (Leviathan et al. 2023, with the round trips added).
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.rounds.samples import RoundSample


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds of the bare parts: a target step by rows, a draft step of one row, empty round trips."""

    verify_ms: Mapping[int, float]
    draft_ms: float
    target_ping_ms: float
    draft_ping_ms: float

    @property
    def unit_ms(self) -> float:
        """One target step of one row."""
        return self.verify_ms[1]

    @property
    def c(self) -> float:
        """A draft step in target steps."""
        return self.draft_ms / self.unit_ms

    @property
    def target_way(self) -> float:
        """R_t."""
        return self.target_ping_ms / self.unit_ms

    @property
    def draft_way(self) -> float:
        """R_d."""
        return self.draft_ping_ms / self.unit_ms

    def v(self, draft_count: int) -> float:
        """What each of K further rows adds to a target step, in target steps.

        Rows that were not measured lie on the straight line between their neighbours, or through the last two.
        """
        rows, known = draft_count + 1, sorted(self.verify_ms)
        found_ms = self.verify_ms.get(rows)
        if found_ms is None:
            right = min(max(bisect_left(known, rows), 1), len(known) - 1)
            low, high = known[right - 1], known[right]
            slope = (self.verify_ms[high] - self.verify_ms[low]) / (high - low)
            found_ms = self.verify_ms[low] + slope * (rows - low)
        return (found_ms / self.unit_ms - 1) / draft_count

    def round_cost(self, draft_count: int) -> float:
        """A round in target steps; a plain round comes unasked, and costs one."""
        if not draft_count:
            return 1.0
        return 1 + (self.v(draft_count) + self.c) * draft_count + self.target_way + self.draft_way


@dataclass(frozen=True, slots=True)
class Prediction:
    """What rounds with these draft and token counts should have brought."""

    tokens_per_s: float
    over_synchronous: float
    """S, over plain decoding that pays a round trip for every token."""
    over_plain: float
    """S / (1 + R_t), over plain decoding that pays none, which is how a plain_budget runs."""


def predict(rounds: Sequence[RoundSample], costs: Costs) -> Prediction:
    """S of rounds as they were, so that the last and shorter ones of a request count as what they are.

    With the same K in all rounds it is the formula. Raises ValueError when there are no rounds.
    """
    if not rounds:
        raise ValueError("there is no speed without rounds")
    tokens = sum(each.num_tokens for each in rounds)
    steps = sum(costs.round_cost(each.draft_count) for each in rounds)
    return Prediction(
        tokens_per_s=tokens / (steps * costs.unit_ms / 1e3),
        over_synchronous=tokens * (1 + costs.target_way) / steps,
        over_plain=tokens / steps,
    )


def tokens_per_round(rounds: Sequence[RoundSample]) -> float:
    """tau, all rounds counted."""
    return sum(each.num_tokens for each in rounds) / len(rounds)


def acceptance_rate(rounds: Sequence[RoundSample]) -> float | None:
    """Accepted over evaluated draft tokens; None when none was evaluated."""
    evaluated = sum(each.evaluated_count for each in rounds)
    return sum(each.accepted_count for each in rounds) / evaluated if evaluated else None


def acceptance_by_position(rounds: Iterable[RoundSample]) -> list[float]:
    """Share of accepted draft tokens at each position of a chain, among those that were evaluated there."""
    pairs = [(each.accepted_count, each.evaluated_count) for each in rounds]
    shares = []
    for position in range(1, max((evaluated for _, evaluated in pairs), default=0) + 1):
        reached = [accepted >= position for accepted, evaluated in pairs if evaluated >= position]
        shares.append(sum(reached) / len(reached))
    return shares


def parts(each: RoundSample) -> dict[str, float]:
    """Where a round's time went, in milliseconds. A way is what is left of a wait: wire, protobuf, event loops.

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


def is_divided(each: RoundSample) -> bool:
    """Whether the gateway told the round's parts, which an older one does not."""
    return each.verify_wait_us > 0
