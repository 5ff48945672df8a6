"""Text and tokens, with the embedded target's tokenizer."""

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.services.reciting import marked_tokenizer

from gateway.text.tokenizer import HUGE_TEXT, Tokenizer
from outrider.errors import ModelRefused

MODEL = str(Path(__file__).resolve().parents[3] / "models" / "target")
TOKENIZER = Tokenizer(MODEL)
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TRICKY = "a é 日本語 😀😃 e\u0301\u0302 \u0926\u0947\u0935 👩\u200d👩\u200d👧 \ufffd \U0001f1e9\U0001f1ea  x\n\t\x00"
QUIET = settings(derandomize=True)


def pieces_of(token_ids: list[int]) -> list[str]:
    """What a detokenizer emits for each token, and at the end."""
    detokenizer = TOKENIZER.detokenizer()
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


@QUIET
@given(st.lists(st.integers(0, 4095), max_size=80))
def test_pieces_of_any_tokens_are_their_text(token_ids: list[int]) -> None:
    """All pieces joined are the text of all tokens, whatever nonsense the tokens are."""
    assert "".join(pieces_of(token_ids)) == TOKENIZER.decode(token_ids)


@QUIET
@given(st.text(max_size=60) | st.text(alphabet=TRICKY, max_size=60))
async def test_no_piece_of_a_text_holds_half_a_character(text: str) -> None:
    """A replacement character comes out only where the text has one."""
    pieces = pieces_of(list(await TOKENIZER.encode(text)))
    assert "".join(pieces) == text
    assert sum(piece.count(REPLACEMENT) for piece in pieces) == text.count(REPLACEMENT)


class Watched:
    """A tokenizer of the library that notes which threads encode, each of them waiting until another one does too."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pair = threading.Barrier(2)
        self.threads: set[int] = set()

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
        """Encodes like the library's own."""
        self.threads.add(threading.get_ident())
        self._pair.wait(60)
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


@pytest.mark.slow
async def test_few_long_texts_are_encoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, because each takes many times its size meanwhile."""
    tokenizer = Tokenizer(MODEL)
    watched = Watched(tokenizer._tokenizer)
    monkeypatch.setattr(tokenizer, "_tokenizer", watched)
    texts = [text for _ in range(8) for text in ("a king " * 1_000, "a king " * 10_000)]
    encoded = await asyncio.gather(*map(tokenizer.encode, texts))
    assert len(watched.threads) == 2
    assert len(set(encoded)) == 2


class Gated:
    """A tokenizer of the library for which huge texts take until a gate opens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.gate = threading.Event()

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
        """Encodes like the library's own."""
        if len(texts[0]) > HUGE_TEXT:
            self.gate.wait(60)
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


async def test_huge_texts_are_waited_for_by_huge_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of some thousand characters is encoded while many of them wait."""
    tokenizer = Tokenizer(MODEL)
    gated = Gated(tokenizer._tokenizer)
    monkeypatch.setattr(tokenizer, "_tokenizer", gated)
    huge = [asyncio.create_task(tokenizer.encode("a king " * 5_000)) for _ in range(4)]
    # Each is with its encoder before the other text comes.
    await asyncio.sleep(0)
    assert len(await tokenizer.encode("a king " * 500)) >= 500
    assert not any(task.done() for task in huge)
    gated.gate.set()
    assert len(set(await asyncio.gather(*huge))) == 1


async def test_a_real_replacement_character_comes_out() -> None:
    """U+FFFD in the text is text: it comes out with what follows it, or at the end."""
    token_ids = list(await TOKENIZER.encode("\ufffd, said the fox, \ufffd"))
    *pieces, last = pieces_of(token_ids)
    assert "".join(pieces) == "\ufffd, said the fox, "
    assert last == REPLACEMENT


async def test_a_character_waits_for_its_last_byte() -> None:
    """The four tokens of an emoji give it at once, with the last one."""
    token_ids = list(await TOKENIZER.encode("😀"))
    assert len(token_ids) > 1
    assert pieces_of(token_ids) == [""] * (len(token_ids) - 1) + ["😀", ""]


async def test_special_tokens_have_no_text() -> None:
    """An end-of-sequence token between two halves of a character does not break it."""
    first, *rest = await TOKENIZER.encode("😀")
    assert "".join(pieces_of([0, first, 0, *rest, 0])) == "😀"


class CountingTokenizer(Tokenizer):
    """Counts the tokens that it decodes, which is what a detokenizer's work consists of."""

    num_decoded = 0

    def decode(self, token_ids: list[int]) -> str:
        """Decodes like the original."""
        self.num_decoded += len(token_ids)
        return super().decode(token_ids)


