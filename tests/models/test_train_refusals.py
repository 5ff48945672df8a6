"""What models/train.py does not begin with: each is one sentence, and nothing is written."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from support.runs import ROLES, TINY, train

from outrider.errors import InvalidRequest
from train import app

OPTIONS = [*TINY[:2], *TINY[4:]]  # without --threads, which would hold for all tests of this process
BAD_TEXTS = {
    "missing.txt": (None, "a file that can be read"),
    "empty.txt": (b"\n\n \n", "a file with text in it"),
    "latin.txt": (b"A fox\xff", "UTF-8 text, unlike its byte 5"),
    "short.txt": (b"Too short a tale.", "a text of at least 384 tokens"),
    "plain.gz": (b"plain", "a file that can be read: Not a gzipped file"),
    "half.gz": (gzip.compress(b"tale " * 99)[:-9], "a file that can be read: Compressed file ended"),
    "plain.xz": (b"plain", "a file that can be read: Input format not supported"),
}


def refusal(*options: str | Path) -> str:
    """The sentence with which the command ends."""
    with pytest.raises(InvalidRequest) as caught:
        app([str(each) for each in options], standalone_mode=False)
    return caught.value.message


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_a_bad_text_is_refused(tmp_path: Path, name: str) -> None:
    """Whatever is wrong with it; the sentence names the option."""
    content, sentence = BAD_TEXTS[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    message = refusal("--corpus", tmp_path / name, "--out", tmp_path / "out", *OPTIONS)
    assert message.startswith("--corpus is ")
    assert sentence in message
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_sentence_is_all_that_is_said(tmp_path: Path) -> None:
    """One line, and the exit code of wrong usage."""
    code, output = train("--corpus", tmp_path / "missing.txt")
    assert (code, output.count("\n")) == (64, 1)


def test_a_folder_of_others_is_left_alone(corpus: Path, tmp_path: Path) -> None:
    """Files, a folder with anything in it, and a training.json that is not ours; nothing in it changes."""
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "training.json").write_text("mine")
    for out in (tmp_path, tmp_path / "notes", tmp_path / "other"):
        assert refusal("--corpus", corpus, "--out", out, *OPTIONS).startswith("--out is ")
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert files == ["notes", "other", "other/training.json"]


@pytest.mark.slow
def test_another_run_needs_another_folder(corpus: Path, trained: tuple[Path, str], tmp_path: Path) -> None:
    """The first setting that differs is named, with what it was."""
    message = refusal("--corpus", corpus, "--out", trained[0], *OPTIONS, "--draft-steps", "8")
    assert message.startswith("--draft-steps is 8, but must be that of the run in")
    assert ", 7, or go with another --out" in message
    other = tmp_path / "other.txt"
    other.write_text(corpus.read_text(encoding="utf-8") + " The end.", encoding="utf-8")
    assert refusal("--corpus", other, "--out", trained[0], *OPTIONS).startswith("--corpus is ")


def test_options_out_of_range_are_refused(corpus: Path, tmp_path: Path) -> None:
    """Unknown presets and devices, no steps at all, and steps of stages that do not take place."""
    start = ("--corpus", corpus, "--out", tmp_path / "out")
    assert refusal(*start, "--preset", "huge") == "--preset is 'huge', but must be one of story, large, tiny"
    assert refusal(*start, "--device", "abacus").startswith("--device is 'abacus'")
    assert refusal(*start, "--draft-steps", "0").startswith("--draft-steps is 0")
    assert refusal(*start, "--from-pair", tmp_path, "--draft-steps", "5").startswith("--draft-steps is '5'")


@pytest.mark.slow
def test_a_pair_that_is_none_is_refused(corpus: Path, trained: tuple[Path, str], tmp_path: Path) -> None:
    """Missing, of different vocabularies, and with rope scaling of its own."""
    start = ("--corpus", corpus, "--out", tmp_path / "out", "--preset", "tiny", "--from-pair")
    assert refusal(*start, tmp_path / "missing").startswith("--from-pair is ")
    for role in ROLES:
        shutil.copytree(trained[0] / role, tmp_path / "pair" / role)
    config = json.loads((tmp_path / "pair" / "target" / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    (tmp_path / "pair" / "target" / "config.json").write_text(json.dumps(config))
    assert "without rope scaling" in refusal(*start, tmp_path / "pair")
    (tmp_path / "pair" / "draft" / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refusal(*start, tmp_path / "pair")
