"""How many guesses pay: the best share by trying all, and what is measured."""

import itertools
import random

import pytest

from outrider.drafters.guess_counts import (
    FORGET_STEPS,
    MIN_GAIN,
    NUM_SAMPLES,
    PRIOR_CHANCE,
    Chance,
    RowSeconds,
    share_guesses,
)


def expected_tokens(chance: float, count: int) -> float:
    """Tokens of a forward that verifies so many guesses, by the closed form of the paper."""
    return count + 1 if chance == 1 else (1 - chance ** (count + 1)) / (1 - chance)


@pytest.mark.parametrize("seed", range(60))
def test_shares_are_the_best_of_all(seed: int) -> None:
    """No other shares make more tokens a second, where a step costs what its rows and its longest chain cost."""
    dice = random.Random(seed)
    num_sessions = dice.choice((1, 2, 3))
    chances = [dice.choice((0.0, 0.1, 0.4, 0.8, 1.0)) for _ in range(num_sessions)]
    limits = [dice.randrange(4) for _ in range(num_sessions)]
    others, row_s, base_s = dice.randrange(2), dice.choice((0.0, 0.05, 0.5)), dice.choice((0.1, 1.0))

    def seconds(count: int, longest: int) -> float:
        return base_s + row_s * (num_sessions + others + count)

    def rate(counts: tuple[int, ...]) -> float:
        tokens = others + sum(map(expected_tokens, chances, counts))
        return tokens / seconds(sum(counts), max(counts, default=0))

    found = tuple(share_guesses(chances, limits, num_sessions + others, seconds))
    assert all(count <= limit for count, limit in zip(found, limits, strict=True))
    best, alone = max(map(rate, itertools.product(*(range(limit + 1) for limit in limits)))), rate((0,) * num_sessions)
    assert rate(found) == pytest.approx(best if best > MIN_GAIN * alone else alone)


def test_a_guess_that_costs_more_than_it_saves_is_not_made() -> None:
    """Neither one that is never right, nor one that takes as long as what it saves."""
    assert share_guesses([0.0], [7], 1, lambda count, longest: 1 + 0.01 * count) == [0]
    assert share_guesses([0.5], [7], 1, lambda count, longest: 1 + 0.6 * longest) == [0]
    assert share_guesses([0.9], [7], 1, lambda count, longest: 1 + 0.01 * count) == [7]
    assert share_guesses([0.9, 0.1], [3, 3], 2, lambda count, longest: 1 + 0.2 * count) == [3, 0]


def test_a_chance_follows_what_is_seen() -> None:
    """From the prior to 1 and back near 0; earlier guesses count less."""
    chance = Chance()
    assert chance.value == PRIOR_CHANCE
    for _ in range(50):
        chance.add(4, 4)
    assert chance.value > 0.97
    for _ in range(200):
        chance.add(1, 0)
    assert chance.value < 0.03


def test_row_seconds_are_medians_with_lines_between() -> None:
    """One bad sample says nothing; what was not measured lies between its neighbours, or is as the last one."""
    seconds = RowSeconds()
    assert seconds(3) == 1.0
    for each in (2.0, 2.0, 50.0):
        seconds.add(1, each)
    assert (seconds(1), seconds(9)) == (2.0, 2.0)
    seconds.add(5, 6.0)
    assert [seconds(rows) for rows in (1, 2, 3, 5, 9)] == [2.0, 3.0, 4.0, 6.0, 6.0]
    seconds.add(3, 2.5)
    assert (seconds(2), seconds(4)) == (2.25, 4.25)
    for _ in range(NUM_SAMPLES):
        seconds.add(1, 1.0)
    assert seconds(1) == 1.0


def test_a_bad_first_sample_is_forgotten() -> None:
    """A size that was not tried for long counts as unknown."""
    seconds = RowSeconds()
    seconds.add(4, 90.0)
    for _ in range(FORGET_STEPS):
        seconds.add(1, 1.0)
    assert seconds(4) == 1.0
