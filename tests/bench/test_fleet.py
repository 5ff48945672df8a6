"""`python -m bench.fleet`: its prompts, its report, and the smallest fleet, served."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bench.fleet.__main__ import FleetOptions, FleetRun, conclude, prompt_of
from outrider.cli.bench.common import fresh_prompt

ONE = FleetRun(1, 4, 500.0, (0.9,), (0.2, 0.4), 12.0, 0.5, {"only": 8.0, "hit": 0.0}, 0.1)


def test_some_prompts_share_the_most_usual_beginnings() -> None:
    """The same number has the same prompt, no other has it, and the first beginning is the most usual one by far."""
    wanted = FleetOptions(shared=0.5, beginnings=8)
    prompts = [prompt_of(number, wanted) for number in range(400)]
    assert prompts == [prompt_of(number, wanted) for number in range(400)]
    assert len({*prompts}) == 400
    counts = Counter(each.split(".")[0] for each in prompts if each.startswith("Book"))
    assert 150 < sum(counts.values()) < 250
    assert len({each[: each.index("Chapter")] for each in prompts if each.startswith("Book")}) == len(counts) <= 8
    assert counts["Book 0"] == max(counts.values()) > sum(counts.values()) / 4
    assert prompt_of(7, replace(wanted, shared=0.0)) == fresh_prompt(7)


def test_the_report_compares_each_target_with_a_single_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """And says that devices are simulated; the file has the runs."""
    two = replace(ONE, num_targets=2, tokens_per_s=950.0, busy=(0.8, 1.0), placements={"hit": 6.0, "load": 2.0})
    conclude(FleetOptions(save=tmp_path / "runs.json"), [ONE, two])
    shown = capsys.readouterr().out
    assert "SIMULATED" in shown
    assert "| 2 | 4 | 950 | 0.95 | 0.80 to 1.00 | 0.111 | 0.20 to 0.40 | 12 | 0.50 | hit 6, load 2 | 0.10 |" in shown
    document = json.loads((tmp_path / "runs.json").read_text(encoding="utf-8"))
    assert [each["num_targets"] for each in document["runs"]] == [1, 2]


@pytest.mark.slow
def test_the_smallest_fleet_is_served() -> None:
    """Two targets share four streams, and no token is another one than that of plain decoding."""
    options = "--targets 2 --draft-counts 2 --streams 2 --tokens 16 --requests 4 --stretch 2"
    found = subprocess.run(
        (sys.executable, "-m", "bench.fleet", *options.split()),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "| 2 | 2 |" in found.stdout


@pytest.mark.slow
def test_a_choice_is_measured() -> None:
    """In a gateway with real targets; an answer of many rounds makes one."""
    options = "--targets 2 --prompt 256 --sessions 2 --choices 10"
    found = subprocess.run(
        (sys.executable, "-m", "bench.fleet.choice", *options.split()),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "| both |" in found.stdout
    assert "An answer of 64 rounds took 1 choice." in found.stdout
