"""Rates, lengths and their standard errors from what was counted.

Rounds of one text are not independent, texts are: every standard error is one over texts.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.acceptance.runs import WHOLE, AcceptanceCounts, AcceptancePlan, RuleCounts


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its standard error."""

    value: float
    error: float

    def show(self, form: str, scale: float = 1.0) -> str:
        """Both multiplied by a scale, for instance "2.31 ± 0.04"."""
        return f"{self.value * scale:{form}} ± {self.error * scale:{form}}"


def mean(values: Iterable[float]) -> Estimate:
    """Mean of independent values; the error of a single one is not known, and infinite."""
    numbers = list(values)
    error = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else math.inf
    return Estimate(statistics.fmean(numbers), error)


def share(parts: Sequence[int], wholes: Sequence[int]) -> Estimate:
    """sum(parts) / sum(wholes) of independent pairs; the error to first order, as a ratio of two means has it."""
    rate = sum(parts) / sum(wholes)
    rests = mean(part - rate * whole for part, whole in zip(parts, wholes, strict=True))
    return Estimate(rate, rests.error * len(parts) / sum(wholes))


def tokens_per_round(tally: RuleCounts) -> float:
    """Mean accepted length with the token that the target adds."""
    return 1 + tally.accepted / tally.rounds


class AcceptanceSummary:
    """The figures of a run."""

    def __init__(self, plan: AcceptancePlan, counts: AcceptanceCounts) -> None:
        self.plan, self.counts = plan, counts

    def tallies(self, temperature: float, rule: str, top_n: int) -> list[RuleCounts]:
        """Those of one setting, in the order of the prompts."""
        wanted = (temperature, rule, top_n)
        return [each for each in self.counts.tallies if (each.temperature, each.rule, each.top_n) == wanted]

    def length(self, temperature: float, rule: str, top_n: int) -> Estimate:
        """Tokens a round."""
        return mean(map(tokens_per_round, self.tallies(temperature, rule, top_n)))

    def rate(self, temperature: float, rule: str, top_n: int) -> Estimate:
        """Accepted of all draft tokens that were evaluated."""
        tallies = self.tallies(temperature, rule, top_n)
        return share([each.accepted for each in tallies], [each.evaluated for each in tallies])

    def gain(self, temperature: float, rule: str, other: str) -> Estimate:
        """Tokens a round of a rule over those of another one, of the same places."""
        pairs = (self.tallies(temperature, name, self.plan.top_n) for name in (rule, other))
        return mean(tokens_per_round(one) - tokens_per_round(two) for one, two in zip(*pairs, strict=True))

    def overlap(self, temperature: float, top_n: int) -> Estimate:
        """How often `ratio` keeps the next draft token, exactly, over the places of the texts."""
        return mean(self._overlaps(temperature, top_n))

    def loss(self, temperature: float, top_n: int) -> Estimate:
        """What truncating and rounding the draft's distribution to top_n tokens costs of that, of the same places."""
        pairs = zip(self._overlaps(temperature, WHOLE), self._overlaps(temperature, top_n), strict=True)
        return mean(whole - cut for whole, cut in pairs)

    def hop_bytes(self, temperature: float, top_n: int) -> tuple[float, int]:
        """Bytes of the larger hop of a round under `ratio`: on average, and at most."""
        tallies = self.tallies(temperature, "ratio", top_n)
        rounds = sum(each.rounds for each in tallies)
        return sum(each.hop_bytes for each in tallies) / rounds, max(each.most_hop_bytes for each in tallies)

    def _overlaps(self, temperature: float, top_n: int) -> list[float]:
        found = self.counts.overlaps
        return [each.mean for each in found if (each.temperature, each.top_n) == (temperature, top_n)]
