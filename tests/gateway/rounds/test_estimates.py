"""Estimates and outliers."""

import pytest

from gateway.rounds.estimates import AcceptanceRates, Average, ByLoad, RowTable, TreeGains
from outrider.token_tree import TokenTree


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
    table = RowTable()
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
    table = RowTable()
    for _ in range(20):
        for rows in (1, 2, 4, 5, 6, 9, 10, 11):
            table.add(rows, 1000 * -(-rows // 5))
    for rows in (1, 5, 6, 10, 11):
        assert abs(table.at(rows) - 1000 * -(-rows // 5)) < 1
    assert 1000 <= table.at(3) <= 1001
    assert 1999 <= table.at(7.5) <= 2001


def test_a_table_goes_on_in_a_straight_line() -> None:
    """After the last entry rows cost what they cost before it; one entry alone says a tenth of it, or its share."""
    table = RowTable()
    for _ in range(30):
        for rows in (8, 16):
            table.add(rows, 100 * rows)
    assert abs(table.at(32) - 3200) < 100
    alone = RowTable()
    for _ in range(5):
        alone.add(20, 1000)
    assert abs(alone.at(40) - 2000) < 1
    assert RowTable().at(7) == 0


def test_a_slower_machine_is_slower_for_every_number_of_rows() -> None:
    """What is seen of one number of rows is believed a little of the others."""
    table = RowTable()
    for _ in range(10):
        table.add(1, 1000)
        table.add(40, 4000)
    for _ in range(50):
        table.add(1, 2000)
    assert table.at(1) > 1900
    assert 4400 < table.at(40) < 8000


def test_averages_by_load_remember() -> None:
    """A load that was seen keeps its own; another one is like its nearest neighbour."""
    averages = ByLoad()
    assert averages.at(4, 7.0) == 7.0
    for _ in range(5):
        averages.add(1, 100)
        averages.add(32, 900)
    assert (averages.at(1), averages.at(32), averages.at(2), averages.at(20)) == (100, 900, 100, 900)
    assert averages.known(32)
    assert not averages.known(8)


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