@pytest.mark.parametrize("byte", ["é", "😀", "a"])
async def test_cost_grows_linearly(byte: str) -> None:
    """Thousands of tokens without a word boundary, even lone bytes, cost about as much each as hundreds."""
    token_id = (await TOKENIZER.encode(byte))[0]

    def cost(count: int) -> int:
        counting = CountingTokenizer(MODEL)
        detokenizer = counting.detokenizer()
        for _ in range(count):
            detokenizer.push(token_id)
        return counting.num_decoded

    assert cost(4000) < 15 * cost(400)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """The refusal is one sentence that names the file."""
    with pytest.raises(ModelRefused, match=r"has no tokenizer\.json"):
        Tokenizer(str(tmp_path))


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    """A file that is no tokenizer is refused as well."""
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelRefused, match="cannot be read as a tokenizer"):
        Tokenizer(str(tmp_path))


def test_a_sized_model_has_the_tokenizer_inside() -> None:
    """The gateway gets the target's name and makes no model of it; an unknown preset is refused in one sentence."""
    assert Tokenizer("sized:200m").vocabulary() == TOKENIZER.vocabulary()
    assert Tokenizer("sized:draft-1b").vocabulary() == TOKENIZER.vocabulary()
    with pytest.raises(ModelRefused, match=r"^sized:7b is no sized model") as refusal:
        Tokenizer("sized:7b")
    assert refusal.value.exit_code == 78


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"), "<|fim_prefix|>a{<|fim_suffix|>}b<|fim_middle|>"),
        (("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"), "<fim_prefix>a{<fim_suffix>}b<fim_middle>"),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]}b[PREFIX]a{"),
        (("<fim_prefix>", "<fim_suffix>"), None),
        ((), None),
    ],
)
async def test_a_gap_is_told_in_the_model_s_own_tokens(
    tmp_path: Path, names: tuple[str, ...], expected: str | None
) -> None:
    """Of Qwen's coders, StarCoder and Codestral, each one id; without all of them there is no way to say it."""
    marked_tokenizer(names).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(str(tmp_path))
    prompt = tokenizer.around_gap("a{", "}b")
    assert prompt == expected
    if prompt is not None:
        found = [tokenizer.name(token_id) for token_id in await tokenizer.encode(prompt)]
        assert [name for name in found if name in names] == re.findall(r"<.*?>|\[.*?\]", prompt)


async def test_tokens_are_spelt_verbatim_with_their_names() -> None:
    """Special ones too, which `decode` leaves out; an id of no token has none."""
    token_ids = [*await TOKENIZER.encode("<|endoftext|>A fox."), 10**6]
    assert TOKENIZER.verbatim(token_ids[:-1]) == "<|endoftext|>A fox."
    assert TOKENIZER.decode(token_ids[:-1]) == "A fox."
    assert [TOKENIZER.name(token_id) for token_id in token_ids][:2] == ["<|endoftext|>", "A"]
    assert TOKENIZER.name(token_ids[-1]) is None


async def test_a_long_text_does_not_stop_the_loop() -> None:
    """Others go on meanwhile, although the library would keep every other thread from running."""
    encoding = asyncio.create_task(TOKENIZER.encode("abc def " * 100_000))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0.005)
        turns += 1
    assert len(await encoding) > 100_000
    assert turns > 5
