"""Beside llama.cpp, which is compiled for this machine (make test-harness): its mixes, its logits, its texts."""

from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models.engine_cases import native, random_ids
from support.models.gguf_blocks import FORMS, reference
from support.models.tiny_gguf import MIXES, mixed_type
from support.models.tiny_models import TARGET

from bench.gguf.lab import Llama, LlamaFailed
from bench.gguf.quality import BASE, LLAMA, measure, read_text
from bench.gguf.sized import write_sized
from bench.gguf.subjects import Subject, make, quantise
from bench.gguf.write import WrittenWords, name_in_file, write_model
from bench.quality import interval, log_probabilities
from outrider.engine.batching import Feed
from outrider.engine.models.checkpoints import FolderCheckpoint, SizedCheckpoint, find_checkpoint
from outrider.engine.models.gguf import load_gguf, read_config
from outrider.engine.ops.blocks import unpacked
from outrider.engine.runner import ModelRunner
from outrider.model_files.gguf.header import GgufFile
from outrider.model_files.model_names import Shape

pytestmark = [pytest.mark.llama, pytest.mark.timeout(600)]

CPU = torch.device("cpu")
# Three heads share keys, so that no rule for four holds; widths are whole blocks of 256.
WIDE = Shape(512, 1280, 6, 6, 2, 128)
FILE = "file"
MAX_KL, MAX_RATIO = 0.006, 1.007


@pytest.fixture(scope="module")
def llama() -> Iterator[Llama]:
    """One process for all tests."""
    with Llama() as running:
        yield running


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("mix", MIXES)
def test_mixes_of_its_quantiser_are_read(tmp_path: Path, llama: Llama, mix: str, is_wide: bool) -> None:
    """Types are those of our tests' own mixes, and values, where rows kept their order, those of the description."""
    found = SizedCheckpoint.of("sized", TARGET, WIDE, 3) if is_wide else find_checkpoint(str(TARGET))
    assert isinstance(found, FolderCheckpoint)
    wide, file = tmp_path / "wide.gguf", tmp_path / "file.gguf"
    write_model(found, WrittenWords.of_folder(TARGET, found.config), wide)
    quantise(llama, wide, file, mix, 2)
    read = GgufFile.read(file)
    matrices = {name: place for name, place in read.tensors.items() if len(place.shape) > 1}
    assert {name: place.type.name for name, place in matrices.items()} == {
        name: mixed_type(mix, name, place.shape[1], WIDE.num_layers, has_output="output.weight" in read.tensors)
        for name, place in matrices.items()
    }
    data = np.fromfile(file, np.uint8)
    tensors, _ = load_gguf(read, read_config(read), CPU, None, native())
    for name, tensor in tensors.items():
        place = read.tensors[name_in_file(name)]
        if place.type.name in FORMS and not name.endswith(("q_proj.weight", "k_proj.weight")):
            stored = data[place.offset : place.offset + place.size].reshape(place.shape[0], -1)
            assert np.array_equal(unpacked(tensor).numpy(), reference(place.type.name, stored))


@pytest.mark.parametrize("mix", ["Q4_K_M", "Q6_K", "Q8_0"])
def test_a_sized_model_is_written_in_a_mix(tmp_path: Path, llama: Llama, mix: str) -> None:
    """At once, with the types and the spread that its quantiser gives to the whole model, and the same words."""
    found = SizedCheckpoint.of("sized", TARGET, WIDE, 3)
    wide, theirs, ours = (tmp_path / f"{name}.gguf" for name in ("wide", "theirs", "ours"))
    write_model(found, WrittenWords.of_folder(TARGET, found.config), wide)
    quantise(llama, wide, theirs, mix, 2)
    write_sized(found, mix, llama, ours, 2)
    one, other = GgufFile.read(theirs), GgufFile.read(ours)
    assert {name: (place.type_id, place.shape) for name, place in one.tensors.items()} == {
        name: (place.type_id, place.shape) for name, place in other.tensors.items()
    }
    loaded = [load_gguf(file, read_config(file), CPU, torch.float32, native())[0] for file in (one, other)]
    for name in loaded[0]:
        spreads = [float(unpacked(each[name]).std()) for each in loaded]
        assert spreads[1] == pytest.approx(spreads[0], rel=0.02), name
    token_ids = random_ids(200, 4096)
    best, quantised, written = (
        log_probabilities(ModelRunner.load(str(file), dtype=BASE, kv_tokens=256), token_ids).argmax(1)
        for file in (wide, theirs, ours)
    )
    assert (written == best).float().mean() > (quantised == best).float().mean() - 0.05
    llama.ask("load", file=str(ours), threads=2)
    assert (llama.log_probabilities(token_ids).argmax(1) == written).float().mean() > 0.9


