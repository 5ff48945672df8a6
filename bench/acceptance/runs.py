"""What the measurement of acceptance counts, and the counting: rounds of every rule behind the same tokens.

The texts are the target's own, at the temperature that is measured, because a draft is asked about nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.acceptance.trials import ModelPair, Readers, Trial, hop_bytes
from outrider.engine.quantise import DEFAULT_TOP_N
from outrider.parameters import Acceptance, Rule

RULES = (
    Acceptance(rule=Rule.MATCH),
    Acceptance(rule=Rule.RATIO),
    Acceptance(rule=Rule.BLOCK),
    Acceptance(rule=Rule.LENIENT, lenience=0.5),
    Acceptance(rule=Rule.TYPICAL),
)
TOP_NS = (8, 16, 32, 64, 128, 256)
# Stands for the draft's whole distribution, which no message carries.
WHOLE = 0
# Sessions of one forward: their rows together stay below what a runner computes at once.
AT_A_TIME = 25


@dataclass(frozen=True, slots=True)
class AcceptancePlan:
    """One run: texts of text_len tokens behind every prompt, and rounds at every stride-th token of them."""

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    draft_count: int = 5
    text_len: int = 96
    stride: int = 4
    rules: tuple[Acceptance, ...] = RULES
    top_n: int = DEFAULT_TOP_N
    """Most tokens of a draft's distribution where it is not what is compared."""
    top_ns: tuple[int, ...] = TOP_NS

    @property
    def places(self) -> range:
        """Tokens of a text behind which there are rounds."""
        return range(0, self.text_len - self.draft_count, self.stride)

    def settings(self, temperature: float) -> list[tuple[Acceptance, int]]:
        """Rules with the size of a draft's distribution; at temperature 0 that is one token in any case."""
        settings = [(acceptance, self.top_n) for acceptance in self.rules]
        if temperature:
            ratio = Acceptance(rule=Rule.RATIO)
            settings += [(ratio, top_n) for top_n in self.top_ns if top_n != self.top_n]
        return settings


@dataclass(frozen=True, slots=True)
class RuleCounts:
    """All rounds of one prompt under one setting. Draft tokens are evaluated up to the first that is not accepted."""

    temperature: float
    rule: str
    top_n: int
    prompt: int
    rounds: int
    accepted: int
    evaluated: int
    hop_bytes: int
    most_hop_bytes: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """Sum of min(target, draft) over the vocabulary, averaged over a text: how often `ratio` keeps a next token."""

    temperature: float
    top_n: int
    prompt: int
    mean: float


@dataclass(slots=True)
class AcceptanceCounts:
    """Everything of one run."""

    tallies: list[RuleCounts] = field(default_factory=list)
    overlaps: list[Overlap] = field(default_factory=list)


def measure(
    pair: ModelPair, plan: AcceptancePlan, prompts: Sequence[Sequence[int]], tell: Callable[[str], None]
) -> AcceptanceCounts:
    """Runs the plan; prompts are token ids."""
    counts = AcceptanceCounts()
    for temperature in plan.temperatures:
        for first in range(0, len(prompts), AT_A_TIME):
            part = prompts[first : first + AT_A_TIME]
            tell(f"Temperature {temperature:g}, texts {first + 1} to {first + len(part)} of {len(prompts)}.")
            readers = Readers(pair, part, temperature, plan.text_len)
            _measure_texts(readers, plan, temperature, first, counts)
            readers.close()
    return counts


def _measure_texts(
    readers: Readers, plan: AcceptancePlan, temperature: float, first: int, counts: AcceptanceCounts
) -> None:
    by_setting: dict[tuple[Acceptance, int], list[list[tuple[Trial, int]]]] = {}
    overlaps: list[Mapping[int, list[float]]] = []
    for place in plan.places:
        readers.go_to(place)
        if temperature:
            overlaps.append(readers.overlaps(plan.top_ns))
        for acceptance, top_n in plan.settings(temperature):
            trials = readers.round(acceptance, plan.draft_count, top_n)
            by_setting.setdefault((acceptance, top_n), []).append(list(zip(trials, readers.lengths, strict=True)))
    for (acceptance, top_n), by_place in by_setting.items():
        for number, rounds in enumerate(zip(*by_place, strict=True), start=first):
            sizes = [hop_bytes(trial.tree, base_len) for trial, base_len in rounds]
            counts.tallies.append(
                RuleCounts(
                    temperature,
                    name_of(acceptance),
                    top_n,
                    number,
                    rounds=len(rounds),
                    accepted=sum(len(trial.walk.accepted_rows) for trial, _ in rounds),
                    evaluated=sum(trial.walk.evaluated_count for trial, _ in rounds),
                    hop_bytes=sum(sizes),
                    most_hop_bytes=max(sizes),
                )
            )
    for top_n in overlaps[0] if overlaps else ():
        for number, values in enumerate(zip(*(each[top_n] for each in overlaps), strict=True), start=first):
            counts.overlaps.append(Overlap(temperature, top_n, number, sum(values) / len(values)))


def name_of(acceptance: Acceptance) -> str:
    """A rule with its settings, for instance "lenient 0.5"."""
    return " ".join((acceptance.rule, *(f"{value:g}" for value in acceptance.settings.values())))
