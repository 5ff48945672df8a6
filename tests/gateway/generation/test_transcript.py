"""Rounds to text: stop strings inside and across rounds, counts, what is held back to the end."""

from pathlib import Path

import pytest
from support.models.renamed import write_renamed
from support.services.markov import merged_round, round_of

from gateway.generation.events import GuessFacts
from gateway.generation.transcript import StopScanner, Transcript
from gateway.rounds.round import Round, TokenOrigin
from gateway.text.tokenizer import Tokenizer
from gateway.tools.formats import FORMATS
from gateway.tools.reader import AnswerReader, Reading
from outrider.parameters import FinishReason

TOKENIZER = Tokenizer(str(Path(__file__).resolve().parents[3] / "models" / "target"))


def transcript(*stops: str) -> Transcript:
    """A transcript with some stop strings."""
    return Transcript(TOKENIZER.detokenizer(), StopScanner(stops))


async def a_round(text: str, accepted: int = 0, finish: FinishReason | None = None) -> Round:
    """A round that says a text, of which the first tokens are accepted ones."""
    token_ids = await TOKENIZER.encode(text)
    origins = [TokenOrigin.ACCEPTED] * accepted + [TokenOrigin.PLAIN] * (len(token_ids) - accepted)
    return round_of(token_ids, origins, draft_count=accepted, accepted_count=accepted, finish_reason=finish)


async def test_tokens_behind_a_stop_string_do_not_exist() -> None:
    """Text ends before the stop string, tokens with the one that completes it."""
    story = transcript("queen")
    spoken = story.take(await a_round("the king and the queen and the fool", accepted=2))
    assert "".join(token.text for token in spoken) + story.finish() == "the king and the "
    assert len(spoken) < len(await TOKENIZER.encode("the king and the queen and the fool"))
    assert TOKENIZER.decode([token.token_id for token in spoken]).startswith("the king and the queen")
    assert story.finish_reason is FinishReason.STOP_STRING
    assert len(story.token_ids) == len(spoken)


async def test_a_stop_string_across_rounds() -> None:
    """The first half is held back when its round ends, and never comes out."""
    story = transcript("the end of")
    first = story.take(await a_round("This is the"))
    assert story.finish_reason is None
    second = story.take(await a_round(" end of it"))
    assert "".join(token.text for token in (*first, *second)) == "This is "
    assert story.finish_reason is FinishReason.STOP_STRING


async def test_held_text_comes_with_the_end() -> None:
    """When the target ends the request, text that only looked like a stop string is part of the text."""
    story = transcript("the end of")
    spoken = story.take(await a_round("This is the end", finish=FinishReason.LENGTH))
    assert "".join(token.text for token in spoken) == "This is "
    assert story.finish() == "the end"
    assert story.finish_reason is FinishReason.LENGTH


async def test_a_stop_string_wins_over_the_targets_own_end_behind_it() -> None:
    """When both are in one round, what comes first in the text counts."""
    story = transcript("king")
    story.take(await a_round("the king and the queen", finish=FinishReason.EOS))
    assert story.finish_reason is FinishReason.STOP_STRING


async def test_half_a_character_at_the_end_is_shown_broken_unless_it_was_cut_off() -> None:
    """Where the model ended, half a character cannot wait any longer, and may even be a stop string; the other half of
    one at the request's limit would have come.
    """
    token_id = (await TOKENIZER.encode("😀"))[0]
    cut = round_of((token_id,), (TokenOrigin.PLAIN,), finish_reason=FinishReason.LENGTH)
    story = transcript()
    assert [token.text for token in story.take(cut)] == [""]
    assert story.finish() == ""
    told = await TOKENIZER.encode("Is it \ufffd")
    story = transcript()
    said = story.take(round_of(told, (TokenOrigin.PLAIN,) * len(told), finish_reason=FinishReason.LENGTH))
    assert "".join(token.text for token in said) + story.finish() == "Is it \ufffd"
    half = round_of((token_id, 0), (TokenOrigin.PLAIN,) * 2, finish_reason=FinishReason.EOS)
    story = transcript()
    story.take(half)
    assert story.finish() == "\ufffd"
    story = transcript("\ufffd")
    story.take(half)
    assert story.finish() == ""
    assert story.finish_reason is FinishReason.STOP_STRING


