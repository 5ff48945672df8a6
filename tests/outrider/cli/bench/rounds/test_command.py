"""The command itself, on the embedded pair and real processes: what it writes and prints, not how fast anything was."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.cli.bench.common import AUTO, PLAIN, fixed
from outrider.cli.bench.rounds.samples import BARE, DRAFT, ENGINE, MEMORY, OPERATORS, PING, READ, TARGET

ROOT = Path(__file__).resolve().parents[5]
COMMAND = (sys.executable, "-c", "from outrider.cli import main; main()", "bench", "rounds", "--quick")
SETTINGS = {BARE, PLAIN, fixed(2), fixed(4), AUTO}


@pytest.mark.slow
def test_a_quick_run_measures_everything_and_compares_tokens(tmp_path: Path) -> None:
    """Every instrument leaves samples, every setting the same tokens, and the report has its tables."""
    file = tmp_path / "samples.json"
    options = ("--tokens", "12", "--temperatures", "0,0.8", "--threads", "1", "--save", str(file))
    ended = subprocess.run(
        [*COMMAND, *options], capture_output=True, check=False, timeout=240, cwd=ROOT, encoding="utf-8"
    )
    assert ended.returncode == 0, ended.stderr
    document = json.loads(file.read_text())
    assert document["tokens_equal"]
    assert {"command", "machine", "versions", "revision", "plan", "models"} <= set(document)
    samples = document["samples"]
    roles = {each["instrument"]: set[str]() for each in samples["times"]}
    for each in samples["times"]:
        roles[each["instrument"]].add(each["role"])
    models, buffers = {TARGET, DRAFT}, {TARGET, DRAFT, MEMORY}
    assert roles == {READ: buffers, OPERATORS: models, ENGINE: models, PING: models}
    check_requests(samples["requests"])
    assert "### Through the gateway, temperature 0.8" in ended.stdout


def check_requests(requests: list[dict[str, object]]) -> None:
    """All settings at both temperatures, twelve tokens each, and the same ones at the same temperature."""
    assert {(each["setting"], each["temperature"]) for each in requests} == {
        (setting, heat) for setting in SETTINGS for heat in (0.0, 0.8)
    }
    for heat in (0.0, 0.8):
        spoken = {tuple(each["token_ids"]) for each in requests if each["temperature"] == heat}  # type: ignore[arg-type]
        assert [len(token_ids) for token_ids in spoken] == [12]
