"""Rounds to text: stop strings inside and across rounds, counts, what is held back to the end."""

from pathlib import Path

from support.markov import round_of

from gateway.generation.transcript import StopScanner, Transcript
from gateway.rounds.round import FallbackReason, Round, TokenOrigin
from gateway.text.tokenizer import Tokenizer
from outrider.parameters import FinishReason

TOKENIZER = Tokenizer(str(Path(__file__).resolve().parents[3] / "models" / "target"))


def transcript(*stops: str) -> Transcript:
    """A transcript with some stop strings."""
    return Transcript(TOKENIZER.detokenizer(), StopScanner(stops))


async def a_round(text: str, accepted: int = 0, finish: FinishReason | None = None, *, is_first: bool = False) -> Round:
    """A round that says a text, of which the first tokens are accepted ones."""
    token_ids = await TOKENIZER.encode(text)
    origins = [TokenOrigin.ACCEPTED] * accepted + [TokenOrigin.PLAIN] * (len(token_ids) - accepted)
    reason = None if accepted else FallbackReason.DRAFT_ABSENT
    counts = {"draft_count": accepted, "accepted_count": accepted, "evaluated_count": accepted}
    return round_of(token_ids, origins, **counts, fallback_reason=reason, finish_reason=finish, is_first=is_first)


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


async def test_half_a_character_at_the_end_is_shown_broken() -> None:
    """At the end of the request half a character cannot wait any longer, and may even be a stop string."""
    token_id = (await TOKENIZER.encode("😀"))[0]
    half = round_of((token_id,), (TokenOrigin.PLAIN,), finish_reason=FinishReason.LENGTH)
    story = transcript()
    assert [token.text for token in story.take(half)] == [""]
    assert story.finish() == "\ufffd"
    story = transcript("\ufffd")
    story.take(half)
    assert story.finish() == ""
    assert story.finish_reason is FinishReason.STOP_STRING


async def test_figures_leave_out_the_prompts_own_pass() -> None:
    """The first verdict is no round; the others are counted as the protocol says."""
    story = transcript()
    story.take(await a_round("Once", is_first=True))
    story.take(await a_round(" upon a time", accepted=2))
    story.take(await a_round(" there"))
    figures = story.figures
    assert (figures.rounds, figures.drafts, figures.fallback_rounds) == (2, 1, 1)
    assert (figures.draft_tokens, figures.accepted_tokens) == (2, 2)
    assert (figures.acceptance_rate, figures.draft_acceptance_rate, figures.mean_acceptance_length) == (1.0, 1.0, 3.0)


def test_figures_of_nothing_are_no_division_by_zero() -> None:
    """A request of one token has figures, too."""
    figures = transcript().figures
    assert (figures.acceptance_rate, figures.draft_acceptance_rate, figures.mean_acceptance_length) == (0.0, 0.0, 1.0)
