"""What the measurement of acceptance measures, and the measuring: rounds of every rule behind the same tokens.

The texts are the target's own, at the temperature that is measured, because a draft is asked about nothing else.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bench.hop_bytes import hop_bytes
from bench.trials import Pair, Readers, Trial
from outrider.engine.sampling.draft_distribution import DEFAULT_TOP_N
from outrider.parameters import Acceptance, Rule

RULES = (
    Acceptance(rule=Rule.MATCH),
    Acceptance(rule=Rule.RATIO),
    Acceptance(rule=Rule.BLOCK),
    Acceptance(rule=Rule.LENIENT, lenience=0.5),
    Acceptance(rule=Rule.TYPICAL),
)
TOP_NS = (8, 16, 32, 64, 128, 256)
# Stands for the draft's whole law, which no message carries.
WHOLE = 0
# Sessions of one forward: their rows together stay below what a runner computes at once.
AT_A_TIME = 25


@dataclass(frozen=True, slots=True)
class Plan:
    """One run: texts of text_len tokens behind every prompt, and rounds at every stride-th token of them."""

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    draft_count: int = 5
    text_len: int = 96
    stride: int = 4
    rules: tuple[Acceptance, ...] = RULES
    top_n: int = DEFAULT_TOP_N
    """Most tokens of a draft's law where it is not what is compared."""
    top_ns: tuple[int, ...] = TOP_NS


@dataclass(frozen=True, slots=True)
class Tally:
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
class Results:
    """Everything of one run."""

    tallies: list[Tally] = field(default_factory=list)
    overlaps: list[Overlap] = field(default_factory=list)


def measure(pair: Pair, plan: Plan, prompts: Sequence[Sequence[int]], tell: Callable[[str], None]) -> Results:
    """Runs the plan; prompts are token ids."""
    results = Results()
    for temperature in plan.temperatures:
        for first in range(0, len(prompts), AT_A_TIME):
            part = prompts[first : first + AT_A_TIME]
            tell(f"Temperature {temperature:g}, texts {first + 1} to {first + len(part)} of {len(prompts)}.")
            readers = Readers(pair, part, temperature, plan.text_len)
            _measure_texts(readers, plan, temperature, first, results)
            readers.close()
    return results


def settings(plan: Plan, temperature: float) -> Iterator[tuple[Acceptance, int]]:
    """Rules with the size of a draft's law; at temperature 0 a law is one token, whatever its size may be."""
    yield from ((acceptance, plan.top_n) for acceptance in plan.rules)
    if temperature:
        ratio = Acceptance(rule=Rule.RATIO)
        yield from ((ratio, top_n) for top_n in plan.top_ns if top_n != plan.top_n)


def _measure_texts(readers: Readers, plan: Plan, temperature: float, first: int, results: Results) -> None:
    places = range(0, plan.text_len - plan.draft_count, plan.stride)
    trials: dict[tuple[Acceptance, int], list[list[tuple[Trial, int]]]] = {}
    overlaps: list[Mapping[int, list[float]]] = []
    for place in places:
        readers.go_to(place)
        if temperature:
            overlaps.append(readers.overlaps(plan.top_ns))
        for setting in settings(plan, temperature):
            round_trials = readers.round(setting[0], plan.draft_count, setting[1])
            trials.setdefault(setting, []).append(list(zip(round_trials, readers.lengths, strict=True)))
    for (acceptance, top_n), by_place in trials.items():
        for number, of_prompt in enumerate(zip(*by_place, strict=True), start=first):
            results.tallies.append(tally(temperature, name_of(acceptance), top_n, number, of_prompt))
    for top_n in overlaps[0] if overlaps else ():
        for number, values in enumerate(zip(*(each[top_n] for each in overlaps), strict=True), start=first):
            results.overlaps.append(Overlap(temperature, top_n, number, sum(values) / len(values)))


def tally(temperature: float, rule: str, top_n: int, prompt: int, trials: Iterable[tuple[Trial, int]]) -> Tally:
    """Counts the rounds of one prompt, each with the length that it builds on."""
    rounds = list(trials)
    sizes = [hop_bytes(trial.tree, base_len).most for trial, base_len in rounds]
    return Tally(
        temperature,
        rule,
        top_n,
        prompt,
        len(rounds),
        sum(len(trial.way.accepted_rows) for trial, _ in rounds),
        sum(trial.way.evaluated_count for trial, _ in rounds),
        sum(sizes),
        max(sizes),
    )


def name_of(acceptance: Acceptance) -> str:
    """A rule with its settings, for instance "lenient 0.5"."""
    return " ".join((acceptance.rule, *(f"{value:g}" for value in acceptance.settings.values())))
