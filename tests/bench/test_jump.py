"""Tests of bench.jump: when a load counts as followed, and one real jump."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.jump import Jump, app


def test_a_jump_is_followed_behind_the_last_bin_that_is_away() -> None:
    """Bins are of a quarter of a second, and what all comes to is the mean of the second half."""
    drafted = [4] * 3 + [0] * 17
    rounds = [(10 + 0.25 * number + 0.1, count, 1) for number, count in enumerate(drafted)]
    jump = Jump(32, 10.0, 15.0, rounds)
    assert jump.settled == 0
    assert jump.followed_s == pytest.approx(0.75)
    assert jump.tokens_per_s == pytest.approx(4)
    assert Jump(1, 0.0, 5.0, [(0.1 * number, 4, 3) for number in range(50)]).followed_s == 0


def test_a_real_load_jumps(tmp_path: Path) -> None:
    """With the embedded pair, from one stream to three and back, in a table and a plot."""
    plot = tmp_path / "k.svg"
    result = CliRunner().invoke(app, ["--high", "3", "--seconds", "2", "--jumps", "2", "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert [line.split(" | ")[0] for line in result.output.splitlines() if line.startswith("| ")][2:] == ["| 1", "| 3"]
    assert "draft tokens a round" in plot.read_text()
