"""Tokens alone: with all kinds of tokenizers their bytes joined are the text's, and each can be written down."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from gateway.text.token_pieces import TokenPiece, TokenPieces
from gateway.text.tokenizer import Tokenizer

EMBEDDED = Path(__file__).resolve().parents[3] / "models" / "target"
TRICKY = "a é 日本語 😀😃 e\u0301\u0302 👩\u200d👩\u200d👧 \ufffd  x\n\t\x00 <0x41> ##a"
TEXTS = st.text(max_size=60) | st.text(alphabet=TRICKY, max_size=60)
QUIET = settings(derandomize=True)


def byte_level() -> tokenizers.Tokenizer:
    """The embedded pair's tokenizer."""
    return tokenizers.Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))


def byte_fallback(prefix: str = "") -> tokenizers.Tokenizer:
    """Tokenizer like Llama 2's: spaces as blocks, unknown text as bytes, and perhaps a block before the first word."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abx<>0", "▁a", "ab"]
    made = tokenizers.Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [("▁", "a"), ("a", "b")], byte_fallback=True)
    )
    prepend = [normalizers.Prepend(prefix)] if prefix else []
    made.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<s>"])
    return made


def metaspace() -> tokenizers.Tokenizer:
    """Tokenizer like T5's, with a few letters only."""
    scores = [(name, -1.0) for name in ["?", "▁", *"abcdefghijklmnopqrstuvwxyz", "▁the"]]
    made = tokenizers.Tokenizer(models.Unigram(scores, unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    made.decoder = decoders.Metaspace(prepend_scheme="never")
    return made


def joined(tokenizer: tokenizers.Tokenizer, text: str) -> bytes:
    """The bytes of all tokens of a text."""
    pieces = TokenPieces(tokenizer)
    return b"".join(pieces.piece(token_id).raw for token_id in tokenizer.encode(text, add_special_tokens=False).ids)


BYTE_LEVEL, FALLBACK, PREFIXED, METASPACE = byte_level(), byte_fallback(), byte_fallback("▁"), metaspace()


@pytest.mark.slow
@QUIET
@given(TEXTS)
def test_bytes_of_all_tokens_are_the_text(text: str) -> None:
    """Whatever the text; a block in the text is a space to tokenizers that write spaces so."""
    assert joined(BYTE_LEVEL, text) == text.encode()
    spaced = text.replace("▁", " ")
    assert joined(FALLBACK, text) == spaced.encode()
    assert joined(PREFIXED, text) == (f" {spaced}" if text else "").encode()


@QUIET
@given(st.text(alphabet="the quick  ", max_size=40))
def test_bytes_of_pieces_with_blocks_are_the_text(text: str) -> None:
    """A vocabulary without bytes."""
    assert joined(METASPACE, text) == text.encode()


@pytest.mark.parametrize("make", [byte_level, byte_fallback, metaspace])
def test_the_text_of_a_piece_says_its_bytes(make: Callable[[], tokenizers.Tokenizer]) -> None:
    """Of every token: as UTF-8 where it is, and escaped where it is not."""
    made = make()
    pieces = TokenPieces(made)
    for token_id in range(made.get_vocab_size()):
        piece = pieces.piece(token_id)
        if piece.text.startswith("bytes:"):
            assert piece.text[6:].encode().decode("unicode_escape").encode("latin-1") == piece.raw
            with pytest.raises(UnicodeDecodeError):
                piece.raw.decode()
        else:
            assert piece.text.encode() == piece.raw


def test_bytes_are_written_as_openai_writes_them() -> None:
    """Half a character, with and without a space before it; a whole one is itself."""
    pieces, ids = TokenPieces(FALLBACK), FALLBACK.get_vocab()
    assert pieces.piece(ids["<0xE2>"]) == TokenPiece("bytes:\\xe2", b"\xe2")
    assert pieces.piece(ids["<0x41>"]) == TokenPiece("A", b"A")
    assert pieces.piece(ids["▁a"]) == TokenPiece(" a", b" a")
    made = tokenizers.Tokenizer(models.WordLevel({"ĠâĤ": 0}, unk_token="ĠâĤ"))
    made.decoder = decoders.ByteLevel()
    assert TokenPieces(made).piece(0) == TokenPiece("bytes: \\xe2\\x82", b" \xe2\x82")


def test_special_and_unknown_ids_have_a_text() -> None:
    """A special token its name; an id above the vocabulary, as padded rows of logits have, its number and no bytes."""
    tokenizer = Tokenizer(str(EMBEDDED))
    assert tokenizer.piece(0) == TokenPiece("<|endoftext|>", b"<|endoftext|>")
    assert tokenizer.piece(5000) == TokenPiece("token_id:5000", b"")
    assert tokenizer.piece(5000) is tokenizer.piece(5000)


def test_added_tokens_are_not_spelled_in_bytes() -> None:
    """A token that was added as text is that text, even where its letters stand for bytes, or have no byte."""
    made = byte_level()
    made.add_tokens([AddedToken("né"), AddedToken("é ist"), AddedToken("日")])
    pieces = TokenPieces(made)
    assert [pieces.piece(4096 + number).text for number in range(3)] == ["né", "é ist", "日"]


@pytest.mark.parametrize(
    ("decoder", "names", "texts"),
    [
        (decoders.WordPiece(), ["ship", "##s"], [" ship", "s"]),
        (decoders.BPEDecoder(), ["shi", "ps</w>"], ["shi", "ps "]),
        (None, ["ship"], ["ship"]),
    ],
)
def test_other_decoders_have_pieces_too(decoder: decoders.Decoder | None, names: list[str], texts: list[str]) -> None:
    """As a token stands in the middle of a text."""
    made = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    if decoder is not None:
        made.decoder = decoder
    pieces = TokenPieces(made)
    assert [pieces.piece(number).text for number in range(len(names))] == texts