def test_accepted_tokens_tell_their_guesses_where_they_are_wanted() -> None:
    """Row and parent in the tree, not the place in the round, who guessed it and its value; the target's has none."""
    wanted = Transcript(TOKENIZER.detokenizer(), StopScanner(()), tells_guesses=True)
    assert [token.guess for token in wanted.take(merged_round())] == [
        GuessFacts(2, 0, "lookup", None, 0.25),
        GuessFacts(4, 2, "prediction", None, 0.125),
        None,
    ]
    assert [token.guess for token in transcript().take(merged_round())] == [None, None, None]


@pytest.mark.parametrize("size", [1, 2, 30])
@pytest.mark.parametrize("min_tokens", range(12))
async def test_stop_strings_are_held_back_as_ends_are(min_tokens: int, size: int) -> None:
    """One that is complete within the first min_tokens tokens is text; one that a later token completes ends there,
    wherever it began, and however the tokens come in rounds.
    """
    said = "the king and the queen and the king and all"
    token_ids = await TOKENIZER.encode(said)
    for stop in ("king", "e king", " and", "all"):
        story = Transcript(TOKENIZER.detokenizer(), StopScanner([stop]), min_tokens=min_tokens)
        text = ""
        for start in range(0, len(token_ids), size):
            if story.finish_reason is None:
                part = token_ids[start : start + size]
                plain = round_of(part, [TokenOrigin.PLAIN] * len(part))
                text += "".join(token.text for token in story.take(plain))
        text += story.finish()
        early = len(TOKENIZER.decode(list(token_ids[:min_tokens])))
        ends = [end for end in range(early + 1, len(said) + 1) if said[:end].endswith(stop)]
        assert text == (said[: ends[0] - len(stop)] if ends else said)
        assert (story.scanner.found == stop) == bool(ends)
        if ends:
            assert story.finish_reason is FinishReason.STOP_STRING
            assert len(story.token_ids) > min_tokens


async def test_a_stop_string_that_the_end_completes_too_early_is_text() -> None:
    """Also half a character that nothing follows, where min_tokens is all that may be said."""
    token_id = (await TOKENIZER.encode("\N{GRINNING FACE}"))[0]
    half = round_of((token_id, 0), (TokenOrigin.PLAIN,) * 2, finish_reason=FinishReason.EOS)
    story = Transcript(TOKENIZER.detokenizer(), StopScanner(["\ufffd"]), min_tokens=2)
    story.take(half)
    assert (story.finish(), story.finish_reason) == ("\ufffd", FinishReason.EOS)


@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [(0, "so it"), (5, "so it"), (6, "so it\n is"), (9, "so it\n is"), (10, "so it\n is\n."), (11, "so it\n is\n.")],
)
async def test_text_that_a_reader_held_back_keeps_its_place(min_tokens: int, text: str) -> None:
    """White space may stand before a call, and is reported with a later token than its own; that makes it no later."""
    reader = AnswerReader(Reading(FORMATS["json"], {"look": {}}), ())
    story = Transcript(TOKENIZER.detokenizer(), StopScanner(["\n"]), reader=reader, min_tokens=min_tokens)
    said = ""
    for character in "so it\n is\n.":
        if story.finish_reason is None:
            [token] = story.take(await a_round(character))
            said += token.text
    assert said + story.finish() == text


@pytest.mark.parametrize("is_special", [True, False])
async def test_an_end_of_the_model_is_no_text(tmp_path: Path, is_special: bool) -> None:
    """Even where the tokenizer has it as an ordinary word; a stop string may name it, and text before it."""
    tokenizer = Tokenizer(write_renamed(tmp_path, {",": "<|im_end|>"}, special=is_special))
    token_ids = await tokenizer.encode("a king<|im_end|>")
    end = round_of(token_ids, [TokenOrigin.PLAIN] * len(token_ids), finish_reason=FinishReason.EOS)
    for stops, text, reason in (
        ([], "a king", FinishReason.EOS),
        (["<|im_end|>"], "a king", FinishReason.STOP_STRING),
        (["king<|im_end|>"], "a ", FinishReason.STOP_STRING),
    ):
        story = Transcript(tokenizer.detokenizer(), StopScanner(stops, stops))
        assert "".join(token.text for token in story.take(end)) + story.finish() == text
        assert story.finish_reason is reason
