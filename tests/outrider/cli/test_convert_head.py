"""`outrider convert-head` as a process: what it prints, what it writes, and its exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.heads.tiny_heads import eagle3, tiny_target

from outrider.engine.heads.checkpoint import read_head

COMMAND = (sys.executable, "-c", "from outrider.cli import main; main()", "convert-head")


def run_command(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    ended = subprocess.run([*COMMAND, *arguments], capture_output=True, check=False, timeout=120, text=True)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.slow
def test_a_head_is_converted(tmp_path: Path) -> None:
    """One line, or one object, about what the folder holds now; a target can load it."""
    folder, out = eagle3(tmp_path / "head"), tmp_path / "-out"
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin")
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    words = f"{len(tensors)} tensors, {size} bytes, layout speculators eagle3, rope_theta 10000"
    assert run_command("--", str(folder), str(out)) == (0, f"{out}: {words}\n", "")
    assert "rope_theta: 10000" in read_head(out, tiny_target()).notes
    code, printed, notes = run_command(str(folder), str(tmp_path / "other"), "--theta", "5e5", "--json")
    assert (code, notes) == (0, "")
    assert json.loads(printed) == {
        "layout": "speculators eagle3",
        "tensors": len(tensors),
        "bytes": size,
        "theta": 500000.0,
    }
    assert "rope_theta: 500000" in read_head(tmp_path / "other", tiny_target()).notes


@pytest.mark.slow
@pytest.mark.parametrize(("place", "code"), [("/dev/null/out", 74), ("", 64)])
def test_a_place_that_cannot_be_written_is_named(place: str, code: int, tmp_path: Path) -> None:
    """A folder that cannot be made, and one in which there is no room."""
    folder, out = eagle3(tmp_path / "head"), Path(place or tmp_path / "out")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    line = ("bash", "-c", 'ulimit -f 0; exec "$@"', "bash", *COMMAND, str(folder), str(out))
    ended = subprocess.run(line, capture_output=True, check=False, timeout=120, text=True)
    [sentence] = ended.stderr.splitlines()
    assert ended.returncode == code
    assert str(out) in sentence


@pytest.mark.slow
def test_what_is_wrong_is_one_sentence(tmp_path: Path) -> None:
    """With the codes of wrong usage and of a wrong model."""
    folder, used = eagle3(tmp_path / "head"), tmp_path / "used"
    used.mkdir()
    (used / "file").touch()
    words = f"outrider: OUT is {str(used)!r}, but must be a folder that is empty, or not there yet\n"
    assert run_command(str(folder), str(used)) == (64, "", words)
    words = f"outrider: {folder} has no .bin, .pt, .pth to convert\n"
    assert run_command(str(folder), str(tmp_path / "out")) == (78, "", words)
    words = "outrider: --theta is 0.0, but must be a positive number\n"
    assert run_command(str(folder), str(tmp_path / "out"), "--theta", "0") == (64, "", words)
