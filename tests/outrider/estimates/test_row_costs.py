"""Costs of steps by their rows: averages, tables, lines, and outliers."""

import random
from math import sqrt

import pytest

from outrider.estimates.row_costs import TREND, Average, Line, Metering, RecentMedian, RowCosts


def test_an_average_begins_with_a_median() -> None:
    """One slow sample among the first three changes nothing."""
    average = Average()
    for sample in (60_000.0, 2_000.0, 2_100.0):
        average.add(sample)
    assert average.known
    assert average.mean == 2_100


def test_a_renewed_average_keeps_the_old_value_until_it_knows_better() -> None:
    """Three new samples replace what was learnt before."""
    average = Average()
    for sample in (60.0, 60.0, 60.0, 60.0, 2.0, 2.0):
        average.add(sample)
    average.renew()
    before = average.mean
    average.add(2.0)
    average.add(2.0)
    assert average.mean == before > 40
    average.add(2.0)
    assert average.mean == 2


def test_an_average_is_the_mean_of_few_samples_and_follows_when_there_were_many() -> None:
    """Later ones weigh as much as the first ones, until so many are known that the rest is forgotten."""
    average = Average(0.01)
    for number in range(60):
        average.add(90.0 + 20.0 * (number % 2))
    assert average.mean == pytest.approx(100, abs=1)
    for _ in range(300):
        average.add(200.0)
    assert 190 < average.mean < 200


def test_a_table_is_not_bent_by_an_outlier() -> None:
    """Neither by a first sample nor by a later one."""
    table = RowCosts()
    table.add(5, 1_000_000)
    for _ in range(20):
        table.add(1, 1000)
        table.add(5, 1400)
    before = table.at(5)
    assert before < 1700
    table.add(5, 60_000_000)
    assert table.at(5) < 1.5 * before


