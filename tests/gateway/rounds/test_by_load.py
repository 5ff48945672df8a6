"""Averages by load."""

from gateway.rounds.by_load import ByLoad


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


def test_waiting_for_each_other_is_shorter_where_fewer_wait() -> None:
    """Of a larger load only its share is expected, and of a smaller one all of it."""
    averages = ByLoad()
    assert averages.scaled(4, 7.0) == 7.0
    averages.add(16, 1600)
    assert (averages.scaled(16), averages.scaled(4), averages.scaled(1), averages.scaled(64)) == (1600, 400, 100, 1600)
