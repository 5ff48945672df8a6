"""`bench serve`: what it prints of answers that were timed."""

import json
from pathlib import Path

import pytest

from bench.serve import Block, ServeOptions, TimedAnswer, conclude

BLOCKS = [
    Block("speculative", 1.0, [TimedAnswer(0, 0.1, [1, 2, 3, 4], 4, 2), TimedAnswer(1, 0.3, [1, 2, 3, 4], 4, 3)]),
    Block("plain", 2.0, [TimedAnswer(0, 0.2, [1, 2, 3, 4]), TimedAnswer(1, 0.2, [1, 2, 3, 9])]),
    Block("plain", 4.0, [TimedAnswer(2, 0.4, [5, 6, 7, 8])]),
    Block("speculative", 1.0, [TimedAnswer(2, 0.2, [5, 6, 7, 8], 3, 3)]),
]


def test_the_table_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """Two turns, 2 and 4 times as fast; one of three answers differs; it needs no more than 80 columns."""
    conclude("a:1", ServeOptions(requests=3, streams=2), BLOCKS)
    table = capsys.readouterr().out
    assert "| tokens/s | 6.0 (5.0 to 7.0) | 2.5 (1.8 to 3.2) |" in table
    assert "| time to first token, ms | 200.0 (150.0 to 250.0) | 200.0 (200.0 to 300.0) |" in table
    assert "Speculation gives 3.00 (2.50 to 3.50) times the tokens/s" in table
    assert "2 of 3 answers are the same" in table
    assert max(map(len, table.splitlines())) <= 80


def test_figures_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The object has them for each setting, and the file every request besides."""
    file = tmp_path / "requests.json"
    conclude("a:1", ServeOptions(requests=3, streams=2, json=True, save=file), BLOCKS)
    document = json.loads(capsys.readouterr().out)
    found = document["speculative"]
    assert (found["completed"], found["max_concurrency"], found["total_output_tokens"]) == (3, 2, 12)
    assert (found["num_draft_tokens"], found["num_accepted_tokens"]) == (11, 8)
    assert (document["equal_answers"], document["compared_answers"]) == (2, 3)
    assert document["ratio"] == {"low": 2.5, "median": 3.0, "high": 3.5, "count": 2}
    kept = json.loads(file.read_text())
    assert kept.pop("blocks")[3]["answers"][0]["token_ids"] == [5, 6, 7, 8]
    assert kept == document
