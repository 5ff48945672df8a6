"""Costs of steps by their rows: averages, tables, lines, and outliers."""

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
