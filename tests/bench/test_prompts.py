"""bench.prompts: which gaps lie beside a prompt, and what is printed of them."""

import pytest

from bench.prompts import Beside, percentile_99, prompt_of, render_firsts, render_gaps, split


def test_gaps_that_touch_the_prompt_lie_beside_it() -> None:
    """Those before its sending are quiet; the one under way then, and at its first token, are beside; later is none."""
    times = [[0.0, 1.0, 3.0, 6.0, 10.0, 15.0], [1.9, 2.0], [9.0, 9.5, 20.0]]
    quiet, gaps = split(times, sent_s=2.0, answered_s=9.0)
    assert quiet == pytest.approx([1.0, 0.1])
    assert gaps == [2.0, 3.0, 4.0]


def test_the_slowdown_is_the_99th_percentile_over_the_median_round() -> None:
    """Of a hundred gaps beside the prompt one is slow: the percentile lies just above the others."""
    beside = Beside([0.01, 0.02, 0.03], [0.04] * 99 + [1.0], 5.0, [1])
    assert percentile_99(beside.gaps) == pytest.approx(0.04 + 0.01 * 0.96)
    assert beside.slowdown == pytest.approx(percentile_99(beside.gaps) / 0.02)
    text = render_gaps({"new": [beside]})
    assert "| new | 20.00 (20.00 to 20.00) | 29.80" in text


def test_means_are_compared_turn_by_turn() -> None:
    """First, mean and last of each turn, and the new mean over the old one of the same turn."""
    text = render_firsts({"old": [[3.0, 4.0, 5.0], [30.0, 40.0, 50.0]], "new": [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]})
    assert (
        "| new | 5.50 (3.25 to 7.75) | 11.00 (6.50 to 15.50) | 16.50 (9.75 to 23.25) | 0.500 (0.500 to 0.500) |" in text
    )


def test_prompts_of_different_seeds_share_no_beginning() -> None:
    """Or the prefix cache would know them."""
    assert prompt_of(1, 50) == prompt_of(1, 50)
    assert len({tuple(prompt_of(seed, 2)) for seed in range(20)}) == 20
