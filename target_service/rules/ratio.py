"""The rule `ratio`: speculative sampling.

Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", 2023, arXiv 2211.17192; Chen
et al., "Accelerating large language model decoding with speculative sampling", 2023, arXiv 2302.01318. With a lenience
below 1 it is the rule `lenient` of the former's appendix A.5, whose output has at most target_probs / lenience.
"""

import numpy as np
from torch import Tensor

from target_service.rules.outcome import ChainOutcome, conclude, draft_probs, probs_at, support_probs


def ratio(
    target_probs: Tensor,
    draft_token_ids: Tensor,
    support_ids: Tensor,
    support_weights: Tensor,
    uniforms: Tensor,
    lenience: float = 1.0,
) -> ChainOutcome:
    """Keeps a draft token with probability min(1, target / (lenience * draft)), up to the first that is not kept.

    target_probs [B, K + 1, V] float64: row i is the target's distribution after i draft tokens. draft_token_ids [B, K]
    int64 were drawn from the distributions support_ids and support_weights [B, K, N] int64
    (sampling.draft_distribution.DraftDistributions; weight 0 is padding), each with noise of its own. uniforms [B, K]
    float64 are uniforms in (0, 1), independent of those draws. The next token follows (target - lenience * draft)+ over
    the whole vocabulary where a token is rejected.
    """
    tested = probs_at(target_probs[:, :-1], draft_token_ids[:, :, None])[:, :, 0]
    needed = lenience * draft_probs(draft_token_ids, support_ids, support_weights)
    kept = uniforms.numpy() * needed < tested
    accepted_count = np.cumprod(kept, axis=1, dtype=np.int64).sum(axis=1)
    return conclude(target_probs, accepted_count, support_ids, lenience * support_probs(support_weights))
