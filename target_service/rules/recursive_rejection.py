"""The rules `ratio` and `lenient` on a tree: recursive rejection sampling.

Miao et al., "SpecInfer: accelerating generative LLM serving with tree-based speculative inference and verification",
2024, arXiv 2305.09781, for siblings drawn independently; Chen et al., "Sequoia: scalable, robust, and hardware-aware
speculative decoding", 2024, arXiv 2402.12374, for siblings drawn without replacement. On a chain it is
target_service.rules.ratio.
"""

import numpy as np

from target_service.rules.outcome import Floats
from target_service.rules.tree_probs import TreeOutcome, TreeProbs, nth_children, row_sums


def recursive_rejection(probs: TreeProbs, uniforms: Floats, lenience: float = 1.0) -> TreeOutcome:
    """Walks from the root into the first child that passes its test, as long as there is one.

    The children of a row are tested in row order, child k with the distribution q_k that it was drawn from: it passes
    with probability min(1, p_k / (lenience * q_k)) of its token, where p_1 is the target's distribution. Where it does
    not, p_(k+1) is (p_k - lenience * q_k)+, normalised, which the next child is tested with, and which the next token
    follows where no child is left.

    uniforms [B, R] float64 in (0, 1) are independent of each other and of the draws. Whether there is a child, and what
    it is drawn from, may depend on whatever was drawn before it, and on nothing drawn later: then the output follows
    the target's distribution if the lenience is 1, and has at most target / lenience otherwise.
    """
    left, passed = probs.target.copy(), np.zeros(uniforms.shape, dtype=bool)
    # What `left` adds up to with all that has no place: p_k is left / mass.
    mass = np.ones(probs.others.shape)
    parents = np.array(probs.parents, dtype=np.int64)
    for rows in nth_children(probs.parents):
        above = parents[rows - 1]
        draft = lenience * probs.draft[:, rows - 1]
        needed = probs.of_drawn(draft, rows) * mass[:, above]
        passed[:, rows - 1] = uniforms[:, rows - 1] * needed < probs.of_drawn(left[:, above], rows)
        left[:, above] -= np.minimum(left[:, above], draft * mass[:, above, None])
        mass[:, above] = probs.others[:, above] + row_sums(left[:, above])
    reached = np.zeros(len(uniforms), dtype=np.int64)
    # Children have higher numbers than their parents, and who has left a row does not come back to it.
    for row, parent in enumerate(probs.parents, start=1):
        reached[(reached == parent) & passed[:, row - 1]] = row
    return TreeOutcome(reached, left[np.arange(len(reached)), reached])
