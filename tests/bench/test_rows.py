"""bench.rows on the embedded target: what it prints, and that logits which differ end it; not how fast anything was."""

from pathlib import Path

import pytest

from bench.common import TokensDiffer
from bench.rows import SESSIONS, SHAPES, Forwards, RowTimes, main, measure, render
from outrider.engine.models.checkpoints import find_checkpoint
from outrider.engine.ops.library import FOLDER

ROOT = Path(__file__).resolve().parents[2]


def forwards(context: int) -> Forwards:
    return Forwards(FOLDER, find_checkpoint(str(ROOT / "models/target")), "bfloat16", 1, context, 4)


def test_a_checkout_against_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line a number of rows, with times of both and their ratio for each shape."""
    options = ["--model", str(ROOT / "models/target"), "--old", str(ROOT), "--rows", "1,3", "--context", "8"]
    monkeypatch.setattr("sys.argv", ["rows", *options, "--turns", "1", "--threads", "1"])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert "8 tokens of context, 1 threads" in lines[0]
    for shape in SHAPES:
        assert f"| {shape}, old | {shape}, new | {shape}, new over old |" in lines[-4]
    assert [line.split()[1] for line in lines[-2:]] == ["1", "3"]


def test_logits_that_differ_end_the_run() -> None:
    """Another context gives other logits; which rows differed is reported."""
    with pytest.raises(TokensDiffer, match="2 rows, chain: logits differ between"):
        measure({"old": forwards(8), "new": forwards(9)}, [2], 1)


def test_a_forward_of_sessions_has_a_row_of_each() -> None:
    """All shapes give the logits of as many rows, and every session here says the same."""
    model = forwards(8)
    for shape in SHAPES:
        assert model.step(shape, 4)[1].shape[0] == 4
    logits = model.step(SESSIONS, 4)[1]
    assert (logits == model.step(SESSIONS, 1)[1]).all()


def test_ratios_are_those_of_neighbours() -> None:
    """A turn that was slow for both changes no ratio."""
    times = {"old": [1.0, 2.0, 30.0], "new": [2.0, 6.0, 60.0]}
    found: RowTimes = {5: dict.fromkeys(SHAPES, times)}
    assert render(found).splitlines()[2].startswith("| 5 | 2.00 | 6.00 (4.00 to 33.00) | 2.00 (2.00 to 2.50) |")


def test_types_of_weights_side_by_side(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Both are named with their bytes, and logits that differ end nothing."""
    options = ["--model", str(ROOT / "models/target"), "--dtype", "int8", "--against", "bfloat16", "--rows", "1"]
    monkeypatch.setattr("sys.argv", ["rows", *options, "--context", "8", "--turns", "1", "--threads", "1"])
    main()
    output = capsys.readouterr().out
    assert "bfloat16: 22 MB of weights" in output
    assert "int8: 11 MB of weights" in output
    assert "| chain, bfloat16 | chain, int8 | chain, int8 over bfloat16 |" in output
