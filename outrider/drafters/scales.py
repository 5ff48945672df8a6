"""How sure the draft may be of its children, learned from what was accepted.

Let the target's score of a token be the draft's plus a Gumbel error of scale s, independent of other tokens. Then the
target takes child i of a row with the chance softmax(z / s)_i, where z are the draft's scores with their noise: one law
for greedy decoding and for sampling. A draft that is flatter than it is right has s < 1. The one number is fitted by
one equation, "first children are accepted as often as their shares say", by stochastic approximation (Robbins and
Monro, 1951).
"""

import math
from collections.abc import Sequence

from outrider.parameters import Rule, SessionSpec
from outrider.token_tree import TokenTree

# At temperature 0 and above: measured with the embedded pair.
FIRST_SCALES = {False: 0.45, True: 0.7}
MIN_SCALE, MAX_SCALE = 0.05, 4.0
# Step sizes in the logarithm: about the inverse of the equation's slope over the number of samples, and never 0,
# because texts change.
GAIN, HEAD_START, LEAST_GAIN = 4.0, 80, 0.004


class Scales:
    """One scale for each rule and temperature, 0 or above it. Belongs to the device thread."""

    def __init__(self) -> None:
        self._logs: dict[tuple[Rule, bool], float] = {}
        self._counts: dict[tuple[Rule, bool], int] = {}

    def of(self, spec: SessionSpec) -> float:
        """The scale to grow a tree with."""
        key = _bucket(spec)
        return math.exp(self._logs.get(key, math.log(FIRST_SCALES[key[1]])))

    def learn(self, spec: SessionSpec, tree: TokenTree, token_ids: Sequence[int]) -> None:
        """Takes into account that these tokens followed the ones that a tree with values was grown behind."""
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


def _bucket(spec: SessionSpec) -> tuple[Rule, bool]:
    return spec.acceptance.rule, spec.sampling.temperature > 0
