"""Models in several GGUF files, as llama.cpp's tools split them, and names of files in capitals."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGUFValueType, GGUFWriter
from support.models.model_cases import all_logits, random_ids
from support.models.tiny_gguf import F32, metadata_of, tensors_of, write_gguf
from support.models.tiny_models import write_tiny_model

from gateway.text.tokenizer import Tokenizer
from outrider.cli.doctor.models import read_model
from outrider.engine.models.checkpoints import find_checkpoint
from outrider.engine.models.gguf import read_config
from outrider.engine.runner import ModelRunner
from outrider.errors import ModelRefused
from outrider.model_files.gguf.files import only_gguf
from outrider.model_files.gguf.header import GgufFile
from outrider.model_files.gguf.tokenizer import read_tokenizer
from outrider.model_files.vocabulary import Vocabulary

PARTS = [f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as one file."""
    folder = write_tiny_model(tmp_path_factory.mktemp("whole") / "model", "llama", seed=3)
    return write_gguf(folder, folder.parent / "tiny.gguf")


@pytest.fixture(scope="module")
def split(whole: Path) -> Path:
    """The file in three parts, of which the first has what the model says of itself and no tensor."""
    folder = whole.parent / "split"
    folder.mkdir()
    metadata, tensors = metadata_of(whole.parent / "model"), tensors_of(whole.parent / "model", F32)
    names = list(tensors)
    for number, part in enumerate(PARTS):
        writer = GGUFWriter(folder / part, "llama")
        for key, value in metadata.items() if number == 0 else ():
            if key != "general.architecture":
                is_list = isinstance(value, list)
                kind = GGUFValueType.ARRAY if is_list else GGUFValueType.get_type(value)
                writer.add_key_value(key, value, GGUFValueType.BOOL if isinstance(value, bool) else kind)
        writer.add_key_value("split.no", number, GGUFValueType.UINT16)
        writer.add_key_value("split.count", 3, GGUFValueType.UINT16)
        writer.add_key_value("split.tensors.count", len(names), GGUFValueType.INT32)
        for name in ([], names[:8], names[8:])[number]:
            writer.add_tensor(name, tensors[name][0], raw_dtype=F32)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return folder


@pytest.fixture
def copied(split: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(split, tmp_path / "split"))


def logits(model: Path) -> torch.Tensor:
    """Logits of some random tokens."""
    return all_logits(ModelRunner.load(str(model), dtype="float32", kv_tokens=512), random_ids(20, 300), 12)[0]


@pytest.mark.parametrize("named", [*PARTS, ""])
def test_a_split_model_is_the_whole_one(whole: Path, split: Path, named: str) -> None:
    """By the name of any part, or of the folder: numbers, tokens, name, and what the doctor counts."""
    place = split / named
    found = find_checkpoint(str(place))
    assert found.folder == split / PARTS[0]
    assert found.name == ("tiny" if named else "split")
    assert torch.equal(logits(place), logits(whole))
    assert Vocabulary.read(place) == Tokenizer(str(place)).vocabulary() == Vocabulary.read(whole)
    ours, theirs = read_model("target", str(place)), read_model("target", str(whole))
    assert ours is not None
    assert theirs is not None
    assert ours.weights.count == theirs.weights.count


def test_the_hash_is_of_all_parts(copied: Path) -> None:
    """A byte of the last one makes another model."""
    before = find_checkpoint(str(copied)).digest()
    content = bytearray((copied / PARTS[2]).read_bytes())
    content[-5] ^= 64
    (copied / PARTS[2]).write_bytes(content)
    assert find_checkpoint(str(copied)).digest() != before


@pytest.mark.parametrize(
    ("missing", "named", "words"),
    [
        ([1], PARTS[0], f"is one of 3 parts of a model, and it lacks {PARTS[1]}"),
        ([0], PARTS[1], f"it lacks {PARTS[0]}"),
        ([1, 2], "", f"it lacks {PARTS[1]}, {PARTS[2]}"),
    ],
)
def test_parts_that_are_missing_are_named(copied: Path, missing: list[int], named: str, words: str) -> None:
    """Whichever part is asked for."""
    for number in missing:
        (copied / PARTS[number]).unlink()
    with pytest.raises(ModelRefused, match=words):
        find_checkpoint(str(copied / named))


def test_a_part_with_another_name_or_of_another_model_is_refused(copied: Path) -> None:
    """With what is wrong about it."""
    shutil.copy(copied / PARTS[0], copied.parent / "alone.gguf")
    with pytest.raises(
        ModelRefused, match=r'"split\.count" is 3, but the parts of a split model are called NAME-00001'
    ):
        find_checkpoint(str(copied.parent / "alone.gguf"))
    shutil.copy(copied / PARTS[1], copied / PARTS[2])
    with pytest.raises(ModelRefused, match=rf'{PARTS[2]}: "split\.no" is 1 of 3, but must be 2 of 3'):
        find_checkpoint(str(copied))


@pytest.mark.parametrize("name", ["tiny.GGUF", "tiny.Gguf"])
def test_capitals_in_a_suffix_are_as_good(whole: Path, tmp_path: Path, name: str) -> None:
    """As a file, and as the only one of a folder."""
    shutil.copy(whole, tmp_path / name)
    for place in (tmp_path / name, tmp_path):
        assert find_checkpoint(str(place)).folder == tmp_path / name
        assert Tokenizer(str(place)).vocabulary() == Vocabulary.read(whole)


def test_several_models_are_several_also_in_parts() -> None:
    """One in parts is one, and beside another there are two."""
    assert only_gguf("place", reversed(PARTS)) == PARTS[0]
    with pytest.raises(ModelRefused, match="has several GGUF files"):
        only_gguf("place", [*PARTS, "other.gguf"])


@pytest.mark.parametrize("none", [-1, 2**32 - 1])
@pytest.mark.parametrize("key", ["bos", "eos", "eot", "unknown", "padding", "seperator"])
def test_an_id_of_minus_one_is_none(whole: Path, key: str, none: int) -> None:
    """With and without a sign, for every special token."""
    file = GgufFile.read(whole)
    file = replace(file, metadata=file.metadata | {f"tokenizer.ggml.{key}_token_id": none})
    assert read_config(file).eos_token_ids == (frozenset() if key == "eos" else {0})
    assert read_tokenizer(file).get_vocab() == read_tokenizer(GgufFile.read(whole)).get_vocab()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("attention.output_scale", 0.5, "is 0.5, but only 0.0 is served"),
        ("attention.shared_kv_layers", 2, "is 2, a key that is not known here and may change the numbers"),
        ("a.key.of.tomorrow", "yes", "is 'yes', a key that is not known here and may change the numbers"),
        ("logit_scale", 0.25, "is 0.25, but only 1.0 is served"),
        ("a.key.of.tomorrow", 0, ""),
        ("expert_used_count", 2, ""),
        ("vocab_size", 7, ""),
        ("rope.scaling.finetuned", True, ""),
        ("logit_scale", 0.0, ""),
    ],
)
def test_keys_that_may_change_the_numbers_are_refused_and_others_are_not(
    whole: Path, tmp_path: Path, key: str, value: object, words: str
) -> None:
    """By name; one that is off changes nothing."""
    file = write_gguf(
        whole.parent / "model", tmp_path / "a.gguf", edit=lambda metadata, _: metadata.update({f"llama.{key}": value})
    )
    if not words:
        assert torch.equal(logits(file), logits(whole))
        return
    with pytest.raises(ModelRefused, match=re.escape(f'"llama.{key}" {words}')):
        find_checkpoint(str(file))