def test_a_table_knows_a_staircase() -> None:
    """Costs that jump after every fifth row are known where they were seen, and lie between elsewhere."""
    table = RowCosts()
    for _ in range(20):
        for rows in (1, 2, 4, 5, 6, 9, 10, 11):
            table.add(rows, 1000 * -(-rows // 5))
    for rows in (1, 5, 6, 10, 11):
        assert abs(table.at(rows) - 1000 * -(-rows // 5)) < 1
    assert 1000 <= table.at(3) <= 1001
    assert 1999 <= table.at(7.5) <= 2001


def test_a_table_goes_on_in_a_straight_line() -> None:
    """After the last entry rows cost what they cost before it; one entry alone says a tenth of it, or its share."""
    table = RowCosts()
    for _ in range(30):
        for rows in (8, 16):
            table.add(rows, 100 * rows)
    assert abs(table.at(32) - 3200) < 100
    alone = RowCosts()
    for _ in range(5):
        alone.add(20, 1000)
    assert abs(alone.at(40) - 2000) < 1
    assert RowCosts().at(7) == 0


def test_a_table_that_flattens_goes_on_flat() -> None:
    """As with experts, which many rows have read all; one that gets steeper goes on as on the whole."""
    flattens, steepens = RowCosts(), RowCosts()
    flattens.begin({rows: 100 * (1 - 0.8**rows) for rows in (1, 2, 4, 8, 16, 32)})
    steepens.begin({1: 100, 2: 100, 4: 100, 8: 200, 16: 400})
    assert 100 < flattens.at(128) < 120
    assert 1000 < steepens.at(64) < 1600


def test_a_slower_machine_is_slower_for_every_number_of_rows() -> None:
    """What is seen of one number of rows is believed a little of the others."""
    table = RowCosts()
    for _ in range(10):
        table.add(1, 1000)
        table.add(40, 4000)
    for _ in range(50):
        table.add(1, 2000)
    assert table.at(1) > 1900
    assert 4400 < table.at(40) < 8000


def busy(dice: random.Random, cost: float) -> float:
    """A time on a machine with other work, which is a fifth longer or shorter, and now and then as long again."""
    return cost * dice.lognormvariate(-0.02, 0.2) * (1.7 if dice.random() < 0.04 else 0.97)


def wrong_share(seed: int) -> float:
    """Root mean square of the error of the quotient of what is seen seldom and what is seen often."""
    dice, table, wrong = random.Random(seed), RowCosts(), []
    table.begin({1: 6_200, 2: 6_600, 3: 7_000})
    for step in range(6_000):
        rows = 1 if step % 130 < 2 else 3
        table.add(rows, busy(dice, {1: 6_200, 3: 7_000}[rows]))
        wrong.append(table.at(1) / table.at(3) * 7_000 / 6_200 - 1)
    return sqrt(sum(each**2 for each in wrong[500:]) / len(wrong[500:]))


def test_noise_does_not_part_what_is_seen_seldom_from_what_is_seen_often() -> None:
    """Whether guesses are worth it is a quotient of both, which may be wrong by a few hundredths."""
    assert sum(map(wrong_share, range(1, 7))) / 6 < 0.04


def test_a_machine_that_slows_down_is_followed_by_what_was_not_seen_since() -> None:
    """Within a hundred steps by more than half, whatever had been learnt before."""
    dice, table = random.Random(5), RowCosts()
    table.begin({1: 6_200, 3: 7_000})
    for _ in range(1_000):
        table.add(3, busy(dice, 7_000))
    table.add(1, 6_200)
    before = table.at(1)
    for _ in range(100):
        table.add(3, busy(dice, 1.25 * 7_000))
    assert 1.125 < table.at(1) / before < 1.35


def test_what_was_slow_once_is_believed_when_it_was_slow_more_often() -> None:
    """A first outlier would keep rows from being tried again. What was fast once is so, and the third time settles."""
    table = RowCosts()
    table.begin({1: 1_000, 3: 1_200})
    table.add(2, 3_000)
    assert table.at(2) == pytest.approx(1_100)
    table.add(2, 3_000)
    table.add(2, 3_000)
    assert table.at(2) == pytest.approx(3_000)
    table.add(5, 700)
    assert table.at(5) == pytest.approx(700)


def test_the_last_number_of_rows_that_is_known_is_kept_however_old() -> None:
    """Many that were seen twice or less do not take its place."""
    table = RowCosts()
    table.begin({1: 1_000})
    for doubling in range(30):
        for sixteenth in range(16, 32):
            table.add(sixteenth << (2 + doubling), 5_000)
    assert table.at(1) == pytest.approx(1_000, rel=0.01)


METERINGS = (TREND, Metering(RecentMedian, has_trend=False, forget_steps=64))


@pytest.mark.parametrize("metering", METERINGS)
def test_every_meter_knows_what_it_has_seen(metering: Metering) -> None:
    """However it smooths: costs that were seen, and a straight line between them."""
    table = RowCosts(metering=metering)
    for _ in range(20):
        table.add(2, 10)
        table.add(6, 30)
    assert [table.at(rows) for rows in (2, 3, 4, 6)] == pytest.approx([10, 15, 20, 30])


@pytest.mark.parametrize(("metering", "expected"), [(METERINGS[0], 50), (METERINGS[1], 30)])
def test_only_a_trend_says_something_of_larger_steps(metering: Metering, expected: float) -> None:
    """Without one a larger step is like the largest that was seen, until it is tried."""
    table = RowCosts(metering=metering)
    for _ in range(20):
        table.add(2, 10)
        table.add(6, 30)
    assert table.at(10) == pytest.approx(expected, rel=0.1)


def test_a_line_forgets() -> None:
    """Of steps that cost more than before, the new cost is soon believed; a line without a memory means all."""
    recent, whole = Line(0.9), Line()
    for base in (10, 100):
        for number in range(60):
            for line in (recent, whole):
                line.add(1 + number % 4, base + 2 * (number % 4))
    assert recent.parts == pytest.approx((98, 2), rel=0.05)
    assert whole.parts == pytest.approx((53, 2))


def test_what_is_taken_away_was_never_there() -> None:
    """And a cost that changes counts as it is now."""
    line = Line()
    for rows, cost in ((1, 10), (4, 40), (9, 99)):
        line.add(rows, cost)
    line.add(9, 99, -1)
    line.move(4, 3)
    assert line.means == (2.5, 26.5)
    assert line.slope(0, 0) == pytest.approx(11)


@pytest.mark.parametrize("metering", METERINGS)
def test_what_was_not_seen_for_long_is_unknown(metering: Metering) -> None:
    """A busy machine's cost of five rows says nothing when only one and two were seen for long; theirs are known."""
    table = RowCosts(metering=metering)
    table.begin({1: 100, 2: 110, 5: 900})
    for _ in range(metering.forget_steps):
        table.add(1, 10)
        table.add(2, 11)
    assert table.at(5) < 30
    assert [table.at(1), table.at(2)] == pytest.approx([10, 11], rel=0.1)
