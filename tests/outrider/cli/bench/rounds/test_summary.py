"""The figures of a run say what its samples say."""

from dataclasses import replace

import pytest
from support.runs import summary

from outrider.cli.bench.common import PLAIN, fixed
from outrider.cli.bench.rounds.report import render
from outrider.cli.bench.rounds.samples import BARE, DRAFT, MEMORY, READ, TARGET, TimeSample


def test_the_fastest_read_sets_the_floor() -> None:
    """40 GB/s make a floor of 200 MB over 40, whatever reads are slower."""
    found = summary()
    assert found.bandwidth(TARGET) == pytest.approx((40e9, 40e9))
    found.measurements.times += [TimeSample(READ, TARGET, 50.0, num_bytes=200_000_000)] * 9
    assert found.bandwidth(TARGET) == pytest.approx((40e9, 4e9))
    assert found.floor_ms(TARGET) == pytest.approx(5.0)
    # A buffer past all caches was read at 40 GB/s, faster than the 20 of one as small as the draft.
    assert found.floor_ms(DRAFT) == pytest.approx(0.05)


def test_a_busy_machine_is_told() -> None:
    """When a usual read of the memory is far slower than the fastest one."""
    found = summary()
    assert not found.busy
    found.measurements.times += [TimeSample(READ, MEMORY, 80.0, num_bytes=10**9)] * 3
    assert found.busy
    assert "BUSY" in render(found)


def test_settings_stand_in_one_order() -> None:
    """Whatever setting was measured first, what has no gateway comes first and what drafts comes last."""
    found = summary()
    found.measurements.requests.reverse()
    assert found.settings == [BARE, PLAIN, fixed(4)]


def test_ratios_are_those_of_neighbours() -> None:
    """A turn that was slow for all settings changes no ratio between them."""
    assert summary().over(fixed(4), PLAIN, 0.0).show(".2f") == "2.00 (2.00 to 2.00)"
    assert summary().over(PLAIN, BARE, 0.0).median == pytest.approx(0.9)
    assert summary().speed(PLAIN, 0.0).median == pytest.approx((100 + 50) / 2)


def test_the_prompts_own_round_is_left_out() -> None:
    """Two requests of four rounds have six that follow the prompt's."""
    assert len(summary().rounds(fixed(4), 0.0)) == 6


def test_openings_are_no_steady_rounds() -> None:
    """The first round with a proposal carries more than the others, and is left out."""
    assert len(summary().steady(fixed(4), 0.0)) == 4


def test_a_late_first_token_makes_nothing_faster() -> None:
    """Speed counts from the request's beginning, less the prompt's pass in the bare loop."""
    found = summary()
    late = [replace(each, first_token_s=each.seconds) for each in found.requests(PLAIN, 0.0)]
    found.measurements.requests = [*found.requests(BARE, 0.0), *late]
    assert found.speed(PLAIN, 0.0) == summary().speed(PLAIN, 0.0)


def test_a_prediction_uses_the_bare_costs() -> None:
    """Four tokens for 1.2 steps of verification, 0.2 of drafting and two ways of 0.02."""
    assert summary().formula(fixed(4), 0.0) == pytest.approx(4 * 1.02 / 1.44)
