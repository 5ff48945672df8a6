"""Scales of values and rates by rank converge to the true ones, for each rule and temperature by itself."""

import math
import random
from collections.abc import Sequence

import pytest
from support.basics import spec_of
from support.drafting.rules import ruled

from outrider.drafters.scales import FIRST_RATES, FIRST_SCALES, MAX_SCALE, MIN_SCALE, Ranks, Scales
from outrider.engine.noise import Purpose
from outrider.parameters import Rule
from outrider.token_tree import TokenTree

HOT, COLD = spec_of((1,), temperature=1.0), spec_of((1,))


def shares_of(scores: Sequence[float], scale: float) -> list[float]:
    weights = [math.exp(score / scale) for score in scores]
    return [weight / sum(weights) for weight in weights]


def gumbel(chance: random.Random) -> float:
    return -math.log(-math.log(chance.random()))


def round_of(chance: random.Random, assumed: float, true: float) -> tuple[TokenTree, list[int]]:
    """A row with four children whose values assume one scale, after each of which stand as many; what is true."""
    scores = [sorted((2.5 * chance.gauss(0, 1) for _ in range(4)), reverse=True) for _ in range(2)]
    shares = [shares_of(each, assumed) for each in scores]
    tree = TokenTree(
        (0, 1, 2, 3, 0, 1, 2, 3),
        (0, 0, 0, 0, 1, 1, 1, 1),
        values=(*shares[0], *(shares[0][0] * share for share in shares[1])),
    )
    taken = [max(range(4), key=lambda token: each[token] + true * gumbel(chance)) for each in scores]
    return tree, taken


@pytest.mark.parametrize("spec", [HOT, COLD])
@pytest.mark.parametrize("true", [0.25, 0.6, 1.4])
def test_the_scale_becomes_the_true_one(spec: object, true: float) -> None:
    """Where the formula holds: after 3,000 rounds within 15 %, which is four times what is left of the noise."""
    scales, chance = Scales(), random.Random(int(100 * true))
    for _ in range(3000):
        scales.learn(spec, *round_of(chance, scales.of(spec), true))  # type: ignore[arg-type]
    assert scales.of(spec) == pytest.approx(true, rel=0.15)  # type: ignore[arg-type]


def test_buckets_learn_by_themselves() -> None:
    """What is learned at temperature 0 says nothing about another one, and nothing about another rule."""
    scales, chance = Scales(), random.Random(1)
    for _ in range(500):
        scales.learn(COLD, *round_of(chance, scales.of(COLD), 1.5))
    assert scales.of(COLD) > 2 * FIRST_SCALES[False]
    assert scales.of(HOT) == FIRST_SCALES[True]
    assert scales.of(ruled(COLD, Rule.TYPICAL)) == FIRST_SCALES[False]


def test_only_rows_that_were_visited_count() -> None:
    """A tree of two depths whose second is never reached, and tokens after its end, move the scale as one row does."""
    one, two = Scales(), Scales()
    one.learn(HOT, TokenTree((5, 6), (0, 0), values=(0.6, 0.2)), [9])
    two.learn(HOT, TokenTree((5, 7, 6), (0, 1, 0), values=(0.6, 0.5, 0.2)), [9, 7, 7])
    assert one.of(HOT) == two.of(HOT) > FIRST_SCALES[True]
    two.learn(HOT, TokenTree(), [1, 2])
    assert one.of(HOT) == two.of(HOT)


def test_the_scale_stays_within_its_bounds() -> None:
    """Whatever is accepted or not."""
    for taken, bound in ((0, MIN_SCALE), (1, MAX_SCALE)):
        scales = Scales()
        for _ in range(5000):
            scales.learn(HOT, TokenTree((0,), (0,), values=(0.5,)), [taken])
        assert scales.of(HOT) == pytest.approx(bound)


@pytest.mark.parametrize("spec", [HOT, COLD])
@pytest.mark.parametrize("num_children", [3, 8])
def test_rates_by_rank_become_the_true_ones(spec: object, num_children: int) -> None:
    """However many children rows have: ranks that are never tried keep what is said of them before."""
    ranks, chance = Ranks(), random.Random(num_children)
    assert ranks.of(spec, Purpose.TOKEN) == pytest.approx(FIRST_RATES[spec is HOT])  # type: ignore[arg-type]
    true = [0.4, 0.2, 0.1, 0.05, 0.04, 0.03, 0.02, 0.01]
    tree = TokenTree(tuple(range(num_children)), (0,) * num_children)
    for _ in range(5000):
        [token] = chance.choices(range(9), [*true, 1 - sum(true)])
        ranks.learn(spec, Purpose.TOKEN, tree, [token])  # type: ignore[arg-type]
    rates = ranks.of(spec, Purpose.TOKEN)  # type: ignore[arg-type]
    assert rates[:num_children] == pytest.approx(true[:num_children], abs=0.04)
    assert ranks.of(spec, Purpose.DRAFT) == pytest.approx(FIRST_RATES[spec is HOT])  # type: ignore[arg-type]


@pytest.mark.parametrize("taken", range(9))
def test_rates_make_a_shape_whatever_was_accepted(taken: int) -> None:
    """They fall, are above 0 and add up to less than 1 after any history, such as the last child being always right."""
    ranks = Ranks()
    for _ in range(3000):
        ranks.learn(HOT, Purpose.TOKEN, TokenTree(tuple(range(8)), (0,) * 8), [taken])
    rates = ranks.of(HOT, Purpose.TOKEN)
    assert sorted(rates, reverse=True) == list(rates)
    assert rates[-1] > 0
    assert sum(rates) < 1


def test_accepted_rows_count_as_deep_as_tokens_go() -> None:
    """The first child of both rows of a chain was right; what stands after its end, or aside, says nothing."""
    one, two, chain = Ranks(), Ranks(), TokenTree((5, 6), (0, 1))
    one.learn(HOT, Purpose.TOKEN, chain, [5, 6, 9])
    for _ in range(2):
        two.learn(HOT, Purpose.TOKEN, TokenTree((5,), (0,)), [5, 6])
    assert one.of(HOT, Purpose.TOKEN) == two.of(HOT, Purpose.TOKEN)
    assert one.of(HOT, Purpose.TOKEN)[0] > FIRST_RATES[True][0]
    one.learn(HOT, Purpose.TOKEN, TokenTree(), [1])
    assert one.of(HOT, Purpose.TOKEN) == two.of(HOT, Purpose.TOKEN)
