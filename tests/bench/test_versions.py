"""bench.versions: tokens that differ are found, and ratios are those of neighbours."""

import pytest

from bench.versions import compare, in_turns, render
from outrider.cli.bench.common import TokensDiffer


def test_tokens_that_differ_end_the_run() -> None:
    """In one place, or by being fewer; what was asked and what each said is reported."""
    compare({"old": [1, 2, 3], "new": [1, 2, 3]}, "'Once', plain")
    for tokens in ([1, 2, 4], [1, 2]):
        with pytest.raises(TokensDiffer, match=r"'Once', plain: old said \[1, 2, 3\]; new said \[1, 2"):
            compare({"old": [1, 2, 3], "new": tokens}, "'Once', plain")


def test_ratios_are_those_of_neighbours() -> None:
    """A turn that was slow for both changes no ratio: medians of 2 and 6 ms, but twice as long side by side."""
    text = render({"plain": {"old": [1.0, 2.0, 30.0], "new": [2.0, 6.0, 60.0]}}, "ms a token", ".1f")
    assert "| plain | 2.0 (1.5 to 16.0) | 6.0 (4.0 to 33.0) | 2.000 (2.000 to 2.500) |" in text
    assert "old, ms a token" in text


def test_each_goes_first_every_other_turn() -> None:
    """So that neither always has the caches that the other left."""
    assert [in_turns(("new", "old"), turn)[0] for turn in range(4)] == ["new", "old", "new", "old"]
