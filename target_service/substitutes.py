"""The rule `typical` over many sessions: which draft token stands in for the target's own where that was not proposed.

The rule itself is target_service.rules.typical; here it gets its probabilities.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draw import Ask, Drawn, before_collapse, row_contexts
from outrider.engine.sampling.transforms import transform
from outrider.parameters import Rule
from outrider.token_tree import TokenTree
from target_service.acceptance import child_with
from target_service.rules.typical import exp_entropies, typical_children


def find_substitutes(
    runner: ModelRunner, asks: Sequence[Ask], logits: Tensor, ranges: Sequence[range], drawn: Sequence[Drawn]
) -> Mapping[int, Sequence[int]]:
    """For each number of an ask under `typical` the child that its root and each row prefer, 0 for none.

    `drawn` are the target's own draws. Where one was proposed, no other child is asked for.
    """
    places: dict[int, dict[int, int]] = {}
    rows: list[int] = []
    for number, (ask, each) in enumerate(zip(asks, drawn, strict=True)):
        if ask.spec.acceptance.rule is Rule.TYPICAL and len(ask.feed.tree) and isinstance(each, list):
            open_rows = _open_rows(ask.feed.tree, each)
            places[number] = {row: len(rows) + place for place, row in enumerate(open_rows)}
            rows += [ranges[number].start + row for row in open_rows]
    if not rows:
        return {}
    contexts = []
    for number, at in places.items():
        every_row = row_contexts(before_collapse(asks[number]))
        contexts += [every_row[row] for row in at]
    scores = transform(logits[torch.tensor(rows, device=logits.device)], contexts, runner.vocabulary_size, runner.ops)
    target_probs = runner.ops.softmax(scores)
    peaks = exp_entropies(scores, target_probs)
    return {number: _preferred(asks[number], at, target_probs, peaks) for number, at in places.items()}


def _open_rows(tree: TokenTree, drawn: Sequence[int]) -> list[int]:
    """The rows whose draw no child carries, of those that have children; a walk enters none without a draw."""
    parents = dict.fromkeys(tree.parents)
    return [row for row in parents if drawn[row] >= 0 and not child_with(tree, row, drawn[row])]


def _preferred(ask: Ask, at: Mapping[int, int], target_probs: Tensor, peaks: Sequence[float]) -> list[int]:
    """The children that one session's rows prefer; row r's probabilities are target_probs[at[r]]."""
    tree, wanted = ask.feed.tree, ask.spec.acceptance
    children = [row for row in range(1, len(tree) + 1) if tree.parents[row - 1] in at]
    token_ids = torch.tensor(
        [tree.token_ids[row - 1] for row in children], dtype=torch.int64, device=target_probs.device
    )
    parents = torch.tensor(
        [at[tree.parents[row - 1]] for row in children], dtype=torch.int64, device=target_probs.device
    )
    child_probs = [0.0] * len(tree)
    for row, prob in zip(children, target_probs[parents, token_ids].tolist(), strict=True):
        child_probs[row - 1] = prob
    limits = [1.0] * (len(tree) + 1)
    for row, place in at.items():
        limits[row] = min(wanted.typical_epsilon, wanted.typical_delta * peaks[place])
    return typical_children(tree, child_probs, limits)
