"""K-sequential selection among siblings, for comparison with the rules that are offered.

Sun et al., "SpecTr: fast speculative decoding via optimal transport", 2023, arXiv 2310.15141. It keeps one of k
siblings at least 1 - (1 - 1 / k)^k times as often as the best rule that knows all of them.
"""

import numpy as np

from target_service.rules.outcome import Floats
from target_service.rules.tree_probs import TINY, Ints, TreeOutcome, row_sums

# Halvings after which an interval of [1, k] has no number between its ends.
HALVINGS = 64


def k_sequential(target_probs: Floats, draft_probs: Floats, draft_token_ids: Ints, uniforms: Floats) -> TreeOutcome:
    """Keeps the first of k siblings that passes the test, which is the same for all of them.

    target_probs and draft_probs [B, V] are the distributions after a row, draft_token_ids [B, k] int64 were drawn
    from the latter independently of each other, and so were uniforms [B, k] in (0, 1). A sibling passes with
    probability min(1, target / (rho * draft)) of its token, for the smallest rho in [1, k] with which no token comes
    too often. rows[b] is the sibling that is kept, from 1 on, or 0; then the next token follows left[b].

    Raises ValueError about siblings of another number than the uniforms.
    """
    if draft_token_ids.shape != uniforms.shape:
        raise ValueError(f"uniforms have the shape {uniforms.shape}, but the siblings have {draft_token_ids.shape}")
    count = uniforms.shape[1]
    low, high = np.ones(len(uniforms)), np.full(len(uniforms), float(count))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        accepted = row_sums(np.minimum(draft_probs, target_probs / middle[:, None]))
        too_often = 1 - (1 - accepted) ** count > middle * accepted
        low, high = np.where(too_often, middle, low), np.where(too_often, high, middle)
    rho = high[:, None]
    kept = np.minimum(draft_probs, target_probs / rho)
    accepted = row_sums(kept)[:, None]
    # How often any token is kept, for each time that one sibling is; where none ever is, nothing is taken away.
    often = (1 - (1 - accepted) ** count) / np.maximum(accepted, TINY)
    needed = rho * np.take_along_axis(draft_probs, draft_token_ids, axis=1)
    passed = uniforms * needed < np.take_along_axis(target_probs, draft_token_ids, axis=1)
    rows = np.where(passed.any(axis=1), passed.argmax(axis=1) + 1, 0)
    return TreeOutcome(rows, np.where(rows[:, None] > 0, 0, np.maximum(target_probs - kept * often, 0)))
