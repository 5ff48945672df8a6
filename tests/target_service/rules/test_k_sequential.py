"""SpecTr's k-sequential selection: exact, and between recursive rejection and the best that any rule can do."""

from itertools import combinations

import numpy as np
import pytest
from support.drafting.rules import Floats
from support.drafting.trees import MOST, TreePair, committed_distribution, forest_of, independent, mean_kept

from target_service.rules.k_sequential import k_sequential
from target_service.rules.recursive_rejection import recursive_rejection
from target_service.rules.tree_probs import TreeOutcome, TreeProbs


def flat(probs: TreeProbs, uniforms: Floats) -> TreeOutcome:
    """The rule on a tree of nothing but the root's children."""
    return k_sequential(probs.target[:, 0], probs.draft[:, 0], probs.drawn, uniforms)


def best_rate(target: Floats, draft: Floats, count: int) -> float:
    """How often one of `count` independent draws is kept at most, by the rule's own optimal transport plan.

    The flow from draws to tokens is cut at a set of tokens that are kept, and at the draws that are not all among them.
    """
    sets = (list(some) for size in range(len(target) + 1) for some in combinations(range(len(target)), size))
    return float(min(target[some].sum() + 1 - draft[some].sum() ** count for some in sets))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_the_joint_distribution_is_the_target_s(seed: int, count: int) -> None:
    """One, two or four siblings of one distribution, every draw and every outcome."""
    pair = TreePair.random(seed=seed)
    committed = committed_distribution(flat, pair, [forest_of(pair, (count,), independent)], 2)
    assert abs(committed - pair.distribution(2)).max() < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_both_ends_of_the_factor_are_right(count: int) -> None:
    """It is 1 where the distributions agree, and k where a sibling is hardly ever kept, or never."""
    same = TreePair.random()
    same = TreePair(same.weights[0] / same.weights[0].sum(axis=1, keepdims=True), same.weights)
    assert mean_kept(flat, same, forest_of(same, (count,), independent)) == pytest.approx(1)
    for shared in (0.0, 1e-12, 1e-3):
        rare = TreePair(np.tile([shared, 0, 0.5, 0.5 - shared], (5, 1)), np.tile([3, 5, 0, 0], (1, 5, 1)))
        forest = forest_of(rare, (count,), independent)
        assert abs(committed_distribution(flat, rare, [forest], 1) - rare.distribution(1)).max() < 1e-12
        kept = mean_kept(flat, rare, forest)
        assert kept <= shared + 1e-15
        assert kept >= (1 - (1 - 1 / count) ** count) * shared - 1e-15


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_it_keeps_more_than_recursive_rejection_and_nearly_as_much_as_any_rule(seed: int, count: int) -> None:
    """Of independent siblings: at least 1 - (1 - 1/k)^k of the optimal transport plan's, and never more."""
    pair = TreePair.random(support=5, seed=seed)
    forest = forest_of(pair, (count,), independent)
    kept = mean_kept(flat, pair, forest)
    best = best_rate(pair.target[-1], pair.weights[0, -1] / pair.weights[0, -1].sum(), count)
    assert (1 - (1 - 1 / count) ** count) * best - 1e-12 <= kept <= best + 1e-12
    other = mean_kept(recursive_rejection, pair, forest)
    assert kept >= other - 1e-12
    if seed == 5:
        assert kept > other + 1e-3


def test_siblings_tested_as_if_alone_are_found() -> None:
    """B1: with the factor 1, which is right for one sibling, two are kept too often."""

    def wrong(probs: TreeProbs, uniforms: Floats) -> TreeOutcome:
        passed = [flat(probs_of_one(probs, row), uniforms[:, [row]]).rows == 1 for row in range(2)]
        rows = np.where(passed[0], 1, np.where(passed[1], 2, 0))
        return TreeOutcome(rows, flat(probs, np.full(uniforms.shape, MOST)).left)

    def probs_of_one(probs: TreeProbs, row: int) -> TreeProbs:
        return TreeProbs((0,), probs.target, probs.others, probs.draft, probs.drawn[:, [row]])

    pair = TreePair.random()
    committed = committed_distribution(wrong, pair, [forest_of(pair, (2,), independent)], 1)
    assert abs(committed - pair.distribution(1)).max() > 1e-3


def test_siblings_without_uniforms_are_refused() -> None:
    """The shapes are named."""
    with pytest.raises(ValueError, match=r"uniforms have the shape \(1, 2\), but the siblings have \(1, 3\)"):
        k_sequential(np.ones((1, 4)) / 4, np.ones((1, 4)) / 4, np.zeros((1, 3), dtype=np.int64), np.ones((1, 2)) / 2)
