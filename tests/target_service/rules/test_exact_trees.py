"""The rules on trees follow the target's distribution exactly: every tree and every outcome is gone through."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from support.drafting.rules import Floats
from support.drafting.trees import (
    MOST,
    SCHEMES,
    SHAPES,
    Forest,
    Scheme,
    TreePair,
    TreeRule,
    certain,
    committed_distribution,
    forest_of,
    independent,
    mean_kept,
    two_drafters,
    without_replacement,
)

from target_service.rules.recursive_rejection import recursive_rejection
from target_service.rules.traversal import traversal
from target_service.rules.tree_probs import TreeOutcome, TreeProbs

RULES: dict[str, TreeRule] = {"ratio": recursive_rejection, "block": traversal}
PAIR = TreePair.random()
BY_RULE = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def distance(rule: TreeRule, forests: list[Forest], length: int, pair: TreePair = PAIR) -> float:
    """Largest difference between the distribution of what is committed and the target's own."""
    return float(abs(committed_distribution(rule, pair, forests, length) - pair.distribution(length)).max())


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@BY_RULE
def test_the_joint_distribution_is_the_target_s(rule: TreeRule, shape: tuple[int, ...], scheme: Scheme) -> None:
    """Trees of every shape, whatever their siblings are drawn from, and the tokens that follow the round."""
    pair = TreePair.random(support=4) if max(shape) > 3 else PAIR
    forest = forest_of(pair, shape, scheme)
    assert forest.chances.sum() == pytest.approx(1)
    assert distance(rule, [forest], len(shape) + 1, pair) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@BY_RULE
def test_distributions_that_agree_keep_every_path(rule: TreeRule, shape: tuple[int, ...]) -> None:
    """Nothing is rejected where both are the same: 0 / 0 is no accident, and what follows is still the target's."""
    weights = PAIR.weights[:1]
    pair = TreePair((weights[0] / weights[0].sum(axis=1, keepdims=True)), weights)
    forest = forest_of(pair, shape, independent)
    assert mean_kept(rule, pair, forest) == pytest.approx(len(shape), abs=1e-9)
    assert distance(rule, [forest], 2, pair) < 1e-12


@pytest.mark.slow
@BY_RULE
def test_what_the_target_never_says_is_rejected(rule: TreeRule) -> None:
    """Siblings, and siblings after them, outside the target's support."""
    pair = TreePair(np.tile([0.0, 0.0, 0.0, 0.25, 0.25, 0.5], (7, 1)), np.tile([7, 2, 1, 0, 0, 0], (1, 7, 1)))
    for scheme in (independent, without_replacement):
        forest = forest_of(pair, (2, 2), scheme)
        assert mean_kept(rule, pair, forest) == 0
        assert distance(rule, [forest], 2, pair) < 1e-12


@pytest.mark.slow
@BY_RULE
def test_at_temperature_0_the_walk_is_greedy(rule: TreeRule) -> None:
    """The target's best token is followed wherever it was proposed, at whatever place and by whatever uniform."""
    pair = replace(PAIR, target=np.eye(6)[[3, 4, 1, 0, 5, 2, 1]])
    for scheme in SCHEMES.values():
        forest = forest_of(pair, (2, 2), scheme)
        first = forest.token_ids[:, :2] == 1
        second = (forest.token_ids[:, 2:] == 4) & np.repeat(first, 2, axis=1)
        greedy = first.any(axis=1) * 1 + second.any(axis=1) * 1
        # Of equal siblings the first is followed by one rule, and the one that has the next token by the other.
        alone = ~first.all(axis=1)
        expected = float(forest.chances[alone] @ greedy[alone])
        assert mean_kept(rule, pair, forest.chosen(alone)) == pytest.approx(expected, abs=1e-12)
        assert distance(rule, [forest], 3, pair) < 1e-12


@BY_RULE
def test_a_tree_may_grow_by_what_was_drawn_before(rule: TreeRule) -> None:
    """Best first, drawing when a row is added: whether there is another one depends on the tokens of all before it."""
    forest = forest_of(PAIR, (2, 2), without_replacement)
    kept = np.ones(forest.token_ids.shape, dtype=bool)
    kept[:, 1] = forest.token_ids[:, 0] % 2 == 0
    kept[:, 2] = forest.token_ids[:, 0] > 1
    kept[:, 3] = kept[:, 2] & (forest.token_ids[:, 2] != 4)
    kept[:, 5] = forest.token_ids[:, 1] < forest.token_ids[:, 0]
    forests = forest.kept_rows(kept)
    assert len(forests) == 4
    assert distance(rule, forests, 3) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("lenience", [0.3, 0.7])
