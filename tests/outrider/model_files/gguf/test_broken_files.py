"""Files that are no model: each refused with one sentence that names the file and the fault, and nothing allocated."""

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from support.models.tiny_gguf import F32, Metadata, Tensors, metadata_of, tensors_of, write_parts
from support.models.tiny_models import write_tiny_model

from outrider.engine.models.checkpoints import find_checkpoint
from outrider.errors import ModelRefused
from outrider.model_files.gguf import header
from outrider.model_files.vocabulary import Vocabulary

HUGE = (1 << 62).to_bytes(8, "little")
TOKENS = "tokenizer.ggml.tokens"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Metadata, Tensors]:
    """Metadata and tensors of a tiny Llama."""
    folder = write_tiny_model(tmp_path_factory.mktemp("sound"), "llama")
    return metadata_of(folder), tensors_of(folder, F32)


@pytest.fixture(scope="module")
def content(sound: tuple[Metadata, Tensors], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of the same file."""
    return write_parts(tmp_path_factory.mktemp("content") / "a.gguf", *sound).read_bytes()


def read(file: Path) -> None:
    """What a service reads of a model before it takes memory for it."""
    find_checkpoint(str(file))
    Vocabulary.read(file)


def refusal(file: Path) -> str:
    """What is said of a file by code that would load it, or read its tokenizer; little memory is taken for it."""
    tracemalloc.start()
    try:
        with pytest.raises(ModelRefused) as caught:
            read(file)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    assert "\n" not in caught.value.message
    assert str(file) in caught.value.message
    return caught.value.message


def at(place: int, data: bytes) -> Callable[[bytes], bytes]:
    """Writes bytes over others."""
    return lambda content: content[:place] + data + content[place + len(data) :]


def behind(name: str, skipped: int, data: bytes) -> Callable[[bytes], bytes]:
    """A fault that writes data so many bytes after the first place where a name stands."""
    return lambda content: at(content.index(name.encode()) + len(name) + skipped, data)(content)


# magic, version, counts of tensors and keys, then key, type, value; tensors are name, dimensions, type, offset.
BYTES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda content: b"", "is truncated: magic number takes 4 bytes, but only 0 are left"),
    "another format": (at(0, b"PK\x03\x04"), "is not a GGUF file: it begins with"),
    "old version": (at(4, struct.pack("<I", 1)), "has the version 1 of GGUF, but must have 2 or 3"),
    "new version": (at(4, struct.pack("<I", 4)), "has the version 4 of GGUF, but must have 2 or 3"),
    "big-endian": (at(4, struct.pack(">I", 3)), "is big-endian, but must be a little-endian GGUF file"),
    "only a beginning": (lambda content: content[:20], "is truncated: number of metadata keys takes 8 bytes"),
    "cut in a key": (lambda content: content[:40], "is truncated: metadata key 0 takes"),
    "cut in the tokens": (lambda content: content[: content.index(b"[PAD280]")], "is truncated"),
    "cut in the tensors' names": (lambda content: content[: content.index(b"token_embd")], "is truncated: the name of"),
    "cut in the numbers": (lambda content: content[:-64], "is truncated: it has the tensor"),
    "too many tensors": (at(8, HUGE), "as its number of tensors, but there may be 131,072"),
    "too many keys": (at(16, HUGE), "as its number of metadata keys, but there may be 16,384"),
    "more keys than there are": (at(16, struct.pack("<Q", 16_000)), "has "),
    "endless key": (at(24, HUGE), "bytes in metadata key 0, but there may be 65,536"),
    "endless text": (behind("general.architecture", 4, HUGE), "bytes in 'general.architecture', but there may be"),
    "long text": (behind("general.architecture", 4, struct.pack("<Q", 1 << 27)), "is truncated: 'general.arch"),
    "unknown type": (behind("general.architecture", 0, struct.pack("<I", 77)), "has the type 77 for"),
    "endless list": (behind(TOKENS, 8, HUGE), "has more than 4,194,304 values in arrays, at 'tokenizer.ggml.tokens'"),
    "long list": (behind("tokenizer.ggml.token_type", 8, struct.pack("<Q", 4_000_000)), "is truncated"),
    "list of lists": (behind(TOKENS, 4, struct.pack("<I", 9)), "has an array of the type 9 in"),
    "no UTF-8": (behind("general.architecture", 12, b"\xff"), "has bytes in 'general.architecture' that are not UTF-8"),
    "no dimensions": (behind("token_embd.weight", 0, bytes(4)), "has 0 dimensions for the tensor 'token_embd.weight'"),
    "many dimensions": (behind("token_embd.weight", 0, b"\xff" * 4), "but there may be 1 to 4"),
    "empty rows": (behind("token_embd.weight", 4, bytes(8)), "has the shape [300, 0] for the tensor"),
    "huge rows": (behind("token_embd.weight", 4, HUGE), "is truncated: it has the tensor 'token_embd.weight'"),
    "unknown tensor type": (
        behind("token_embd.weight", 20, struct.pack("<I", 9)),
        "has the type 9 for the tensor 'token_embd.weight', but it must be one of F32, F16, Q4_0",
    ),
    "rows of no whole blocks": (
        behind("token_embd.weight", 20, struct.pack("<I", 12)),
        "but Q4_K needs rows of a multiple of 256 numbers",
    ),
    "an offset beyond the end": (behind("token_embd.weight", 24, HUGE), "is truncated: it has the tensor"),
    "tensors over each other": (behind("blk.1.attn_q.weight", 24, bytes(8)), "the offset 0, within the tensor"),
    "a crooked offset": (behind("token_embd.weight", 24, b"\x01"), "which is no multiple of 32"),
    "a key twice": (
        lambda content: content.replace(b"llama.attention.key_length", b"llama.attention.head_count", 1),
        "twice",
    ),
    "a tensor twice": (
        lambda content: content.replace(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight"),
        "has the tensor 'blk.0.attn_q.weight' twice",
    ),
}


@pytest.mark.parametrize("fault", BYTES)
def test_broken_bytes_are_refused(tmp_path: Path, content: bytes, fault: str) -> None:
    """Truncated, hostile and foreign files."""
    spoil, words = BYTES[fault]
    file = tmp_path / "broken.gguf"
    file.write_bytes(spoil(content))
    assert words in refusal(file)


def test_no_cut_of_a_file_is_anything_but_a_sentence(tmp_path: Path, content: bytes) -> None:
    """Wherever a download ends."""
    file = tmp_path / "cut.gguf"
    for length in range(0, len(content), len(content) // 150):
        file.write_bytes(content[:length])
        with pytest.raises(ModelRefused):
            find_checkpoint(str(file))


def test_no_wrong_byte_is_anything_but_a_sentence(tmp_path: Path, content: bytes) -> None:
    """A file with noise in its header is a model or refused, and takes neither time nor memory."""
    file, random = tmp_path / "noisy.gguf", np.random.default_rng(0)
    end, messages = content.index(b"token_embd.weight") + 200, list[str]()
    for _ in range(150):
        noisy = bytearray(content)
        for place in random.integers(0, end, 4):
            noisy[place] = random.integers(0, 256)
        file.write_bytes(noisy)
        try:
            read(file)
        except ModelRefused as error:
            messages.append(error.message)
    assert len(messages) > 20
    assert all(str(file) in message for message in messages)


def without(key: str) -> Callable[[Metadata, Tensors], object]:
    """A file that lacks a key."""
    return lambda metadata, _: metadata.pop(key)


def having(**values: Any) -> Callable[[Metadata, Tensors], object]:
    """A file with other values; two underscores stand for the beginning of the tokenizer's keys."""
    own = {
        f"tokenizer.ggml.{key[2:]}" if key.startswith("__") else f"llama.{key.replace('__', '.')}": value
        for key, value in values.items()
    }
    return lambda metadata, _: metadata.update(own)


def naming(name: str) -> Callable[[Metadata, Tensors], object]:
    """A file of another architecture, with its keys."""

    def edit(metadata: Metadata, _: Tensors) -> None:
        renamed = {key.replace("llama.", f"{name}.", 1): value for key, value in metadata.items()}
        metadata.clear()
        metadata.update(renamed | {"general.architecture": name})

    return edit


NORM = "blk.1.attn_norm.weight"
CONTENTS: dict[str, tuple[Callable[[Metadata, Tensors], object], str]] = {
    "mamba": (naming("mamba"), "\"general.architecture\" is 'mamba', but must be one of llama, qwen2, qwen3"),
    "caps": (naming("gemma2"), "\"general.architecture\" is 'gemma2', which has caps on attention scores and logits"),
    "factors of another family": (
        lambda _, tensors: tensors.update({"rope_factors_short.weight": (np.ones(8, np.float32), F32)}),
        "the tensor rope_factors_short.weight is none that its configuration asks for",
    ),
    "a part": (lambda metadata, _: metadata.update({"split.count": 3}), '"split.count" is 3, but the parts of a'),
    "no size": (without("llama.embedding_length"), '"llama.embedding_length" is missing'),
    "text for size": (having(block_count="two"), "\"llama.block_count\" is 'two', but must be an integer"),
    "no heads": (having(attention__head_count=0), '"llama.attention.head_count" is 0, but must be an integer of'),
    "experts": (having(expert_count=8), '"llama.expert_count" is 8, but only 0 is served'),
    "part of a head turns": (having(rope__dimension_count=8), '"llama.rope.dimension_count" is 8, but must be the'),
    "longrope": (having(rope__scaling__type="longrope"), "\"llama.rope.scaling.type\" is 'longrope', but must be one"),
    "no factor": (having(rope__scaling__type="linear"), '"llama.rope.scaling.factor" is missing'),
    "window of text": (having(attention__sliding_window="w"), '"llama.attention.sliding_window" is'),
    "alignment": (lambda metadata, _: metadata.update({"general.alignment": "no"}), '"general.alignment" that is'),
    "lacks a tensor": (lambda _, tensors: tensors.pop(NORM), f"lacks the tensor {NORM}"),
    "one tensor too many": (
        lambda _, tensors: tensors.update(stray=(np.zeros(32, np.float32), F32)),
        "the tensor stray is none that its configuration asks for",
    ),
    "another shape": (
        lambda _, tensors: tensors.update({NORM: (np.zeros(7, np.float32), F32)}),
        f"the tensor {NORM} has the shape [7], but its configuration asks for [48]",
    ),
    "integers": (
        lambda _, tensors: tensors.update({NORM: (np.zeros(48, np.int8), GGMLQuantizationType.I8)}),
        f"has the type 24 for the tensor '{NORM}', but it must be one of F32",
    ),
    "factors of nothing": (
        lambda _, tensors: tensors.update({"rope_freqs.weight": (np.zeros(8, np.float32), F32)}),
        "the tensor rope_freqs.weight holds 0, but a factor must be from 1",
    ),
    "no tokens": (without(TOKENS), '"tokenizer.ggml.tokens" is missing'),
    "a token twice": (having(__tokens=["a"] * 300), "has the token 'a' twice"),
    "types of others": (having(__token_type=[1, 2]), '"tokenizer.ggml.token_type" must be a list of 300 numbers'),
    "unknown tokenizer": (having(__model="wordpiece"), '"tokenizer.ggml.model" is \'wordpiece\', but must be "gpt2"'),
    "unknown pre-tokenizer": (having(__pre="viking"), "\"tokenizer.ggml.pre\" is 'viking', a pre-tokenizer that"),
    "a merge of nothing": (having(__merges=["a qqq"]), "\"tokenizer.ggml.merges\" has 'qqq', which is no token"),
    "a merge of three": (having(__merges=["a b c"]), "has 'a b c', but a merge is two tokens"),
    "no scores": (having(__model="llama"), '"tokenizer.ggml.scores" must be a list of 300 numbers'),
    "a bos that is none": (having(__bos_token_id=300), '"tokenizer.ggml.bos_token_id" is 300, but must be the id of'),
    "maybe a bos": (having(__add_bos_token="maybe"), "\"tokenizer.ggml.add_bos_token\" is 'maybe', but must be true"),
}  # fmt: skip


@pytest.mark.parametrize("fault", CONTENTS)
def test_what_cannot_be_served_is_refused(tmp_path: Path, sound: tuple[Metadata, Tensors], fault: str) -> None:
    """Architectures, keys, tensors and tokenizers, by name."""
    edit, words = CONTENTS[fault]
    metadata, tensors = dict(sound[0]), dict(sound[1])
    edit(metadata, tensors)
    assert words in refusal(write_parts(tmp_path / "unfit.gguf", metadata, tensors))


def test_lists_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many lists below the limit are as much as one above it."""
    writer = GGUFWriter(tmp_path / "long.gguf", "llama")
    for index in range(3):
        writer.add_array(f"list.{index}", ["x"] * 40)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    monkeypatch.setattr(header, "MAX_VALUES", 100)
    with pytest.raises(ModelRefused, match=r"has more than 100 values in arrays, at 'list\.2'"):
        find_checkpoint(str(tmp_path / "long.gguf"))
