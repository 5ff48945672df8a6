"""Parts that the rules for chains share: their answer, and the probabilities that they compare.

Sizes: B chains of K draft tokens each, V tokens of the vocabulary, distributions of N entries at most. Probabilities
are float64. Every sum runs along its row in order, or is one of integers, so that a chain's outcome does not depend on
the others.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.devices import send

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ChainOutcome:
    """Number [B] int64 of kept draft tokens of each chain, and what the next token follows: [B, V], of any sum.

    A chain that is kept to its end has the target's own distribution there, any other a residual: the caller draws the
    one with the noise of the target's own tokens, and the other with that of corrections.
    """

    accepted_count: Tensor
    probs: Tensor


def probs_at(target_probs: Tensor, token_ids: Tensor) -> Floats:
    """Probabilities [B, K, N] of the ids [B, K, N] in rows [B, K, V]."""
    found: Floats = target_probs.gather(2, send(token_ids.numpy(), target_probs.device)).cpu().numpy()
    return found


def support_probs(support_weights: Tensor) -> Floats:
    """Probabilities [B, K, N] of the entries of the draft's distributions."""
    weights = support_weights.numpy()
    probs: Floats = weights / weights.sum(axis=2, keepdims=True)
    return probs


def draft_probs(draft_token_ids: Tensor, support_ids: Tensor, support_weights: Tensor) -> Floats:
    """Probability [B, K] of each draft token under the distribution that it was drawn from."""
    weights, drafted = support_weights.numpy(), draft_token_ids.numpy()
    own = (support_ids.numpy() == drafted[:, :, None]) * weights
    probs: Floats = own.sum(axis=2) / weights.sum(axis=2)
    return probs


def conclude(
    target_probs: Tensor, accepted_count: NDArray[np.int64], support_ids: Tensor, subtracted: Floats
) -> ChainOutcome:
    """The outcome of chains that keep accepted_count [B] of their tokens.

    `subtracted` [B, K, N] is what a residual takes away at support_ids [B, K, N], in the target's own units; only the
    entries of the first rejected position are read.
    """
    device, num_drafts = target_probs.device, support_ids.shape[1]
    every, counts = np.arange(len(accepted_count)), torch.from_numpy(accepted_count)
    # After a chain that is kept nothing is subtracted, at whatever ids.
    places = accepted_count.clip(max=num_drafts - 1)
    taken = subtracted[every, places] * (accepted_count < num_drafts)[:, None]
    rows = target_probs[send(every, device), send(accepted_count, device)]
    ids = send(support_ids.numpy()[every, places], device)
    return ChainOutcome(counts, residual(rows, ids, send(taken, device)))


def residual(rows: Tensor, support_ids: Tensor, subtracted: Tensor) -> Tensor:
    """(rows - subtracted)+ [B, V], where `subtracted` [B, N] stands at support_ids [B, N] and is 0 elsewhere.

    Padding is an id again with 0 to subtract. A row that vanishes is given back whole: where the target's distribution
    is the draft's, a rejection has probability 0 up to rounding.
    """
    taken = torch.minimum(rows.gather(1, support_ids), subtracted)
    left = rows.scatter_add(1, support_ids, -taken)
    vanished = left.amax(dim=1, keepdim=True) <= 0
    # On a device asking whether there is one would cost more than the copy.
    is_needed = not vanished.is_cpu or bool(vanished.any())
    return torch.where(vanished, rows, left) if is_needed else left
