"""Acceptance of guesses: by depth, drawn towards a prior, and what trees promise."""

import random

import pytest

from outrider.estimates.acceptance import AcceptanceRates, GuessTally, TreeGains
from outrider.token_tree import TokenTree


def test_rates_of_each_depth_are_drawn_towards_the_pool() -> None:
    """A session that knows nothing has the pool's rates, and one that knows much has its own."""
    pool = AcceptanceRates()
    for _ in range(300):
        pool.observe(1, 2)
    assert pool.rates[0] > 0.9
    assert pool.rates[1] < 0.1
    session = AcceptanceRates(pool)
    assert session.rates == pool.rates
    for _ in range(300):
        session.observe(2, 2)
    assert session.rates[1] > 0.7
    assert pool.tokens()[:3] == [1.0, 1 + pool.rates[0], 1 + pool.rates[0] + pool.rates[0] * pool.rates[1]]


def test_what_was_not_asked_for_is_not_thought_worthless() -> None:
    """A drafter that was asked for four rows and made them says nothing of a fifth; one that has no more says so."""
    asked, short = TreeGains(), TreeGains()
    tree = TokenTree((1, 2, 3, 4), (0, 0, 1, 2), values=(0.5, 0.3, 0.2, 0.1))
    for _ in range(300):
        asked.promise(tree, 4, 4)
        short.promise(tree, 8, 4)
    gained = [gains.at(8, 4) - gains.at(4, 4) for gains in (asked, short)]
    assert gained[0] > 0.2
    assert gained[1] == pytest.approx(0, abs=0.01)
    assert asked.at(4, 4) == pytest.approx(short.at(4, 4))


def test_what_larger_trees_bring_falls_with_what_smaller_ones_bring() -> None:
    """In proportion: what was promised of another text would look better than all that this one has."""
    gains = TreeGains()
    easy = TokenTree(tuple(range(1, 17)), tuple(range(16)), values=tuple(0.95**depth for depth in range(1, 17)))
    hard = TokenTree((1, 2, 3, 4), (0, 0, 1, 2), values=(0.3, 0.2, 0.1, 0.05))
    for _ in range(100):
        gains.promise(easy, 16, 8)
    share = [(gains.at(16, depth) - 1) / (gains.at(4, depth) - 1) for depth in (4, 8)]
    for _ in range(300):
        gains.promise(hard, 4, 4)
    assert [(gains.at(16, depth) - 1) / (gains.at(4, depth) - 1) for depth in (4, 8)] == pytest.approx(share, rel=0.05)
    assert gains.at(16, 8) < 2.5


def test_a_tally_follows_what_is_seen() -> None:
    """A prior counts less with every test; what it begins with is forgotten."""
    tally = GuessTally(0.9)
    assert tally.share(0.6, 4.0) == 0.6
    tally.add(1, 1)
    assert tally.share(0.6, 4.0) == pytest.approx(3.4 / 5)
    begun = GuessTally(0.9, 2.0, 2.0)
    assert begun.share() == 1
    for _ in range(90):
        begun.add(1, 0)
    assert begun.share() < 0.001


def test_several_tests_at_once_leave_as_much_as_one_after_the_other() -> None:
    """Of what was there before them."""
    once, each = GuessTally(0.9, 10, 10), GuessTally(0.9, 10, 10)
    once.add(0, 0, 3)
    for _ in range(3):
        each.add(0, 0)
    assert once.tested == pytest.approx(each.tested) == pytest.approx(7.29)


def test_a_renewed_rate_follows_a_few_tests() -> None:
    """What a hundred tests have shown weighs no more than the next ones; without it they would hardly move it."""
    old, renewed = AcceptanceRates(), AcceptanceRates()
    for rates in (old, renewed):
        for _ in range(100):
            rates.observe(0, 1)
    before = renewed.rates[0]
    renewed.renew()
    assert renewed.rates[0] >= before
    for rates in (old, renewed):
        for _ in range(4):
            rates.observe(1, 1)
    assert old.rates[0] < 0.2
    assert renewed.rates[0] > 0.4


def test_rates_follow_whatever_is_learnt() -> None:
    """A session's are of its own tests and of the pool's, however often they were asked for before."""
    pool = AcceptanceRates()
    session = AcceptanceRates(pool)
    for _ in range(8):
        pool.observe(3, 3)
    seen = [session.rates[0]]
    for learns in (lambda: pool.observe(3, 3), lambda: session.observe(0, 1), pool.renew, lambda: pool.observe(0, 1)):
        learns()
        seen.append(session.rates[0])
        assert session.tokens()[1] == 1 + seen[-1]
    assert len(set(seen)) == len(seen)


def test_one_text_does_not_stand_for_all() -> None:
    """After a text whose guesses are bad, all sessions together expect little less; the session itself knows it."""
    pool = AcceptanceRates()
    dice = random.Random(3)
    for _ in range(1_000):
        pool.observe(dice.random() < 0.45, 1)
    before, own = pool.rates[0], AcceptanceRates(pool)
    for _ in range(40):
        accepted = dice.random() < 0.15
        own.observe(accepted, 1)
        pool.observe(accepted, 1)
    assert own.rates[0] < 0.3
    assert before - 0.09 < pool.rates[0] < before
