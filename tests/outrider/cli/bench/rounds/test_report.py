"""The report of a run says what its summary says."""

from dataclasses import replace

from support.runs import SIZES, summary

from outrider.cli.bench.rounds.report import render
from outrider.cli.bench.rounds.summary import RoundsSummary


def test_the_report_has_every_section() -> None:
    """The parts of a round, the bytes of its hops and the formula stand in tables of Markdown."""
    text = render(summary())
    assert "| K = 4 | 0.020 | 1.650 | 0.230 | 0.030 | 12.000 | 0.220 | 0.100 |" in text
    assert "| 0.650 | 90 | 110 | 110 |" in text
    assert "c = 0.050, R_t = 0.020, R_d = 0.020." in text
    assert "| 2.00 (2.00 to 2.00) | 4.00 | 0.750 | 0.050 | 2.83 | 0.71 |" in text
    assert "| engine, 1 row, over floor | 2.00 | 10.00 |" in text


def test_a_column_names_role_and_model_once() -> None:
    """The embedded models are called after their roles."""
    own = {role: replace(size, name=role) for role, size in SIZES.items()}
    assert "|  | target | draft |" in render(RoundsSummary(summary().measurements, own))
    others = {role: replace(size, name="a") for role, size in SIZES.items()}
    assert "|  | target a | draft a |" in render(RoundsSummary(summary().measurements, others))