@pytest.mark.parametrize(
    ("name", "mix"), [("smollm2", "Q4_1"), ("smollm2", "Q4_K_M"), ("smollm2", "Q6_K"), ("gemma3-270m", "Q4_K_M")]
)
def test_no_more_is_lost_than_by_llama_cpp(llama: Llama, name: str, mix: str) -> None:
    """KL to the file's own values at most 0.006 nats, and not above llama.cpp's by more than its interval."""
    subject = Subject(name, mix)
    make(subject, llama, 2)
    found = measure(subject, llama, read_text(subject, None, 2048), [FILE], 2)
    ours, theirs, base = (found[name] for name in (FILE, LLAMA, BASE))
    divergence = sum(ours.divergences) / sum(ours.counts)
    assert 0 < divergence < MAX_KL
    assert divergence < interval(theirs.divergences, theirs.counts)[1]
    assert 1 / MAX_RATIO < ours.perplexity / base.perplexity < MAX_RATIO


async def test_greedy_texts_part_where_logits_are_near(llama: Llama) -> None:
    """Ours and llama.cpp's, of the assistant: where another token comes, the file's own values hesitate too."""
    subject = Subject("smollm2", "Q4_K_M")
    make(subject, llama, 2)
    llama.ask("load", file=str(subject.file), threads=2)
    runner, exact = (ModelRunner.load(str(subject.file), dtype=dtype, kv_tokens=1024) for dtype in (FILE, BASE))
    agreed = 0
    for prompt in await subject.prompts(0, 8):
        theirs = llama.ask("generate", prompt=list(prompt), tokens=24)["tokens"]
        session, ours = runner.open(prompt, len(prompt)), list[int]()
        while len(ours) < len(theirs):
            ours.append(int(runner.forward([Feed(session)]).logits.argmax()))
            session.extend(ours[-1:])
        session.free()
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=True)))
        agreed += same
        if same < len(ours):
            row = log_probabilities(exact, [*prompt, *ours[:same]])[-1]
            assert abs(float(row[ours[same]] - row[theirs[same]])) < 0.5
    assert agreed > 8 * 12


def test_speculation_there_is_sound(llama: Llama) -> None:
    """What is measured against: lookups and drafts take fewer passes and, but for near ties, say the same."""
    subject = Subject("smollm2", "Q4_1")
    make(subject, llama, 2)
    llama.ask("load", file=str(subject.file), threads=2, draft=str(subject.draft_file))
    prompt = list(range(300, 340)) * 3
    plain = llama.ask("generate", prompt=prompt, tokens=40)
    assert plain["passes"] == 39
    for way in ("lookup", "draft"):
        told = llama.ask("generate", prompt=prompt, tokens=40, setting=way, count=4)
        assert told["passes"] <= 39
        assert told["tokens"][:8] == plain["tokens"][:8]
    assert llama.ask("generate", prompt=prompt, tokens=40, setting="lookup", count=4)["passes"] < 30


def test_what_it_cannot_do_is_said(tmp_path: Path, llama: Llama) -> None:
    """In a sentence, and the process goes on."""
    with pytest.raises(LlamaFailed, match=r"llama\.cpp cannot load"):
        llama.ask("load", file=str(tmp_path / "none.gguf"), threads=1)
    with pytest.raises(LlamaFailed, match="setting is tree"):
        llama.ask("generate", prompt=[1], tokens=1, setting="tree")
