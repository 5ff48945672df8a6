"""Distributions of the most probable tokens with integer weights, which a draft both draws from and sends.

Any distribution of a draft gives the target's distribution as long as the verifier tests with the one that was drawn
from. So the draft truncates and rounds first, and draws from the result: what travels is not an approximation of
anything.

On the CPU a row's distribution and its draw are bitwise independent of the other rows.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.devices import send
from outrider.engine.noise import first_uniforms
from outrider.engine.ops import Ops
from outrider.parameters import DraftDistribution

MAX_TOP_N = 256
DEFAULT_TOP_N = 64
# What the weights of a row add up to, up to rounding. All but three weights of a distribution then fit into two bytes.
WEIGHT_SUM = 65535

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DraftDistributions:
    """One distribution a row: token_ids [R, N] and weights [R, N], both int64 on the CPU.

    The probability of an id is its weight over the sum of its row's. Weight 0 is padding, after all other entries of
    its row, whatever id stands there.
    """

    token_ids: Tensor
    weights: Tensor

    def draw(self, keys: Tensor) -> Tensor:
        """Ids [R] int64 drawn by the inverse of the cumulative weights, with one uniform of each key [R] int64.

        Raises ValueError about a row that has no token left; see `sizes`.
        """
        cumulative = self.weights.numpy().cumsum(axis=1)
        if not cumulative[:, -1].all():
            raise ValueError(f"row {int(cumulative[:, -1].argmin())} has no token left to draw")
        uniforms = first_uniforms(keys.tolist())
        # Below the last sum for every uniform, because weights of a row add up to less than 2**24.
        places = (cumulative <= (uniforms * cumulative[:, -1])[:, None]).sum(axis=1)
        return torch.from_numpy(self.token_ids.numpy()[np.arange(len(places)), places])

    def without(self, token_ids: Tensor) -> "DraftDistributions":
        """The distributions of the next siblings, where siblings are drawn without replacement, one after another.

        token_ids [R] int64 are those just drawn: their weights become 0, and all others stay what they are. What is
        drawn from the result is what the target tests with, and travels in two bytes. A row may have no token left.
        """
        weights = self.weights.numpy()
        drawn = (self.token_ids.numpy() == token_ids.numpy()[:, None]) & (weights > 0)
        # The drawn one goes to the end of its row, where padding stands; padding before it changes nothing there.
        order = drawn.argsort(axis=1, kind="stable")
        left = np.take_along_axis(np.where(drawn, 0, weights), order, axis=1)
        return DraftDistributions(self.token_ids.gather(1, torch.from_numpy(order)), torch.from_numpy(left))

    @property
    def sizes(self) -> list[int]:
        """Number of tokens of each row, 0 where all of them have been drawn."""
        sizes: list[int] = np.count_nonzero(self.weights.numpy(), axis=1).tolist()
        return sizes

    def probs(self, token_ids: Tensor) -> list[float]:
        """Probability of one id of each row [R] int64, 0 outside the support."""
        weights = self.weights.numpy()
        chosen = np.where(self.token_ids.numpy() == token_ids.numpy()[:, None], weights, 0).sum(axis=1)
        probs: list[float] = (chosen / weights.sum(axis=1)).tolist()
        return probs

    def distributions(self) -> list[DraftDistribution]:
        """The distributions as they travel, without padding."""
        rows = zip(self.token_ids.tolist(), self.weights.tolist(), self.sizes, strict=True)
        return [DraftDistribution(tuple(ids[:size]), tuple(weights[:size])) for ids, weights, size in rows]


def quantise(scores: Tensor, top_n: int, ops: Ops) -> DraftDistributions:
    """The distributions of scores [R, V] float32 (log-probabilities up to a constant, -inf outside the support).

    The first top_n tokens in the order of (-score, id), at most as many as there are; of them those whose share rounds
    to a weight of at least 1. A row without a finite score, or with NaN or +inf, is the one-hot distribution of id 0: a
    chain's length must not depend on the tokens that were drawn.

    Raises ValueError unless top_n is in [1, 256].
    """
    if not 1 <= top_n <= MAX_TOP_N:
        raise ValueError(f"top_n is {top_n}, but must be in [1, {MAX_TOP_N}]")
    largest, ids = _top(scores, min(top_n, scores.shape[1]))
    # NaN and +inf come first in a selection, so that the best score shows whether its row is sound.
    sound = np.isfinite(largest[:, 0])
    if not sound.all():
        unsound = ~sound
        largest[unsound], ids[unsound] = -np.inf, 0
        largest[unsound, 0] = 0
    probs = ops.softmax(send(largest, scores.device)).cpu().numpy()
    return DraftDistributions(torch.from_numpy(ids), torch.from_numpy(np.rint(probs * WEIGHT_SUM).astype(np.int64)))


def _top(scores: Tensor, count: int) -> tuple[Floats, Ints]:
    """The first `count` scores and ids [R, count] of each row in the order of (-score, id)."""
    # One more than wanted, because a selection takes any of equal ones and in any order.
    selected = scores.topk(min(count + 1, scores.shape[1]))
    largest, ids = selected.values.cpu().numpy(), selected.indices.cpu().numpy()
    tied = ((largest[:, 1:] == largest[:, :-1]) & (largest[:, 1:] > -np.inf)).any(axis=1)
    # Beyond the support all are equal, and none of them matters; nor does anything in a row that has no distribution.
    rows = (tied & np.isfinite(largest[:, 0])).nonzero()[0]
    if len(rows):
        # No rarity: where logits are computed in bfloat16, nearly every row has equal ones among its best.
        chosen = scores[send(rows, scores.device)]
        # Integers in the order of (score, -id), all different. Adding 0 makes one zero of two. The bits of a float are
        # a sign and a magnitude that rises with the number.
        bits = (chosen + 0.0).view(torch.int32).long()
        magnitudes = bits & 0x7FFFFFFF
        ordered = torch.where(bits < 0, -magnitudes, magnitudes)
        ranks = (ordered << 32) - torch.arange(scores.shape[1], device=scores.device)
        places = ranks.topk(largest.shape[1]).indices
        largest[rows], ids[rows] = chosen.gather(1, places).cpu().numpy(), places.cpu().numpy()
    return np.ascontiguousarray(largest[:, :count]), ids[:, :count]
