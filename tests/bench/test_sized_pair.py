"""Sized models as files: they load like those made in memory, and other software reads them."""

import sys
from pathlib import Path

import pytest
import torch
import transformers

from bench import sized_pair
from bench.sized_pair import write
from outrider.engine.batching import Feed
from outrider.engine.models.checkpoints import SizedCheckpoint, find_checkpoint
from outrider.engine.models.weights import DTYPES, load_tensors, weight_files
from outrider.engine.runner import ModelRunner
from outrider.errors import InvalidRequest, ModelRefused
from outrider.model_names import PRESETS, Shape
from outrider.vocabulary import Vocabulary

DRAFT = Path(__file__).resolve().parents[2] / "models" / "draft"
CPU = torch.device("cpu")
WIDE = SizedCheckpoint.of("wide", DRAFT, Shape(204, 360, 3, 6, 2, 128, tied_embeddings=False), 4)


@pytest.mark.parametrize(("dtype", "shard_bytes"), [("bfloat16", 1 << 30), ("float32", 1 << 20)])
def test_files_hold_what_is_made_in_memory(tmp_path: Path, dtype: str, shard_bytes: int) -> None:
    """Shape and every tensor, in one file and in many."""
    write(WIDE, tmp_path / "model", dtype, shard_bytes)
    found = find_checkpoint(str(tmp_path / "model"))
    assert found.config == WIDE.config
    assert (len(weight_files(found.folder)) > 5) == (shard_bytes < 1 << 30)
    stored, made = found.load(CPU, DTYPES[dtype]), WIDE.load(CPU, DTYPES[dtype])
    assert stored.keys() == made.keys()
    assert all(torch.equal(stored[name], made[name]) for name in made)
    assert all(stored[name].dtype == made[name].dtype for name in made)
    assert Vocabulary.read(found.folder) == Vocabulary.read(DRAFT)


def test_transformers_reads_them(tmp_path: Path) -> None:
    """Its logits in float32 are ours, and close to those of the model inside in its own files."""
    write(WIDE, tmp_path / "model", "float32", 1 << 20)
    token_ids = torch.randint(4096, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    logits = []
    for folder in (tmp_path / "model", DRAFT):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            logits.append(model(torch.tensor([token_ids])).logits[0, -1])
    torch.testing.assert_close(logits[0], logits[1], atol=1e-3, rtol=0)
    runner = ModelRunner.load(str(tmp_path / "model"), dtype="float32", kv_tokens=1024)
    ours = runner.forward([Feed(runner.open(token_ids, 60))]).logits[-1]
    torch.testing.assert_close(ours, logits[0], atol=1e-3, rtol=0)


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    """Nothing of it is overwritten."""
    (tmp_path / "notes").touch()
    with pytest.raises(InvalidRequest, match="a folder that is new or empty"):
        write(WIDE, tmp_path, "bfloat16")
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_the_command_writes_a_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says how large it is; the default type is bfloat16."""
    monkeypatch.setattr(sys, "argv", ["sized_pair", "10m", "--draft", "--out", str(tmp_path / "m"), "--seed", "3"])
    sized_pair.main()
    assert "11,015,040 parameters, 22 MB" in capsys.readouterr().out
    found = find_checkpoint(str(tmp_path / "m"))
    made = SizedCheckpoint.of("m", DRAFT, PRESETS["draft"]["10m"], 3)
    stored = load_tensors(found.folder, made.config, CPU, torch.bfloat16)
    assert all(torch.equal(stored[name], tensor) for name, tensor in made.tensors(CPU, torch.bfloat16))


def test_the_command_lists_and_refuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All presets with their sizes; a size that nobody has is refused."""
    monkeypatch.setattr(sys, "argv", ["sized_pair", "--list"])
    sized_pair.main()
    listed = capsys.readouterr().out
    assert all(f"sized:{role}-{preset}" in listed for role, presets in PRESETS.items() for preset in presets)
    monkeypatch.setattr(sys, "argv", ["sized_pair", "7b"])
    with pytest.raises(ModelRefused, match="is no sized model"):
        sized_pair.main()
