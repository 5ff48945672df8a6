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
