"""What lookups offer, and what that makes a row cost."""

import pytest

from gateway.rounds.costs import RoundCosts
from gateway.rounds.offers import FLOORS, LookupOffers
from gateway.rounds.round import NOTHING, HopCost, Round, Verdict
from gateway.rounds.tuning import TUNING


def test_offers_are_counted_by_what_is_above_a_floor() -> None:
    """Of four tokens, two of which a guess brought: shares are of tokens, rows and tokens of places."""
    offers = LookupOffers(1.0)
    offers.add((0.9, 0.55), 2)
    offers.add((), 1)
    offers.add((0.35,), 1)
    above = dict(zip(FLOORS, offers.above(), strict=True))
    assert above[0.6] == pytest.approx((0.5, 1.0, 1.9))
    assert above[0.5] == pytest.approx((0.5, 2.0, 2.45))
    assert above[0.3] == pytest.approx((0.75, 1.5, 1.9))
    assert above[0.9].share == 0


def costs_of(fixed_us: float, row_us: float, load: int) -> RoundCosts:
    """Costs of a target whose forwards are a line, at a load; half of all places offer four rows."""
    costs = RoundCosts(TUNING)
    costs.begin({1 << power: fixed_us + row_us * (1 << power) for power in range(9)}, {})
    costs.load = load
    for _ in range(500):
        costs.offers.add((0.85, 0.65, 0.45, 0.25), 1)
        costs.offers.add((), 1)
    return costs


@pytest.mark.parametrize(
    ("fixed_us", "row_us", "load", "price"),
    [
        (10_000, 1, 16, 0.2),
        (0, 1_000, 16, 1.0),
        (10_000, 500, 16, 0.6),
        (10_000, 1_000, 16, 1.0),
        (10_000, 1_000, 1, 0.2),
    ],
)
def test_a_row_has_the_price_at_which_all_are_fastest(fixed_us: float, row_us: float, load: int, price: float) -> None:
    """All rows are worth it where forwards cost the same, none where each row costs what a token does, and between
    them the fewer the more sessions there are: none where all would be only three hundredths faster.
    """
    assert costs_of(fixed_us, row_us, load).row_price(None) == price


def test_forwards_in_which_nobody_looks_cost_what_they_did() -> None:
    """Where the first rows are the dear ones, as with experts, many rows now and then are cheaper than their mean."""
    costs = RoundCosts(TUNING)
    costs.begin({1: 3_000, 2: 4_500, 4: 7_200, 6: 9_300, 8: 10_800, 16: 14_200, 32: 15_800}, {})
    costs.load = 6
    for number in range(2_000):
        costs.offers.add(*(((0.59,) * 22, 14) if number % 40 == 0 else ((), 1)))
    # One round in forty has 22 rows and 14 tokens. That is a seventh of the forwards, which take 15.6 ms instead of
    # 9.3; a forward of the mean of 9.3 rows takes 11.4, as if each were so much dearer.
    assert costs.row_price(None) == 0.5


def plain_round(round_us: int, rows: int, load: int, **facts: int) -> Round:
    """A token that came unasked."""
    verdict = Verdict(5, (), 1, None, 0, 900, 1, rows, load, hop=HopCost(), **facts)
    return Round(NOTHING, verdict, (1,), (), round_us)


def observe(costs: RoundCosts, *rounds: Round) -> None:
    """Learns from unasked rounds."""
    for each in rounds:
        costs.observe(each, None, unasked=True, is_trial=False, num_sessions=4, num_drafting=0)


def test_a_plain_token_is_what_it_is_while_nobody_guesses() -> None:
    """Forwards of more rows than sessions had the guesses of another gateway's, and say nothing."""
    costs = RoundCosts(TUNING)
    observe(costs, *[plain_round(1_000, 4, 4)] * 40)
    known = costs.plain.token_us(4, costs.num_rounds)
    assert known == pytest.approx(1_000, rel=0.02)
    assert costs.plain.is_known(4, costs.num_rounds)
    observe(costs, *[plain_round(5_000, 12, 4)] * 40)
    assert costs.plain.token_us(4, costs.num_rounds) == pytest.approx(known, rel=0.15)


def test_a_prompt_in_a_forward_is_no_cost_of_a_round() -> None:
    """However long it took; the same rows without a prompt are one."""
    costs = RoundCosts(TUNING)
    observe(costs, *[plain_round(1_000, 4, 4)] * 40)
    before = costs.plain.token_us(4, costs.num_rounds)
    observe(costs, *[plain_round(90_000, 4, 4, prompt_row_count=1)] * 8)
    assert costs.plain.token_us(4, costs.num_rounds) == pytest.approx(before, rel=0.02)
    observe(costs, *[plain_round(90_000, 4, 4)] * 8)
    assert costs.plain.token_us(4, costs.num_rounds) > 1.2 * before
