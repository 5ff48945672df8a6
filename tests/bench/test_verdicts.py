"""Targets are judged by their figure, and an unkind one is not met."""

from bench_run import summary

from bench.rounds.report import render
from bench.rounds.summary import Criterion, criteria


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
        "met: gateway overhead a round, ms, two pings after a pause + 0.25: 0.6, wanted at most 0.85",
        "met: most bytes a hop, both ways: 110, wanted at most 200",
    ]


def test_a_limit_itself_is_kept() -> None:
    """At most and at least include the limit."""
    assert Criterion("x", 1.0, 1.0).met
    assert Criterion("x", 1.0, 1.0, at_most=True).met
    assert not Criterion("x", 0.9, 1.0).met


def test_the_report_has_every_section() -> None:
    """The parts of a round, the bytes of its hops and the formula stand in tables of Markdown."""
    text = render(summary())
    assert "| K = 4 | 0.020 | 1.650 | 0.230 | 0.030 | 12.000 | 0.220 | 0.100 |" in text
    assert "| K = 4 | 90 | 110 | 110 | 110 | 1.00 1.00 1.00 0.00 |" in text
    assert "c = 0.050, R_t = 0.020, R_d = 0.020." in text
    assert "| K = 4 | 0.050 | 4.00 | 2.83 | 2.10 | 2.78 | 2.00 | 0.71 |" in text
