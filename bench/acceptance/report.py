"""Rates, lengths and their standard errors from what was counted, and the report of them as Markdown.

Rounds of one text are not independent, texts are: every standard error is one over texts.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, product

from bench.acceptance.runs import AcceptancePlan, RuleCounts, name_of
from outrider.cli.bench.common import markdown

SYMBOLS = """\
Every rule guesses and decides behind the same prefixes of texts that the target wrote at that temperature; nothing is
committed, so the rules' places are equal. Acceptance rate: accepted of all draft tokens that were evaluated. Tokens a
round: accepted and the target's own one. ±: one standard error, over texts. Bytes: of the
larger hop of a round, request and answer together."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean of some figures, with its standard error."""

    value: float
    error: float

    def show(self, form: str) -> str:
        """Text of the estimate, for instance "2.31 ± 0.04"."""
        return f"{self.value:{form}} ± {self.error:{form}}"


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
    """All figures of a run."""

    def __init__(self, plan: AcceptancePlan, counts: Sequence[RuleCounts]) -> None:
        self.plan, self.counts = plan, counts

    def tallies(self, temperature: float, rule: str, top_n: int) -> list[RuleCounts]:
        """Counts of one setting, in the order of the prompts."""
        wanted = (temperature, rule, top_n)
        return [each for each in self.counts if (each.temperature, each.rule, each.top_n) == wanted]

    def length(self, temperature: float, rule: str, top_n: int) -> Estimate:
        """Mean tokens of a round, over the prompts of one setting."""
        return mean(map(tokens_per_round, self.tallies(temperature, rule, top_n)))

    def rate(self, temperature: float, rule: str, top_n: int) -> Estimate:
        """Accepted of all draft tokens that were evaluated."""
        tallies = self.tallies(temperature, rule, top_n)
        return share([each.accepted for each in tallies], [each.evaluated for each in tallies])

    def gain(self, temperature: float, rule: str, other: str) -> Estimate:
        """Tokens a round of a rule over those of another one, of the same places."""
        pairs = (self.tallies(temperature, name, self.plan.top_n) for name in (rule, other))
        return mean(tokens_per_round(one) - tokens_per_round(two) for one, two in zip(*pairs, strict=True))

    def hop_bytes(self, temperature: float, top_n: int) -> tuple[float, int]:
        """Bytes of the larger hop of a round under `ratio`: on average, and at most."""
        tallies = self.tallies(temperature, "ratio", top_n)
        rounds = sum(each.rounds for each in tallies)
        return sum(each.hop_bytes for each in tallies) / rounds, max(each.most_hop_bytes for each in tallies)


def render(summary: AcceptanceSummary) -> str:
    """Report of a run: all tables, and what their figures mean."""
    plan = summary.plan
    hot = [temperature for temperature in plan.temperatures if temperature]
    names = [name_of(each) for each in plan.rules]
    over = [(f"acceptance rate, temperature {each:g}", "tokens a round") for each in plan.temperatures]
    rates = [[name] for name in names]
    for row, temperature in product(rates, plan.temperatures):
        row += [figure(temperature, row[0], plan.top_n).show(".3f") for figure in (summary.rate, summary.length)]
    sections = {
        f"Rules, K = {plan.draft_count}, distributions of {plan.top_n} tokens": markdown(["rule", *chain(*over)], rates)
    }
    if hot:
        gains = [
            (f"{one} over {two}", *(summary.gain(each, one, two).show(".3f") for each in hot))
            for one, two in (("block", "ratio"), ("ratio", "match"), ("block", "match"))
            if {one, two} <= set(names)
        ]
        hops = [[str(top_n)] for top_n in plan.top_ns]
        for (row, top_n), each in product(zip(hops, plan.top_ns, strict=True), hot):
            average, most = summary.hop_bytes(each, top_n)
            row += [summary.length(each, "ratio", top_n).show(".3f"), f"{average:.0f}", str(most)]
        titles = [(f"tokens a round, temperature {each:g}", "bytes a hop", "at most") for each in hot]
        sections |= {
            "Tokens a round, paired differences": markdown(["", *(f"temperature {each:g}" for each in hot)], gains),
            f"The rule ratio by top-N, K = {plan.draft_count}": markdown(["top-N", *chain(*titles)], hops),
        }
    sections["What the figures are"] = SYMBOLS
    return "\n\n".join(f"### {title}\n\n{text}" for title, text in sections.items())