@pytest.mark.parametrize("scheme", [independent, without_replacement])
def test_a_lenient_output_is_bounded(lenience: float, scheme: Scheme) -> None:
    """No first token is more probable than the target's probability over the lenience; it keeps more than `ratio`."""
    rule = partial(recursive_rejection, lenience=lenience)
    for shape in ((2,), (2, 2)):
        forest = forest_of(PAIR, shape, scheme)
        distribution = committed_distribution(rule, PAIR, [forest], 1)
        assert distribution.sum() == pytest.approx(1)
        assert (distribution <= PAIR.distribution(1) / lenience + 1e-12).all()
        assert abs(distribution - PAIR.distribution(1)).max() > 1e-3
        assert mean_kept(rule, PAIR, forest) > mean_kept(recursive_rejection, PAIR, forest) + 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 5, 1, 2, 3, 4])
def test_traversal_keeps_as_many_tokens_as_recursive_rejection_and_more(seed: int) -> None:
    """In expectation; the same where no row has a child that could speak for it."""
    pair = TreePair.random(seed=seed)
    for scheme in (independent, without_replacement, two_drafters):
        flat, deep = (forest_of(pair, shape, scheme) for shape in ((2,), (2, 2)))
        kept = [mean_kept(rule, pair, flat) for rule in RULES.values()]
        assert kept[0] == pytest.approx(kept[1], abs=1e-12)
        assert mean_kept(traversal, pair, deep) >= mean_kept(recursive_rejection, pair, deep) - 1e-12
    chain = forest_of(pair, (1, 1, 1), independent)
    assert mean_kept(traversal, pair, chain) >= mean_kept(recursive_rejection, pair, chain) - 1e-12
    if seed == 5:
        assert mean_kept(traversal, pair, deep) > mean_kept(recursive_rejection, pair, deep) + 1e-3
        assert mean_kept(traversal, pair, chain) > mean_kept(recursive_rejection, pair, chain) + 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_siblings_without_replacement_are_kept_more_often(seed: int) -> None:
    """Two or three that differ cover more of the target than as many that may be equal."""
    pair = TreePair.random(seed=seed)
    for count in (2, 3):
        differing, equal = (
            mean_kept(recursive_rejection, pair, forest_of(pair, (count,), scheme))
            for scheme in (without_replacement, independent)
        )
        assert differing >= equal - 1e-12
        if seed == 5:
            assert differing > equal + 1e-3


Planting = Callable[[Forest], list[Forest]]


def reordered(forest: Forest, order: Floats) -> list[Forest]:
    """The root's children in falling order of a number [B, R]."""
    places = (-order).argsort(axis=1, kind="stable")
    every = np.arange(len(places))[:, None]
    return [replace(forest, token_ids=forest.token_ids[every, places], draft=forest.draft[every, places])]


def duplicates_dropped(forest: Forest) -> list[Forest]:
    """B2: of equal siblings only the first is tested."""
    kept = np.ones(forest.token_ids.shape, dtype=bool)
    for row in range(1, kept.shape[1]):
        kept[:, row] = (forest.token_ids[:, :row] != forest.token_ids[:, row : row + 1]).all(axis=1)
    return forest.kept_rows(kept)


def not_normalised(forest: Forest) -> list[Forest]:
    """B3: without replacement, the distribution of a later sibling does not add up to 1."""
    draft = forest.draft.copy()
    first = np.take_along_axis(forest.draft[:, :1], forest.token_ids[:, None, :], axis=2)[:, 0]
    for row in range(1, draft.shape[1]):
        draft[:, row] *= 1 - first[:, :row].sum(axis=1, keepdims=True)
    return [replace(forest, draft=draft)]


def best_first(forest: Forest) -> list[Forest]:
    """B4 and B5: the likelier sibling, or the likelier draft, is tested first."""
    return reordered(forest, forest.of_tokens())


def pruned_to_the_likelier(forest: Forest) -> list[Forest]:
    """B6: of two drawn siblings the likelier one is sent."""
    of_tokens = forest.of_tokens()
    kept = of_tokens == of_tokens.max(axis=1, keepdims=True)
    kept &= kept.cumsum(axis=1) == 1
    return forest.kept_rows(kept)


