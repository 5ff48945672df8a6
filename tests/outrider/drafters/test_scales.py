"""The scale of the values converges to the one with which they are true, for each rule and temperature by itself."""

import math
import random
from collections.abc import Sequence

import pytest
from support.basics import spec_of
from support.rules import ruled

from outrider.drafters.scales import FIRST_SCALES, MAX_SCALE, MIN_SCALE, Scales
from outrider.parameters import Rule
from outrider.token_tree import TokenTree

HOT, COLD = spec_of((1,), temperature=1.0), spec_of((1,))


def shares_of(scores: Sequence[float], scale: float) -> list[float]:
    weights = [math.exp(score / scale) for score in scores]
    return [weight / sum(weights) for weight in weights]


def gumbel(chance: random.Random) -> float:
    return -math.log(-math.log(chance.random()))


def round_of(chance: random.Random, assumed: float, true: float) -> tuple[TokenTree, list[int]]:
    """A row with four children whose values assume one scale, behind each of which stand as many; what is true."""
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
    """Where the law holds: after 3,000 rounds within 15 %, which is four times what is left of the noise."""
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
    """A tree of two depths whose second is never reached, and tokens behind its end, move the scale as one row does."""
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
