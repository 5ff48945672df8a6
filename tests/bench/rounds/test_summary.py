"""The figures of a run say what its samples say; targets are judged by them, and an unkind one is not met."""

from dataclasses import replace

import pytest
from support.runs import summary

from bench.rounds.report import render
from bench.rounds.samples import BARE, DRAFT, MEMORY, PLAIN, SEARCH, SUM, TARGET, TimeSample, fixed
from bench.rounds.summary import Criterion, criteria


def test_the_fastest_read_sets_the_floor() -> None:
    """40 GB/s of one reader and 25 of the other make a floor of 200 MB over 40, whatever is slower."""
    found = summary()
    assert found.bandwidth(TARGET) == pytest.approx((40e9, 40e9))
    found.measurements.times += [TimeSample(SUM, TARGET, 50.0, num_bytes=200_000_000)] * 9
    assert found.bandwidth(TARGET) == pytest.approx((40e9, 25e9))
    assert found.floor_ms(TARGET) == pytest.approx(5.0)
    # A buffer past all caches was read at 40 GB/s, faster than the 20 of one as small as the draft.
    assert found.floor_ms(DRAFT) == pytest.approx(0.05)


def test_a_busy_machine_is_told() -> None:
    """When a usual read of the memory is far slower than the fastest one."""
    found = summary()
    assert not found.busy
    found.measurements.times += [TimeSample(SEARCH, MEMORY, 80.0, num_bytes=10**9)] * 3
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
    assert summary().best(0.0) == fixed(4)


def test_what_rounds_do_not_account_for_is_outside_of_them() -> None:
    """1,060 ms over four rounds of 14.25 ms leave 250.75 ms each, and 1,120 ms leave 265.75."""
    assert summary().outside_ms(fixed(4), 0.0).median == pytest.approx((250.75 + 265.75) / 2)


def test_every_target_that_was_measured_is_judged() -> None:
    """The step is twice its floor, which misses; five rows for 1.2 steps and 0.6 ms of overhead are within limits."""
    lines = [each.line() for each in criteria(summary())]
    assert lines == [
        "MISSED: target step, one row, over bytes / bandwidth: 2, wanted at most 1.25",
        "met: target step, five rows over one row: 1.2, wanted at most 1.3",
        "MISSED: draft step, ms: 0.5, wanted at most 0.15",
        "met: plain through the gateway over the bare loop, temperature 0: 0.9, wanted at least 0.85",
        "MISSED: measured speedup over S, K = 4, temperature 0: 0.706, wanted at least 0.9",
        "met: speculative over plain, K = 4, temperature 0: 2, wanted at least 1.5",
        "met: gateway overhead a round, ms, two pings + 0.25: 0.6, wanted at most 0.65",
        "met: most bytes a hop, both ways: 110, wanted at most 200",
    ]


def test_a_limit_itself_is_kept() -> None:
    """At most and at least include the limit."""
    assert Criterion("x", 1.0, 1.0).met
    assert Criterion("x", 1.0, 1.0, at_most=True).met
    assert not Criterion("x", 0.9, 1.0).met
