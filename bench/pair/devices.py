"""The pairs, how long steps of simulated ones take, and what run-ahead and its rivals would bring them without a host.

The formulas count devices and the network's way, and no process: what they predict is what real services are measured
against. A round of K guesses brings E(K) = (1 - a^(K + 1)) / (1 - a) tokens where each guess is right with chance a.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from outrider.errors import InvalidRequest
from outrider.model_files.model_names import SimulatedModel, embedded_model, parse_simulated

# Like pairs of large models at temperatures of 0 to 1: of what the first choice misses, the second has nearly half.
ACCEPTANCE = (0.75, 0.115, 0.0425, 0.02, 0.015, 0.008, 0.0065, 0.005)
# Of steps with 32 rows on an H100, as far as they are memory's; measured were 1.14 times one row's for 16 rows of 8B.
TARGET_ROWS, DRAFT_ROWS = 0.13, 0.15
PRESETS = {"8b": "h100-8b", "70b": "h100-70b"}
# Pairs that compute, by the draft of sized:200m: the embedded one, and one with a twentieth of the target's weights.
COMPUTING = {"200m": "", "200m-10m": "sized:draft-10m"}
PAIRS = (*PRESETS, *COMPUTING)


def models_of(name: str, stretch: float) -> tuple[str, str]:
    """Target and draft of a pair as services take them; none stretches that computes. Raises InvalidRequest."""
    if name in COMPUTING:
        return "sized:200m", COMPUTING[name] or embedded_model("draft")
    pair = DevicePair.named(name, stretch=stretch)
    return pair.target.name, pair.draft.name


@dataclass(frozen=True, slots=True)
class DevicePair:
    """A target with its draft, both simulated."""

    name: str
    target: SimulatedModel
    draft: SimulatedModel

    @classmethod
    def named(cls, name: str, acceptance: Sequence[float] = ACCEPTANCE, stretch: float = 1.0) -> Self:
        """The pair of a name, whose devices take so many times as long. Raises InvalidRequest."""
        if name not in PRESETS:
            raise InvalidRequest("--pairs", name, f"of {', '.join(PAIRS)}, with commas between")
        ranks = "+".join(f"{each:g}" for each in acceptance)
        target = parse_simulated(f"sim:{PRESETS[name]}@rows={TARGET_ROWS},stretch={stretch:g}")
        draft = parse_simulated(f"sim:h100-1b@acceptance={ranks},rows={DRAFT_ROWS},stretch={stretch:g}")
        if target is None or draft is None:
            raise ValueError(f"{name} is no simulated pair")
        return cls(name, target, draft)

    @property
    def real(self) -> Self:
        """Devices of the same kind in their own time."""
        return replace(self, target=replace(self.target, stretch=1.0), draft=replace(self.draft, stretch=1.0))


@dataclass(frozen=True, slots=True)
class PairLoad:
    """How many streams ask a pair, how long their texts are on average, and the seconds of one way of a message."""

    pair: DevicePair
    streams: int
    context: int
    one_way_s: float

    @property
    def chance(self) -> float:
        """Chance of a guess to be right where all before it are."""
        return self.pair.draft.acceptance[0]

    @property
    def ways_s(self) -> float:
        """The ways of a round: to the draft and back, and to the target and back."""
        return 4 * self.one_way_s

    def target_s(self, rows: int) -> float:
        """Seconds of a step of the target with so many rows of each stream."""
        return self._step_s(self.pair.target, rows)

    def draft_s(self, rows: int) -> float:
        """Seconds of a step of the draft with so many rows."""
        return self._step_s(self.pair.draft, rows)

    def _step_s(self, model: SimulatedModel, rows: int) -> float:
        every = self.streams * rows
        return model.step_s(every, self.streams * self.context, every * self.context)

    def tokens(self, count: int) -> float:
        """Tokens that a round of so many guesses brings a stream."""
        return float(sum(self.chance**place for place in range(count + 1)))


def hit_rate(acceptance: Sequence[float], count: int, branches: int) -> float:
    """The chance that the best of so many branches has the outcome of a round of `count` guesses.

    An outcome is a number of kept guesses and the token after them: another choice than the rejected guess, or any
    after the last one.
    """
    first, *others = acceptance
    chances = [first**kept * each for kept in range(count) for each in others]
    chances += [first**count * each for each in acceptance]
    return sum(sorted(chances, reverse=True)[:branches])


def plain(load: PairLoad, _count: int, _branches: int) -> float:
    """Tokens a second of all streams where the target goes on unasked."""
    return load.streams / load.target_s(1)


def remote(load: PairLoad, count: int, _branches: int) -> float:
    """The draft, the wire and the target follow one another."""
    return load.streams * load.tokens(count) / (load.target_s(count + 1) + count * load.draft_s(1) + load.ways_s)


def hosted(load: PairLoad, count: int, _branches: int) -> float:
    """The draft and the target follow one another on one device."""
    return load.streams * load.tokens(count) / (load.target_s(count + 1) + count * load.draft_s(1))


def run_ahead(load: PairLoad, count: int, branches: int) -> float:
    """Branches are pushed while the target verifies; the better of two ways to go on after a miss.

    The draft reads a round's guesses at once, then grows all branches in `count` steps, and its branches have the
    network's way to go. After a miss it guesses anew and the target waits (JIT), or the target makes a plain step, for
    whose one outcome all branches are.
    """
    hits = hit_rate(load.pair.draft.acceptance, count, branches)
    arms_s = load.draft_s(count + 1) + count * load.draft_s(branches) + load.ways_s
    hit_s, tokens = max(load.target_s(count + 1), arms_s), load.tokens(count)
    waiting = tokens / (hit_s + (1 - hits) * (count * load.draft_s(1) + load.ways_s))
    again = sum(load.pair.draft.acceptance[:branches])
    share = again / (again + 1 - hits)
    plain_s = max(load.target_s(1), load.draft_s(1) + count * load.draft_s(branches) + load.ways_s)
    stepping = (share * tokens + 1 - share) / (share * hit_s + (1 - share) * plain_s)
    return load.streams * max(waiting, stepping)


Formula = Callable[[PairLoad, int, int], float]
"""Tokens a second of all streams together with so many guesses a round and branches."""
