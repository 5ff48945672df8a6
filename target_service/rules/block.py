"""The rule `block`: block verification.

Sun et al., "Block verification accelerates speculative decoding", 2024, arXiv 2403.10444. It follows the target's
distribution as `ratio` does, and in expectation never keeps fewer tokens: a token that the target likes less than the
draft may be kept for the sake of one after it.
"""

import numpy as np
from torch import Tensor

from target_service.rules.outcome import ChainOutcome, Floats, conclude, draft_probs, probs_at, support_probs

# Stands in the place of a draft probability of 0, which no token that was drawn has.
TINY = float(np.finfo(np.float64).tiny)


def block(
    target_probs: Tensor, draft_token_ids: Tensor, support_ids: Tensor, support_weights: Tensor, uniforms: Tensor
) -> ChainOutcome:
    """Keeps the longest prefix of each chain whose own test succeeds.

    Arguments as in target_service.rules.ratio. All K tests are made, whatever comes of the others: the uniform and the
    draft's draw of every position are looked at in every round, so neither may serve a later one.
    """
    tested = probs_at(target_probs[:, :-1], draft_token_ids[:, :, None])[:, :, 0]
    ratios = tested / np.maximum(draft_probs(draft_token_ids, support_ids, support_weights), TINY)
    # w_0 = 1 and w_i = min(1, w_(i-1) * target_i / draft_i), [B, K + 1]: the chance to keep i tokens or more.
    weights = np.ones((ratios.shape[0], ratios.shape[1] + 1))
    for place in range(ratios.shape[1]):
        weights[:, place + 1] = np.minimum(1, weights[:, place] * ratios[:, place])
    support = support_probs(support_weights)
    at_support = np.where(support > 0, probs_at(target_probs[:, :-1], support_ids), 0)
    # h = S / (S + 1 - w) with S = sum over the vocabulary of (w * target - draft)+, of each inner prefix [B, K - 1].
    # All tokens outside the draft's support are the target's alone.
    inner, wanted, drafted = weights[:, 1:-1], at_support[:, 1:], support[:, 1:]
    outside = np.maximum(1 - _row_sums(wanted), 0)
    spare = inner * outside + _row_sums(np.maximum(inner[:, :, None] * wanted - drafted, 0))
    whole = spare + (1 - inner)
    # Where S is 0 and w is 1 both distributions agree, and a longer prefix is kept anyway.
    inner_chances = np.where(whole > 0, spare / np.maximum(whole, TINY), 1)
    chances = np.concatenate((inner_chances, weights[:, -1:]), axis=1)
    lengths = np.arange(1, weights.shape[1], dtype=np.int64)
    accepted_count = np.where(uniforms.numpy() < chances, lengths, 0).max(axis=1)
    # The residual is (weight * target - draft)+, here in units of the target; a weight of 0 is never the last kept.
    return conclude(target_probs, accepted_count, support_ids, support / np.maximum(weights[:, :-1, None], TINY))


def _row_sums(values: Floats) -> Floats:
    """Sums [B, K] along rows [B, K, N] in order, to which padding adds nothing."""
    sums: Floats = values.cumsum(axis=2)[:, :, -1]
    return sums
