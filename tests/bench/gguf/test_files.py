"""bench.gguf without llama.cpp: files that it writes, what can be named, and what its reports say of known figures."""

import os
from pathlib import Path

import pytest
import torch
from support.models.model_cases import all_logits, random_ids
from support.models.tiny_models import TARGET

from bench.gguf import start
from bench.gguf.speed import OURS, Found, SpeedRun, render, step_bytes
from bench.gguf.subjects import Subject
from bench.gguf.write import WrittenWords, write_model
from outrider.cli.bench.common import AUTO, PLAIN
from outrider.engine.models.checkpoints import FolderCheckpoint, SizedCheckpoint, find_checkpoint
from outrider.engine.runner import ModelRunner
from outrider.errors import InvalidRequest, ModelRefused
from outrider.model_files.gguf.header import GgufFile
from outrider.model_files.model_names import Shape
from outrider.model_files.vocabulary import Vocabulary

SHAPE = Shape(512, 1280, 6, 8, 2, 128)
"""The embedded target fits, whose heads of 64 are widened."""


def checkpoint(name: str) -> FolderCheckpoint:
    """The embedded target, or a sized model that holds it."""
    found = find_checkpoint(str(TARGET)) if name == "embedded" else SizedCheckpoint.of("sized", TARGET, SHAPE, 3)
    assert isinstance(found, FolderCheckpoint)
    return found


@pytest.mark.parametrize("name", ["embedded", "sized"])
def test_a_written_file_is_the_model(tmp_path: Path, name: str) -> None:
    """Its tokenizer and, to the bit, its logits: queries and keys in llama.cpp's order are put back."""
    model, file = checkpoint(name), tmp_path / "model.gguf"
    write_model(model, WrittenWords.of_folder(TARGET, model.config), file)
    assert Vocabulary.read(file) == Vocabulary.read(TARGET)
    again = tmp_path / "again.gguf"
    write_model(model, WrittenWords.of_file(file), again)
    assert again.read_bytes() == file.read_bytes()
    token_ids = random_ids(24, 4096)
    written, made = (
        all_logits(ModelRunner.load(each, dtype="bfloat16", kv_tokens=256), token_ids, 8)[1]
        for each in (str(again), model)
    )
    assert torch.equal(written, made)


def test_a_step_reads_all_but_an_embedding_of_its_own(tmp_path: Path) -> None:
    """Of an embedding that is also the output it reads every row."""
    model, file = checkpoint("embedded"), tmp_path / "model.gguf"
    write_model(model, WrittenWords.of_folder(TARGET, model.config), file)
    read = GgufFile.read(file)
    whole = sum(place.size for place in read.tensors.values())
    assert step_bytes(read) == whole
    read.tensors["output.weight"] = read.tensors["token_embd.weight"]
    assert step_bytes(read) == whole


@pytest.mark.parametrize(
    ("name", "mix", "words"),
    [
        ("gpt2", "Q8_0", "--models is 'gpt2', but must be smollm2, gemma3-270m, or sized:PRESET"),
        ("gemma3-270m", "Q8_0", "--mixes is 'Q8_0', but must be Q4_K_M for gemma3-270m"),
    ],
)
def test_what_there_is_not_is_refused(name: str, mix: str, words: str) -> None:
    """With the option, the value and what there is."""
    with pytest.raises(InvalidRequest) as refused:
        Subject(name, mix)
    assert refused.value.message.startswith(words)


def test_an_unknown_preset_is_refused() -> None:
    """As everywhere."""
    with pytest.raises(ModelRefused, match="sized:9z is no sized model"):
        Subject("sized:9z", "Q8_0")


def test_ratios_are_those_of_one_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain over plain, auto over llama.cpp's fastest speculative setting; texts are compared token by token."""
    file = tmp_path / "tales-Q8_0.gguf"
    monkeypatch.setattr("bench.gguf.subjects.FILES", tmp_path)
    model = checkpoint("embedded")
    write_model(model, WrittenWords.of_folder(TARGET, model.config), file)
    subject = Subject("sized:200m", "Q8_0")
    file.rename(subject.file)

    def runs(*speeds: float, text: tuple[int, ...] = (1, 2, 3)) -> list[SpeedRun]:
        return [SpeedRun(text, 0.1, speed, 1.0) for speed in speeds]

    found = Found(
        {PLAIN: runs(10, 20, 40), "lookup 2": runs(5, 10, 20), "draft 4": runs(20, 10, 30)},
        dict(zip(OURS, (runs(30, 40, 40, text=(1, 2, 4)), runs(40, 40, 60)), strict=True)),
        llama_ms={1: [10.0], 5: [25.0], 9: [40.0]},
        ours_ms={1: [10.0], 5: [12.0], 9: [13.0]},
        bytes_per_s=[40.0 * subject.file.stat().st_size],
    )
    assert found.best == "draft 4"
    rows = [
        line.strip("| ").split(" | ") for line in render({subject: found}).splitlines() if line.startswith("| sized")
    ]
    speeds = {row[1]: row[2:] for row in rows[:5]}
    assert speeds[f"ours, {AUTO}"][:2] == ["40.0 (40.0 to 50.0)", "2.00 (1.50 to 4.00)"]
    assert rows[5][1:] == ["2.00 (1.00 to 3.00)", "2.00 (2.00 to 4.00)", "draft 4", "0 of 3", "2"]
    ours_5, theirs_5, ours_9, theirs_9 = (float(cell.split()[0]) for cell in rows[6][3:7])
    assert (ours_5, theirs_5, ours_9, theirs_9) == (1.2, 2.5, 1.3, 4.0)
    assert 0.9 < float(rows[6][7]) <= 1


def test_memory_is_told_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a service has in memory, and the most that it had, over the file's bytes."""
    monkeypatch.setattr("bench.gguf.subjects.FILES", tmp_path)
    subject = Subject("sized:8b", "Q4_K_M")
    subject.file.write_bytes(bytes(1_000_000))
    report = start.render({subject: {"ours": [start.Started(1.5, 2.0, 1_100_000, 1_300_000)]}})
    row = next(line for line in report.splitlines() if line.startswith("| sized:8b")).strip("| ").split(" | ")
    assert [float(cell.split()[0]) for cell in row[3:]] == [1.5, 2.0, 1.1, 1.3, 0]
    mine, most = start.memory_of(os.getpid())
    assert 1 << 20 < mine <= most
