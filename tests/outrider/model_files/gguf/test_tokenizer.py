"""Tokenizers of GGUF files: the tokens of tokenizer.json, words by their names, and SentencePiece's pieces."""

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from structlog.testing import capture_logs
from support.models.tiny_gguf import F32, tokenizer_of, write_gguf, write_parts
from support.models.tiny_models import TARGET, write_tiny_model
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from gateway.text.tokenizer import Tokenizer as GatewayTokenizer
from outrider.cli.bench.common import OPENINGS
from outrider.cli.doctor.models import check_pair
from outrider.cli.local_stack import Stack
from outrider.model_files.gguf.header import GgufFile
from outrider.model_files.gguf.tokenizer import SIGNATURES, SPACE, chat_templates, doubt, read_tokenizer, special_tokens
from outrider.model_service.server import load_model
from outrider.model_service.settings import ModelServiceSettings

TEXTS = (
    *OPENINGS,
    "The year 1984, pi = 3.14159, and  2 + 2 = 4;   7 dwarfs.",
    "Don't we'll I'M\tthey've\r\n\r\n  x = [i for i in range(10)]\n\n",
    "Straße, naïve, 東京都, Привет, e\N{COMBINING ACUTE ACCENT}t\N{COMBINING ACUTE ACCENT}, \N{GRINNING FACE}!?",
    "<|endoftext|>a <|endoftext|>  b<|endoftext|",
    "",
    "     ",
)


def file_of(path: Path, **changes: Any) -> GgufFile:
    """The embedded target's tokenizer as a file, with other values of tokenizer.ggml's keys; None takes one away."""
    metadata = tokenizer_of(TARGET, 4096) | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return GgufFile.read(write_parts(path / "a.gguf", metadata, {"x": (np.zeros(32, np.float32), F32)}))


def test_the_tokens_are_those_of_tokenizer_json(tmp_path: Path) -> None:
    """Ids, vocabulary and text of many texts, special tokens among them."""
    ours, theirs = read_tokenizer(file_of(tmp_path)), Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    assert ours.get_vocab() == theirs.get_vocab()
    for text in TEXTS:
        encoding = ours.encode(text)
        assert encoding.ids == theirs.encode(text).ids
        assert ours.decode(encoding.ids) == theirs.decode(encoding.ids)


def test_transformers_reads_the_same_tokens(tmp_path: Path) -> None:
    """Its own conversion of a GGUF file, where it looks at no pre-tokenizer's name."""
    file = file_of(tmp_path, bos_token_id=0, eos_token_id=0)
    metadata = file.metadata | {"general.architecture": "llama", "llama.block_count": 1}
    kept = {key: list(value) if not isinstance(value, str | int | bool) else value for key, value in metadata.items()}
    write_parts(tmp_path / "b.gguf", kept, {"x": (np.zeros(32, np.float32), F32)})
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="b.gguf")
    ours = read_tokenizer(file)
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False).ids == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-2", ["It", "'s", " 1984", "a", "  ", " 5", "\n", "\n", "x", "\u0301."]),
        ("default", ["It", "'s", " 1984", "a", "  ", " 5", "\n", "\n", "x", "\u0301."]),
        ("smollm", ["It", "'s", " ", "1", "9", "8", "4", "a", "   ", "5", "\n", "\n", "x", "\u0301."]),
        ("llama-bpe", ["It", "'s", " ", "198", "4", "a", "  ", " ", "5", "\n\n", "x", "\u0301."]),
        ("qwen2", ["It", "'s", " ", "1", "9", "8", "4", "a", "  ", " ", "5", "\n\n", "x", "\u0301."]),
        ("tekken", ["It", "'s", " ", "1", "9", "8", "4", "a", "  ", " ", "5", "\n\n", "x\u0301", "."]),
        ("dbrx", ["It", "'s", " ", "198", "4", "a", "  ", " ", "5", "\n\n", "x", "\u0301."]),
        ("gpt-4o", ["It's", " ", "198", "4", "a", "  ", " ", "5", "\n\n", "x\u0301", "."]),
    ],
)
def test_words_are_cut_as_the_name_says(tmp_path: Path, name: str, words: list[str]) -> None:
    """Digits, contractions, runs of spaces, lines and marks distinguish the pre-tokenizers."""
    tokenizer = read_tokenizer(file_of(tmp_path, pre=name))
    text = "It's 1984a   5\n\nx\u0301."
    assert tokenizer.pre_tokenizer is not None
    found = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[first:last] for _, (first, last) in found] == words


def test_qwen_composes_characters_first(tmp_path: Path) -> None:
    """Two spellings of one letter are the same tokens to Qwen, and not to others."""
    spellings = ("caf\u00e9", "cafe\u0301")
    for name, is_same in (("qwen2", True), ("gpt-2", False)):
        tokenizer = read_tokenizer(file_of(tmp_path, pre=name))
        one, two = (tokenizer.encode(text).ids for text in spellings)
        assert (one == two) == is_same


