"""The rule `block` on a tree: traversal verification.

Weng et al., "Traversal verification for speculative tree decoding", 2025, arXiv 2505.12398. On a chain it is block
verification, target_service.rules.block. It follows the target's distribution as recursive rejection does, and in
expectation never keeps fewer tokens.
"""

import numpy as np

from target_service.rules.outcome import Floats
from target_service.rules.tree_probs import TINY, TreeOutcome, TreeProbs, nth_children, row_sums


def traversal(probs: TreeProbs, uniforms: Floats) -> TreeOutcome:
    """Tests the rows from the leaves to the root, and keeps the path to the first that passes.

    A row is tested after all its descendants and before its next sibling, with a weight w in [0, 1], which is the
    chance that its subtree is kept. With p the target's distribution after its parent, less what failed there, and q
    the one that it was drawn from, a child has min(1, w * p / q) of its token. Where its whole subtree fails, p becomes
    (w * p - q)+, normalised, and w becomes S / (S + 1 - w) with S the sum before that.

    uniforms [B, R] float64 in (0, 1) are independent of each other and of the draws, which may depend on each other as
    in target_service.rules.recursive_rejection. All draws are looked at in every round, and every uniform may be, so
    none may serve a later one.
    """
    left = probs.target.copy()
    weights = np.ones(probs.others.shape)
    # Weight over the sum of `left` with all that has no place: w * p is scale * left.
    scale = weights.copy()
    parents = np.array(probs.parents, dtype=np.int64)
    for rows in nth_children(probs.parents):
        above = parents[rows - 1]
        before, draft, factor = left[:, above], probs.draft[:, rows - 1], scale[:, above]
        ratios = probs.of_drawn(before, rows) / np.maximum(probs.of_drawn(draft, rows), TINY)
        weights[:, rows] = scale[:, rows] = np.minimum(1, factor * ratios)
        spare = factor * probs.others[:, above] + row_sums(np.maximum(factor[:, :, None] * before - draft, 0))
        whole = spare + (1 - weights[:, above])
        # Where nothing is spare of a weight of 1 both distributions agree, and the child is kept.
        weights[:, above] = np.where(whole > 0, spare / np.maximum(whole, TINY), 1)
        left[:, above] = before - np.minimum(before, draft / np.maximum(factor, TINY)[:, :, None])
        mass = probs.others[:, above] + row_sums(left[:, above])
        scale[:, above] = weights[:, above] / np.maximum(mass, TINY)
    # All rows, each after its descendants and before its later siblings; the root, row 0, comes last.
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for row, parent in enumerate(probs.parents, start=1):
        children[parent].append(row)
    backwards, stack = list[int](), [0]
    while stack:
        backwards.append(row := stack.pop())
        stack += children[row]
    order = np.array(backwards[::-1], dtype=np.int64)
    passed = np.concatenate((uniforms < weights[:, 1:], np.ones((len(uniforms), 1), dtype=bool)), axis=1)
    kept = order[passed[:, order - 1].argmax(axis=1)]
    return TreeOutcome(kept, left[np.arange(len(kept)), kept])
