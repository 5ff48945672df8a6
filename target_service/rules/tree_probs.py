"""Parts that the rules for trees share: the probabilities that they compare, their answer, orders of rows.

Sizes: B trees of one shape with R rows, whose root is row 0, and at most N tokens that the children of a row may be.
All is float64 on the CPU. A sum runs along its row in order, so that a tree's outcome does not depend on the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.devices import send
from outrider.token_tree import TokenTree
from target_service.rules.outcome import Floats

Ints = NDArray[np.int64]
# Stands in the place of a divisor of 0.
TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True, slots=True)
class TreeProbs:
    """Probabilities of both models in B trees of one shape.

    Every row has places for the tokens that its children may be: the union of their supports, padded with 0.
    """

    parents: tuple[int, ...]
    """Parents like those of TokenTree: parents[r - 1] belongs to row r. Siblings are in the order of their draws."""
    target: Floats
    """[B, R + 1, N]: the target's probabilities after each row, at its places."""
    others: Floats
    """[B, R + 1]: the target's probability of all other tokens."""
    draft: Floats
    """[B, R, N]: the distribution that the token of row r was drawn from, at [r - 1], at the places of its parent."""
    drawn: Ints
    """[B, R]: the place of each row's token among those of its parent."""

    def of_drawn(self, values: Floats, rows: Ints) -> Floats:
        """Values [B, len(rows)] of the rows' tokens; those of `values` [B, len(rows), N] are in places of parents."""
        found: Floats = np.take_along_axis(values, self.drawn[:, rows - 1, None], axis=2)[:, :, 0]
        return found


class TreeOutcome(NamedTuple):
    """The last accepted row [B] of each tree, 0 for none, and what the next token follows at its places [B, N].

    Places without a child keep the target's probability, in units of which `left` is; their sum is anything up to 1.
    """

    rows: Ints
    left: Floats


def nth_children(parents: Sequence[int]) -> list[Ints]:
    """The rows in groups: children of one depth, of each parent the first, then of each the second, and so on.

    Depths come in order, so that a row's group comes after those of its parent and of its earlier siblings.
    """
    depths, num_children = [0], [0] * (len(parents) + 1)
    groups: dict[tuple[int, int], list[int]] = {}
    for row, parent in enumerate(parents, start=1):
        depths.append(depths[parent] + 1)
        groups.setdefault((depths[row], num_children[parent]), []).append(row)
        num_children[parent] += 1
    return [np.array(groups[key], dtype=np.int64) for key in sorted(groups)]


def row_sums(values: Floats) -> Floats:
    """Sums along the last axis in order, to which padding adds nothing."""
    sums: Floats = values.cumsum(axis=-1)[..., -1]
    return sums


def tree_probs(tree: TokenTree, target_probs: Tensor) -> tuple[TreeProbs, list[tuple[int, ...]]]:
    """The probabilities of one tree with distributions, and the token ids of each row's places.

    target_probs [R + 1, V] float64 are the target's distributions after root and rows, on any device.
    """
    places: list[dict[int, int]] = [{} for _ in range(len(tree) + 1)]
    for parent, each in zip(tree.parents, tree.distributions, strict=True):
        # In the order in which they come first: that of an only child is the order of its own support.
        for token_id in each.token_ids:
            places[parent].setdefault(token_id, len(places[parent]))
    width = max(map(len, places))
    ids = np.zeros((len(places), width), dtype=np.int64)
    padding = np.ones(ids.shape, dtype=bool)
    for row, own in enumerate(places):
        ids[row, : len(own)], padding[row, : len(own)] = [*own], False
    draft, drawn = np.zeros((len(tree), width)), np.zeros(len(tree), dtype=np.int64)
    for row, (parent, token_id, each) in enumerate(zip(tree.parents, tree.token_ids, tree.distributions, strict=True)):
        weights = np.array(each.weights, dtype=np.int64)
        draft[row, [places[parent][other] for other in each.token_ids]] = weights / weights.sum()
        drawn[row] = places[parent][token_id]
    found = target_probs.gather(1, send(ids, target_probs.device)).cpu().numpy()
    target = np.where(padding, 0, found)
    others = np.maximum(1 - row_sums(target), 0)
    probs = TreeProbs(tree.parents, target[None], others[None], draft[None], drawn[None])
    return probs, [tuple(own) for own in places]