@pytest.mark.parametrize(
    ("pre", "changes", "begins", "ends"),
    [
        ("gpt-2", {"add_bos_token": None}, False, False),
        ("llama-bpe", {"add_bos_token": None}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_a_whole_text_has_the_special_tokens_that_are_asked_for(
    tmp_path: Path, pre: str, changes: dict[str, Any], begins: bool, ends: bool
) -> None:
    """By the file's keys, else by the kind of tokenizer."""
    tokenizer = read_tokenizer(file_of(tmp_path, pre=pre, bos_token_id=0, eos_token_id=1, **changes))
    plain = tokenizer.encode("Once", add_special_tokens=False).ids
    assert tokenizer.encode("Once").ids == [*([0] if begins else []), *plain, *([1] if ends else [])]


def test_padding_is_no_vocabulary_and_user_tokens_are_text(tmp_path: Path) -> None:
    """Rows that converters made up are left out; a user-defined token is found whole, and shown."""
    metadata = tokenizer_of(TARGET, 4100)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    tokens[4096], types[4096] = "<think>", 4
    tokenizer = read_tokenizer(file_of(tmp_path, tokens=tokens, token_type=types))
    assert tokenizer.get_vocab_size() == 4097
    ids = tokenizer.encode("So <think> it<|endoftext|>").ids
    assert 4096 in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "So <think> it"


PIECES = {
    **{f"{SPACE}the": -1.0, f"{SPACE}t": -2.0, "he": -3.0, f"{SPACE}w": -4.0, "er": -5.0, "or": -6.0, "ld": -7.5},
    **{"here": -8.0, "re": -9.0, f"{SPACE}wor": -10.0, "her": -11.5, f"{SPACE}{SPACE}": -12.0, f"{SPACE}where": -13.0},
    **{letter: -20.0 - index for index, letter in enumerate(f"{SPACE}abcdefghijklmnopqrstuvwxyz")},
}


def sentence_piece(path: Path, **changes: Any) -> GgufFile:
    """A small vocabulary of SentencePiece's kind: unknown, begin, end, 256 bytes, pieces with scores."""
    specials, bytes_ = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*specials, *bytes_, *PIECES],
        "tokenizer.ggml.scores": [0.0] * 259 + list(PIECES.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        **{f"tokenizer.ggml.{name}_token_id": index for index, name in enumerate(("unknown", "bos", "eos"))},
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }
    return GgufFile.read(write_parts(path / "s.gguf", metadata, {"x": (np.zeros(32, np.float32), F32)}))


def merged(text: str) -> list[str]:
    """SentencePiece's own rule, one merge after another: of all neighbours the pair with the best score, leftmost."""
    pieces = list(SPACE + text.replace(" ", SPACE))
    while True:
        scores = [PIECES.get(one + two, -np.inf) for one, two in pairwise(pieces)]
        best = int(np.argmax(scores)) if scores else 0
        if not scores or scores[best] == -np.inf:
            return pieces
        pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]


def test_pieces_are_merged_by_their_scores(tmp_path: Path) -> None:
    """As SentencePiece does it, on words that pieces overlap in."""
    tokenizer, choose = read_tokenizer(sentence_piece(tmp_path, add_bos_token=False)), random.Random(3)
    words = ("the", "where", "here", "world", "her", "error", "re", "there", "older", "w")
    for _ in range(200):
        text = " ".join(choose.choices(words, k=choose.randrange(1, 8))).replace("older ", "older  ")
        encoding = tokenizer.encode(text)
        assert encoding.tokens == merged(text)
        assert tokenizer.decode(encoding.ids) == text


def test_unknown_characters_are_bytes_and_texts_begin_with_bos(tmp_path: Path) -> None:
    """A character without a piece is spelled in bytes, and comes back."""
    tokenizer = read_tokenizer(sentence_piece(tmp_path))
    encoding = tokenizer.encode("the é")
    assert encoding.tokens == ["<s>", f"{SPACE}the", SPACE, "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(encoding.ids) == "the é"
    bare = read_tokenizer(sentence_piece(tmp_path, add_space_prefix=False))
    assert bare.encode("the").tokens == ["<s>", "t", "he"]


def test_special_tokens_of_phi_3_take_the_space_behind_them(tmp_path: Path) -> None:
    """As its own tokenizer has it, and no other family's."""
    specials = ["<unk>", "<s>", "<|end|>", "<|user|>"]
    changes = {
        "tokens": [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES],
        "scores": [0.0] * 260 + list(PIECES.values()),
        "token_type": [2, 3, 3, 3] + [6] * 256 + [1] * len(PIECES),
    }
    file = sentence_piece(tmp_path, **changes, add_bos_token=False)
    for architecture, line in (("phi3", []), ("llama", [SPACE, "<0x0A>"])):
        file.metadata["general.architecture"] = architecture
        tokenizer = read_tokenizer(file)
        found = [tokenizer.id_to_token(each) for each in tokenizer.encode("<|user|>\n<s> the<|end|>\n").ids]
        assert found == ["<|user|>", *line, "<s>", SPACE, f"{SPACE}the", "<|end|>", *line]


def test_templates_and_special_tokens_are_read(tmp_path: Path) -> None:
    """The default template, named ones, and tokens under the names that templates know."""
    file = file_of(tmp_path, bos_token_id=0, eos_token_id=5, padding_token_id=0)
    file.metadata.update({"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B"})
    assert chat_templates(file) == {"default": "A", "tool_use": "B"}
    token = json.loads((TARGET / "tokenizer.json").read_text())["model"]["vocab"]
    fifth = next(text for text, token_id in token.items() if token_id == 5)
    expected = {"bos_token": "<|endoftext|>", "eos_token": fifth, "pad_token": "<|endoftext|>"}
    assert special_tokens(file) == expected


def test_a_header_is_read_as_the_package_reads_it(tmp_path: Path) -> None:
    """Every key of every kind, and where every tensor lies."""
    path = tmp_path / "all.gguf"
    writer, values = gguf.GGUFWriter(path, "llama"), dict[str, Any]()
    for number, kind in enumerate(gguf.GGUFValueType):
        if kind is gguf.GGUFValueType.ARRAY:
            continue
        value: Any = "text" if kind is gguf.GGUFValueType.STRING else kind is gguf.GGUFValueType.BOOL or number / 4
        value = value if kind.name.startswith("FLOAT") or not isinstance(value, float) else number
        values[f"k.{kind.name}"] = value
        writer.add_key_value(f"k.{kind.name}", value, kind)
    writer.add_array("k.texts", ["a", "", "ä"])
    writer.add_array("k.numbers", [1, -2, 3])
    for name, shape in (("a", (3, 32)), ("b", (5,)), ("c", (2, 3, 64))):
        writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file, reader = GgufFile.read(path), gguf.GGUFReader(path)
    assert {key: file.metadata[key] for key in values} == values
    assert (file.metadata["k.texts"], list(file.metadata["k.numbers"])) == (["a", "", "ä"], [1, -2, 3])
    places = {name: (each.shape[::-1], each.offset, each.size) for name, each in file.tensors.items()}
    theirs = {each.name: (tuple(each.shape), each.data_offset, each.n_bytes) for each in reader.tensors}
    assert places == theirs
    assert file.data_offset == reader.data_offset


def of_a_family(name: str, tokens: list[str]) -> list[str]:
    """A vocabulary with the tokens by which a family is known, each under its id."""
    size = max((*SIGNATURES[name], len(tokens) - 1)) + 1
    found = tokens + [f"[FILL{index}]" for index in range(len(tokens), size)]
    for index, token in SIGNATURES[name].items():
        place = found.index(token) if token in found else index
        found[place], found[index] = found[index], token
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SIGNATURES)
@pytest.mark.parametrize("said", [None, "default"])
def test_a_file_that_does_not_say_how_words_are_cut_is_known_by_its_vocabulary(
    tmp_path: Path, name: str, said: str | None
) -> None:
    """Words are those of the family, and there is nothing to doubt."""
    tokens = of_a_family(name, tokenizer_of(TARGET, 4096)["tokenizer.ggml.tokens"])
    kept = {"tokens": tokens, "token_type": [1] * len(tokens), "merges": [f"{tokens[600]} {tokens[601]}"]}
    kept["tokens"] = [*tokens, tokens[600] + tokens[601]]
    kept["token_type"] = [1] * len(kept["tokens"])
    (tmp_path / "named").mkdir()
    guessed, named = file_of(tmp_path, pre=said, **kept), file_of(tmp_path / "named", pre=name, **kept)
    ours, theirs = read_tokenizer(guessed), read_tokenizer(named)
    assert ours.to_str() == theirs.to_str()
    assert doubt(guessed) is None


def test_a_file_of_no_known_family_is_doubted(tmp_path: Path) -> None:
    """In one sentence that says what to do; a file that says how words are cut is not."""
    reason = doubt(file_of(tmp_path, pre=None))
    assert reason is not None
    assert 'does not say in "tokenizer.ggml.pre" how words are cut' in reason
    assert doubt(file_of(tmp_path, pre="gpt-2")) is None


def test_gateway_service_and_doctor_warn_of_a_file_of_no_known_family(tmp_path: Path) -> None:
    """Each when it reads it."""
    folder = write_tiny_model(tmp_path / "tiny", "llama")
    file = write_gguf(folder, tmp_path / "a.gguf", edit=lambda metadata, _: metadata.pop("tokenizer.ggml.pre"))
    with capture_logs() as lines:
        GatewayTokenizer(str(file))
        load_model(ModelServiceSettings(str(file), kv_tokens=64))
    warnings = [line for line in lines if line["log_level"] == "warning"]
    assert [line["event"] for line in warnings] == ["tokens may be wrong"] * 2
    findings, *_ = check_pair(Stack(str(file), None))
    assert any("does not say in" in finding.sentence for finding in findings)
