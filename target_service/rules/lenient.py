"""The rule `lenient` at temperature 0; elsewhere `lenient` is `ratio`.

Leviathan, Kalman and Matias, 2023, arXiv 2211.17192, appendix A.5. Not exact: a token may be kept that is not the best.
"""

import numpy as np
import torch
from torch import Tensor

from outrider.engine.devices import send
from outrider.engine.sampling.transforms import index
from outrider.token_tree import TokenTree
from target_service.rules.outcome import ChainOutcome, probs_at


def lenient_greedy(target_probs: Tensor, draft_token_ids: Tensor, lenience: float) -> ChainOutcome:
    """Keeps a draft token of at least lenience times the largest probability, up to the first that is not kept.

    target_probs [B, K + 1, V] float64 are the rows at temperature 1, cut nowhere.
    draft_token_ids [B, K] int64. The next token is the best one.
    """
    tested = probs_at(target_probs[:, :-1], draft_token_ids[:, :, None])[:, :, 0]
    largest = target_probs[:, :-1].amax(dim=2).cpu().numpy()
    accepted_count = np.cumprod(tested >= lenience * largest, axis=1, dtype=np.int64).sum(axis=1)
    counts = torch.from_numpy(accepted_count)
    device = target_probs.device
    rows = target_probs[torch.arange(len(counts), device=device), send(accepted_count, device)]
    best = rows.argmax(dim=1, keepdim=True)
    # Of a row that cannot be drawn all probabilities are 0, and stay so.
    return ChainOutcome(counts, torch.zeros_like(rows).scatter(1, best, rows.gather(1, best)))


def lenient_greedy_row(tree: TokenTree, target_probs: Tensor, lenience: float) -> int:
    """Last row that the rule keeps of a tree, whose siblings are tested at once; 0 for none.

    target_probs [R + 1, V] float64 are those after root and rows. Of the children that may be kept the most probable
    one is, of equal ones the first.
    """
    parents, token_ids = (index(each, target_probs) for each in (tree.parents, tree.token_ids))
    found = torch.cat((target_probs.amax(dim=1), target_probs[parents, token_ids])).tolist()
    largest, child_probs = found[: len(target_probs)], found[len(target_probs) :]
    row = 0
    while children := tree.children(row):
        best = max(children, key=lambda child: (child_probs[child - 1], -child))
        if child_probs[best - 1] < lenience * largest[row]:
            break
        row = best
    return row