def pruned_below_a_limit(forest: Forest) -> list[Forest]:
    """B6: a drawn sibling is sent if it is likely enough."""
    return forest.kept_rows(forest.of_tokens() > 0.15)


def only_the_drawn_token(forest: Forest) -> list[Forest]:
    """B8: the residual loses the drawn token's share, and not the whole distribution."""
    own = np.arange(forest.draft.shape[2]) == forest.token_ids[:, :, None]
    return [replace(forest, draft=forest.draft * own)]


def zero_is_padding(forest: Forest) -> list[Forest]:
    """B11: a row with token 0 is none."""
    return forest.kept_rows(forest.token_ids != 0)


PLANTED: list[tuple[Planting, Scheme]] = [
    (duplicates_dropped, independent),
    (duplicates_dropped, two_drafters),
    (not_normalised, without_replacement),
    (best_first, without_replacement),
    (best_first, two_drafters),
    (pruned_to_the_likelier, independent),
    (pruned_to_the_likelier, without_replacement),
    (pruned_below_a_limit, independent),
    (only_the_drawn_token, independent),
    (only_the_drawn_token, without_replacement),
    (zero_is_padding, independent),
]


@pytest.mark.parametrize(("planted", "scheme"), PLANTED)
@BY_RULE
def test_a_planted_bug_is_found(rule: TreeRule, planted: Planting, scheme: Scheme) -> None:
    """The comparison above can fail: what each of these engines' bugs commits is not what the target says."""
    forest = forest_of(PAIR, (2,), scheme)
    assert distance(rule, [forest], 1) < 1e-12
    assert distance(rule, planted(forest), 1) > 1e-3


@BY_RULE
def test_likely_children_that_were_not_drawn_are_found(rule: TreeRule) -> None:
    """B7: the draft's best tokens, tested as if they had been drawn; as certain guesses they are right."""
    forest = forest_of(PAIR, (2,), certain)
    assert distance(rule, [forest], 1) < 1e-12
    weights = PAIR.weights[0, -1] / PAIR.weights[0, -1].sum()
    assert distance(rule, [replace(forest, draft=np.tile(weights, (1, 2, 1)))], 1) > 1e-3


@BY_RULE
def test_siblings_that_are_tested_with_the_first_distribution_are_found(rule: TreeRule) -> None:
    """B1: no sibling knows that one before it has failed."""

    def wrong(probs: TreeProbs, uniforms: Floats) -> TreeOutcome:
        kept, last = np.zeros(len(uniforms), dtype=np.int64), rule(probs, np.full(uniforms.shape, MOST))
        for row in reversed(range(1, uniforms.shape[1] + 1)):
            one = slice(row - 1, row)
            alone = TreeProbs(
                (0,), probs.target[:, [0, row]], probs.others[:, [0, row]], probs.draft[:, one], probs.drawn[:, one]
            )
            kept[rule(alone, uniforms[:, one]).rows == 1] = row
        return TreeOutcome(kept, last.left)

    for scheme in (independent, without_replacement):
        assert distance(wrong, [forest_of(PAIR, (2,), scheme)], 1) > 1e-3


@BY_RULE
def test_a_tree_does_not_depend_on_its_neighbours(rule: TreeRule) -> None:
    """Bit for bit, whatever stands beside it and however many places the widest has."""
    dice = np.random.default_rng(8)
    parents = (0, 0, 1, 1, 0, 2, 5)
    whole = dice.dirichlet([0.2] * 40, (9, 8))
    probs = TreeProbs(
        parents,
        whole[:, :, :30],
        whole[:, :, 30:].sum(axis=2),
        dice.dirichlet([0.2] * 30, (9, 7)),
        dice.integers(0, 30, (9, 7)),
    )
    uniforms = dice.random((9, 7)) * 0.2
    together = rule(probs, uniforms)
    padding = ((0, 0), (0, 0), (0, 11))
    for number in range(9):
        one = slice(number, number + 1)
        alone = TreeProbs(
            parents,
            np.pad(probs.target[one], padding),
            probs.others[one],
            np.pad(probs.draft[one], padding),
            probs.drawn[one],
        )
        outcome = rule(alone, uniforms[one])
        assert outcome.rows[0] == together.rows[number]
        assert outcome.left[0, :30].tolist() == together.left[number].tolist()
