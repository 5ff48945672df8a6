"""The rule `typical`: keeps draft tokens that the target finds likely enough.

Cai et al., "Medusa: simple LLM inference acceleration framework with multiple decoding heads", 2024, arXiv 2401.10774.
Not exact. Here the target draws its own token first and follows it where it was proposed; only where it was not, a
typical one is followed in its place.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.token_tree import TokenTree


def exp_entropies(scores: Tensor, target_probs: Tensor) -> list[float]:
    """exp(-entropy) of each row, in (0, 1]: 1 where the target is certain.

    scores [R, V] float32 are log-probabilities up to a constant, -inf outside the support, and target_probs [R, V]
    float64 their softmax.
    """
    best, places = scores.max(dim=1, keepdim=True)
    gaps = (best.double() - scores).masked_fill(target_probs == 0, 0)
    # entropy = mean gap - log of the largest probability. A cumulative sum runs in order, whatever rows stand beside
    # it.
    mean_gaps = (gaps * target_probs).cumsum(dim=1)[:, -1:]
    pairs = torch.cat((target_probs.gather(1, places), mean_gaps), dim=1).tolist()
    return [prob * math.exp(-gap) for prob, gap in pairs]


def typical_children(tree: TokenTree, child_probs: Sequence[float], limits: Sequence[float]) -> list[int]:
    """Most probable child above the row's limit for the root and each row, of equal ones the lowest; 0 for none.

    child_probs[r - 1] is the target's probability of the token of row r after its parent; limits[r] is
    min(epsilon, delta * exp(-entropy)) of the target's distribution after row r, limits[0] after the root.
    """
    chosen = [0] * (len(tree) + 1)
    for row, (parent, prob) in enumerate(zip(tree.parents, child_probs, strict=True), start=1):
        rival = chosen[parent]
        if prob > limits[parent] and (not rival or prob > child_probs[rival - 1]):
            chosen[parent] = row
    return chosen
