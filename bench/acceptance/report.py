"""Rates, lengths and their standard errors from what was counted, and the report of them as Markdown.

Rounds of one text are not independent, texts are: every standard error is one over texts.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.acceptance.runs import WHOLE, AcceptanceCounts, AcceptancePlan, RuleCounts, name_of
from bench.common import markdown

# Points lost by a simulated pair of acceptance 0.68 at temperature 1, by top-N; as peaked as those of large models.
SIMULATED = {8: 0.60, 16: 0.48, 32: 0.39, 64: 0.30, 128: 0.24, 256: 0.18}
SYMBOLS = """\
Every rule guesses and decides behind the same prefixes of texts that the target wrote at that temperature; nothing is
committed, so the rules' places are equal. Acceptance rate: accepted of all draft tokens that were evaluated. Tokens a
round: accepted and the target's own one. ±: one standard error, over texts. Loss: what a distribution of N tokens with
16-bit weights costs of the chance that `ratio` keeps the next draft token, sum of min(target, draft), in points of a
hundred. Bytes: of the larger hop of a round, request and answer together."""


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

    def overlaps(self, temperature: float, top_n: int) -> list[float]:
        """How often `ratio` keeps the next draft token, exactly, over the places of every text."""
        found = self.counts.overlaps
        return [each.mean for each in found if (each.temperature, each.top_n) == (temperature, top_n)]

    def loss(self, temperature: float, top_n: int) -> Estimate:
        """What truncating and rounding the draft's distribution to top_n tokens costs of that, of the same places."""
        pairs = zip(self.overlaps(temperature, WHOLE), self.overlaps(temperature, top_n), strict=True)
        return mean(whole - cut for whole, cut in pairs)

    def hop_bytes(self, temperature: float, top_n: int) -> tuple[float, int]:
        """Bytes of the larger hop of a round under `ratio`: on average, and at most."""
        tallies = self.tallies(temperature, "ratio", top_n)
        rounds = sum(each.rounds for each in tallies)
        return sum(each.hop_bytes for each in tallies) / rounds, max(each.most_hop_bytes for each in tallies)


def render(summary: AcceptanceSummary) -> str:
    """All tables of a run, and what their figures mean."""
    plan = summary.plan
    hot = [temperature for temperature in plan.temperatures if temperature]
    columns = [f"temperature {each:g}" for each in hot]
    names = [name_of(each) for each in plan.rules]
    rates = [
        [
            name,
            *(
                figure(each, name, plan.top_n).show(".3f")
                for each in plan.temperatures
                for figure in (summary.rate, summary.length)
            ),
        ]
        for name in names
    ]
    over = [(f"acceptance rate, temperature {each:g}", "tokens a round") for each in plan.temperatures]
    sections = {
        f"Rules, K = {plan.draft_count}, distributions of {plan.top_n} tokens": markdown(
            ["rule", *(title for pair in over for title in pair)], rates
        )
    }
    if hot:
        gains = [
            (f"{one} over {two}", *(summary.gain(each, one, two).show(".3f") for each in hot))
            for one, two in (("block", "ratio"), ("ratio", "match"), ("block", "match"))
            if {one, two} <= set(names)
        ]
        losses = [
            [
                str(top_n),
                *(summary.loss(each, top_n).show(".2f", 100) for each in hot),
                f"{SIMULATED[top_n]:.2f}" if top_n in SIMULATED else "-",
            ]
            for top_n in plan.top_ns
        ]
        kept = [mean(summary.overlaps(each, WHOLE)).show(".2f", 100) for each in hot]
        losses.append(["whole distribution: kept", *kept, "68"])
        hops = []
        for top_n in plan.top_ns:
            hops.append([str(top_n)])
            for each in hot:
                average, most = summary.hop_bytes(each, top_n)
                hops[-1] += [summary.length(each, "ratio", top_n).show(".3f"), f"{average:.0f}", str(most)]
        sections |= {
            "Tokens a round, paired differences": markdown(["", *columns], gains),
            "Loss of acceptance by top-N, points": markdown(["top-N", *columns, "simulated, temperature 1"], losses),
            f"The rule ratio by top-N, K = {plan.draft_count}": markdown(
                [
                    "top-N",
                    *(title for each in columns for title in (f"tokens a round, {each}", "bytes a hop", "at most")),
                ],
                hops,
            ),
        }
    sections["What the figures are"] = SYMBOLS
    return "\n\n".join(f"### {title}\n\n{text}" for title, text in sections.items())
