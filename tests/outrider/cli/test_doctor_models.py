"""What doctor reads of models without loading them, and what it makes of a pair."""

import json
import struct
from pathlib import Path

import pytest
from support.stack import DRAFT, TARGET

from outrider.cli.doctor import memory, models
from outrider.cli.doctor.findings import Status
from outrider.cli.doctor.models import ModelFiles
from outrider.errors import ModelRefused
from outrider.vocabulary import Vocabulary


def read(role: str, model: str) -> ModelFiles:
    """A model that can be read."""
    files = models.read_model(role, model)
    assert files is not None
    return files


def copied(folder: Path, **config: object) -> Path:
    """The embedded draft with another configuration."""
    for path in Path(DRAFT).iterdir():
        if path.is_file() and path.name != "config.json":
            (folder / path.name).symlink_to(path)
    values = json.loads((Path(DRAFT) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))
    return folder


def cached(hub: Path, name: str) -> Path:
    """The embedded draft as the hub's library keeps a model."""
    folder = hub / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    return copied(snapshot)


def test_the_embedded_pair_fits() -> None:
    """Sizes and type come from the headers, the verdict from the digests."""
    target, draft = read("target", TARGET), read("draft", DRAFT)
    assert (target.stored_dtype, target.context_len) == ("bfloat16", 4096)
    assert target.parameter_count == 11_015_040
    assert [each.status for each in models.judge_pair(target, draft)] == [Status.OK]
    finding = models.judge_model("target", TARGET, target, "bfloat16")
    assert (finding.status, "11,015,040 parameters" in finding.sentence) == (Status.OK, True)


def test_a_sized_model_has_its_shape_and_takes_its_memory() -> None:
    """Its tokenizer is that of the embedded model inside."""
    sized, small = read("target", "sized:target-200m"), read("target", TARGET)
    assert sized.parameter_count > 180_000_000
    assert sized.vocabulary == small.vocabulary
    assert memory.needed_bytes(sized, "float32") - memory.needed_bytes(sized, "bfloat16") == 2 * sized.parameter_count


def test_a_hub_id_is_not_looked_at() -> None:
    """Nothing is downloaded for a report."""
    assert models.read_model("target", "someone/something") is None
    finding = models.judge_model("target", "someone/something", None, "bfloat16")
    assert (finding.status, "hf download someone/something" in finding.fix) == (Status.SKIPPED, True)
    assert models.judge_absent(["someone/something"]).status is Status.SKIPPED


def test_a_hub_id_that_was_downloaded_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the library's cache, under its own name; what broke off before the weights came is not there."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = cached(tmp_path, "someone/something")
    files = models.read_model("draft", "someone/something")
    assert files is not None
    assert (files.name, files.vocabulary) == ("something", read("draft", DRAFT).vocabulary)
    (snapshot / "model.safetensors").unlink()
    assert models.read_model("draft", "someone/something") is None


def test_other_vocabularies_and_shorter_drafts(tmp_path: Path) -> None:
    """The first fails with what differs, the second is a warning with the length."""
    target = read("target", TARGET)
    short = read("draft", str(copied(tmp_path, max_position_embeddings=512)))
    found = models.judge_pair(target, short)
    assert [each.status for each in found] == [Status.OK, Status.WARNING]
    assert "512" in found[1].sentence
    other = ModelFiles("draft", "x", tmp_path, 1, "bfloat16", 4096, 1, Vocabulary.of([("a", 0), ("b", 1)]))
    [mismatch] = models.judge_pair(target, other)
    assert (mismatch.status, mismatch.exit_code) == (Status.FAILED, 78)
    assert "4096 and 2 ids" in mismatch.sentence


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.safetensors", struct.pack("<Q", 1 << 60), "is not a safetensors file"),
        ("model.safetensors", b"\x01", "is not a safetensors file"),
        ("config.json", b"{", "cannot be read as JSON"),
        ("config.json", b"[]", "is no JSON object"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    """A header that claims a terabyte is not believed."""
    copied(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelRefused, match=words) as refusal:
        models.read_model("draft", str(tmp_path))
    finding = models.judge_model("draft", str(tmp_path), refusal.value, "bfloat16")
    assert (finding.status, finding.exit_code) == (Status.FAILED, 78)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    """Told as what it lacks."""
    copied(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match="no safetensors weights"):
        models.read_model("draft", str(tmp_path))
