"""The report of a run says what its summary says."""

from support.runs import summary

from bench.rounds.report import render


def test_the_report_has_every_section() -> None:
    """The parts of a round, the bytes of its hops and the formula stand in tables of Markdown."""
    text = render(summary())
    assert "| K = 4 | 0.020 | 1.650 | 0.230 | 0.030 | 12.000 | 0.220 | 0.100 |" in text
    assert "| K = 4 | 90 | 110 | 110 | 110 | 1.00 1.00 1.00 0.00 |" in text
    assert "c = 0.050, R_t = 0.020, R_d = 0.020." in text
    assert "| K = 4 | 0.050 | 4.00 | 2.83 | 2.10 | 2.78 | 2.00 | 0.71 |" in text
