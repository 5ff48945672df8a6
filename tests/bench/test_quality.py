"""bench.quality on the embedded target: what it prints, and that it finds what fewer bits cost."""

from pathlib import Path

import pytest
import torch

from bench.quality import Windows, compare, interval, main, sources_of

ROOT = Path(__file__).resolve().parents[2]
TARGET = str(ROOT / "models/target")


@pytest.mark.slow
def test_a_table_of_types(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """bfloat16 agrees with itself, eight bits nearly, four bits less."""
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a king who had three sons, and the youngest was called Hans. " * 12)
    monkeypatch.setattr("sys.argv", ["quality", "--model", TARGET, "--text", str(text), "--window", "64"])
    main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]
    assert [row[0].strip() for row in rows] == ["bfloat16", "int8", "int4"]
    divergences, agreed = ([float(row[column].split()[0]) for row in rows] for column in (3, 4))
    assert divergences[0] == 0
    assert 0 < divergences[1] < 0.01 < divergences[2]
    assert agreed[0] == 1 > agreed[1] > agreed[2] > 0.5


def test_perplexity_is_that_of_the_text() -> None:
    """A uniform distribution over eight tokens has perplexity eight, and nothing diverges from itself."""
    found, uniform = Windows(), torch.full((5, 8), -torch.tensor(8.0).log().item())
    found.add(uniform, uniform, torch.arange(5))
    assert found.perplexity == pytest.approx(8)
    assert found.divergences == [0]
    assert found.largest == 0
    assert interval([6.0, 3.0], [2, 1]) == (3, 3)


@pytest.mark.slow
def test_a_whole_text_is_read_once() -> None:
    """Windows follow each other, and the first token of each is read but not asked for."""
    found = compare(sources_of(TARGET, ["float32", "int8"], 64, 1), list(range(5, 135)), 64)
    assert list(found) == ["float32", "int8"]
    assert found["int8"].counts == [64, 64, 1]
    assert found["float32"].divergences == [0, 0, 0]
    assert 0 < sum(found["int8"].divergences) < found["int8"].largest < 0.5
