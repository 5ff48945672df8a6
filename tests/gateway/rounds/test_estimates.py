"""Estimates and outliers."""

from gateway.rounds.planner import Average, Line


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


def test_a_line_is_not_bent_by_an_outlier() -> None:
    """Neither by a first sample nor by a later one."""
    line = Line()
    line.add(5, 1_000_000)
    for _ in range(20):
        line.add(1, 1000)
        line.add(5, 1400)
    before = line.at(5)
    assert before < 1700
    line.add(5, 60_000_000)
    assert line.at(5) < 1.5 * before
