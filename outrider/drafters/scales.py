"""Estimates of how sure the draft may be of its children, by their scores and by rank, learned from acceptance.

Let the target's score of a token be the draft's plus a Gumbel error of scale s, independent of other tokens. Then the
target takes child i of a row with the chance softmax(z / s)_i, where z are the draft's scores with their noise: one
form for greedy decoding and for sampling. A draft that is flatter than it is right has s < 1. The one number is fitted
by one equation, "first children are accepted as often as their shares say", by stochastic approximation (Robbins and
Monro, 1951).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.engine.noise import Purpose
from outrider.parameters import Rule, SessionSpec
from outrider.token_tree import TokenTree

# At temperature 0 and above: measured with the embedded pair.
FIRST_SCALES = {False: 0.45, True: 0.7}
MIN_SCALE, MAX_SCALE = 0.05, 4.0
# Step sizes in the logarithm: about the inverse of the equation's slope over the number of samples, and never 0,
# because texts change.
GAIN, HEAD_START, LEAST_GAIN = 4.0, 80, 0.004
# Chances that the first, second and further children of a row are accepted, before anything is known: measured with the
# embedded pair at temperature 0 and above, and worth as much as so many rows.
FIRST_RATES = {
    False: (0.656, 0.153, 0.061, 0.031, 0.018, 0.014, 0.009, 0.009),
    True: (0.581, 0.164, 0.076, 0.044, 0.032, 0.022, 0.011, 0.009),
}
RATE_HEAD_START, LEAST_RATE_GAIN = 50, 0.002
# Distance from 0 and 1 that the chance of a child keeps, after the ones before it.
MARGIN = 0.001


class Scales:
    """Scales of draft scores, one for each rule and temperature, 0 or above it. Belongs to the device thread."""

    def __init__(self) -> None:
        self._logs: dict[tuple[Rule, bool], float] = {}
        self._counts: dict[tuple[Rule, bool], int] = {}

    def of(self, spec: SessionSpec) -> float:
        """Scale to grow a session's tree with."""
        key = _bucket(spec)
        return math.exp(self._logs.get(key, math.log(FIRST_SCALES[key[1]])))

    def learn(self, spec: SessionSpec, tree: TokenTree, token_ids: Sequence[int]) -> None:
        """Takes into account that these tokens followed the ones that a tree with values was grown after."""
        key, row = _bucket(spec), 0
        for token_id in token_ids:
            children = tree.children(row)
            if not children:
                return
            first = children[0]
            share = tree.values[first - 1] / (tree.values[row - 1] if row else 1.0)
            count = self._counts[key] = self._counts.get(key, 0) + 1
            gain = max(GAIN / (count + HEAD_START), LEAST_GAIN)
            log = math.log(self.of(spec)) + gain * (share - (tree.token_ids[first - 1] == token_id))
            self._logs[key] = min(max(log, math.log(MIN_SCALE)), math.log(MAX_SCALE))
            row = next((child for child in children if tree.token_ids[child - 1] == token_id), 0)
            if not row:
                return


class Ranks:
    """Chances of acceptance by rank for each rule, temperature, 0 or above it, and noise. Of the device thread.

    What is counted is how often a child is accepted where those before it are not, because that says the same in trees
    with few children and with many.
    """

    def __init__(self) -> None:
        self._chances: dict[tuple[Rule, bool, Purpose], list[float]] = {}
        self._counts: dict[tuple[Rule, bool, Purpose], list[int]] = {}

    def of(self, spec: SessionSpec, noise: Purpose) -> tuple[float, ...]:
        """The chance that the k-th child of a row is accepted, by k; they fall, are above 0 and add up to less than 1.

        `noise` is what children are drawn with; see outrider.drafters.model_drafter.
        """
        rates: list[float] = []
        left = 1.0
        for chance in self._of(spec, noise):
            rate = left * chance
            left -= rate
            rates.append(min(rate, *rates[-1:], 1.0))
        return tuple(rates)

    def learn(self, spec: SessionSpec, noise: Purpose, tree: TokenTree, token_ids: Sequence[int]) -> None:
        """Takes into account that these tokens followed the ones that a tree of a fixed shape was made after."""
        key, row = (*_bucket(spec), noise), 0
        chances = self._chances.setdefault(key, self._of(spec, noise))
        counts = self._counts.setdefault(key, [0] * len(chances))
        for token_id in token_ids:
            taken = 0
            for rank, child in enumerate(tree.children(row)):
                counts[rank] += 1
                is_taken = tree.token_ids[child - 1] == token_id
                chance = chances[rank] + max(1 / (counts[rank] + RATE_HEAD_START), LEAST_RATE_GAIN) * (
                    is_taken - chances[rank]
                )
                chances[rank] = min(max(chance, MARGIN), 1 - MARGIN)
                if is_taken:
                    taken = child
                    break
            if not taken:
                return
            row = taken

    def _of(self, spec: SessionSpec, noise: Purpose) -> list[float]:
        """The chance of each child where the ones before it are not accepted."""
        rule, is_hot = _bucket(spec)
        known = self._chances.get((rule, is_hot, noise))
        if known is not None:
            return known
        rates = FIRST_RATES[is_hot]
        return [rate / (1 - sum(rates[:rank])) for rank, rate in enumerate(rates)]


@dataclass(frozen=True, slots=True)
class Experience:
    """Scales and rates that a drafter has learned about its trees."""

    scales: Scales = field(default_factory=Scales)
    ranks: Ranks = field(default_factory=Ranks)


def _bucket(spec: SessionSpec) -> tuple[Rule, bool]:
    return spec.acceptance.rule, spec.sampling.temperature > 0
