"""Tests of bench.jump: when a load counts as followed, and one real jump."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.jump import Jump

COMMAND = (sys.executable, "-P", "-m", "bench.jump")


def test_a_jump_is_followed_behind_the_last_bin_that_is_away() -> None:
    """Bins are of a quarter of a second, and what all comes to is the mean of the second half."""
    drafted = [4] * 3 + [0] * 17
    rounds = [(10 + 0.25 * number + 0.1, count, 1) for number, count in enumerate(drafted)]
    jump = Jump(32, 10.0, 15.0, rounds)
    assert jump.settled == 0
    assert jump.followed_s == pytest.approx(0.75)
    assert jump.tokens_per_s == pytest.approx(4)
    assert Jump(1, 0.0, 5.0, [(0.1 * number, 4, 3) for number in range(50)]).followed_s == 0


@pytest.mark.slow
def test_a_real_load_jumps(tmp_path: Path) -> None:
    """With the embedded pair, from one stream to three and back, in a table and a plot."""
    plot = tmp_path / "k.svg"
    options = ("--high", "3", "--seconds", "2", "--jumps", "2", "--plot", str(plot))
    ended = subprocess.run((*COMMAND, *options), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert [line.split(" | ")[0] for line in ended.stdout.splitlines() if line.startswith("| ")][2:] == ["| 1", "| 3"]
    assert "draft tokens a round" in plot.read_text()
