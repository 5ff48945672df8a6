"""The share of outcomes for which there is a branch, as a formula."""

from itertools import pairwise

import pytest

from gateway.rounds.branching import COUNTS, mean_acceptance, missed_share


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.75, 0.97, 1.0])
@pytest.mark.parametrize("draft_count", [1, 3, 8])
def test_each_further_branch_misses_less(acceptance: float, draft_count: int) -> None:
    """By less and less, and it is always a share."""
    shares = [missed_share(acceptance, draft_count, count) for count in range(1, COUNTS[-1] + 1)]
    assert all(0 < share < 1 for share in shares)
    gains = [before - after for before, after in pairwise(shares)]
    assert all(gain > 0 for gain in gains)
    assert sum(gains[:16]) > sum(gains[16:32]) > sum(gains[32:48])


@pytest.mark.parametrize(("draft_count", "hits"), [(2, 0.89), (3, 0.84), (5, 0.75)])
def test_sixteen_branches_hit_as_often_as_was_measured(draft_count: int, hits: float) -> None:
    """With guesses that are right with chance 0.75; see docs/measurements/2026-11-27-run-ahead.md."""
    assert 1 - missed_share(0.75, draft_count, 16) == pytest.approx(hits, abs=0.03)


def test_surer_guesses_need_fewer_branches_and_longer_chains_more() -> None:
    assert missed_share(0.9, 3, 8) < missed_share(0.6, 3, 8) < missed_share(0.6, 8, 8)
    assert mean_acceptance((0.9, 0.7, 0.5), 2) == 0.8
