"""The parts of a conversation that need no gateway: what is kept, what a line means, how lines are broken."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text
from support.command_line import RESULT

from outrider.cli.chat.commands import COMMANDS, Command, Said, help_text, parse, parse_seed
from outrider.cli.chat.conversation import Conversation, WrongCommand
from outrider.cli.chat.live_screen import wrapped
from outrider.cli.chat.readers import PipeReader
from outrider.cli.chat.status import Progress, result_line
from outrider.client import GeneratedToken, Origin, Round, RoundFacts


def test_a_turn_without_an_answer_is_forgotten() -> None:
    """It can be repeated or edited, but the next message takes its place."""
    conversation = Conversation()
    conversation.ask("One")
    conversation.keep("", None)
    conversation.edit("Two")
    assert [message["content"] for message in conversation.messages()] == ["Two"]
    conversation.keep("Half", None)
    conversation.ask("Three")
    assert [message["content"] for message in conversation.messages()] == ["Two", "Half", "Three"]
    assert [turn["stopped"] for turn in conversation.document()["turns"]] == [True]
    assert len(conversation.messages()) == 2


def test_an_empty_answer_that_ended_by_itself_is_one() -> None:
    """Silence is what the model said."""
    conversation = Conversation()
    conversation.ask("One")
    assert conversation.keep("", RESULT).answer == ""
    assert len(conversation.messages()) == 2


def test_repetitions_draw_other_seeds() -> None:
    """Random ones, or one more each time where the seed is fixed, without leaving 64 bits."""
    free = Conversation()
    seeds = {free.ask("One").seed, free.retry().seed, free.retry().seed}
    assert len(seeds) == 3
    fixed = Conversation(seed=2**63 - 2)
    assert [fixed.ask("One").seed, fixed.retry().seed, fixed.retry().seed] == [2**63 - 2, 2**63 - 1, -(2**63 - 1)]
    assert fixed.edit("Two").seed == 2**63 - 2
    free.seed = 5
    assert [free.retry().seed, free.retry().seed] == [5, 6], "a seed fixed behind an answer holds for its repetition"


def test_reset_keeps_the_system_message() -> None:
    """And the seed."""
    conversation = Conversation("Be brief.", 5)
    conversation.ask("One")
    conversation.reset()
    assert conversation.messages() == [{"role": "system", "content": "Be brief."}]
    with pytest.raises(WrongCommand):
        conversation.retry()


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("  Hello there \n", Said("Hello there")),
        ("//usr is a folder", Said("/usr is a folder")),
        (" \n", None),
        ("/edit  Hello  there \n", Command("edit", "Hello  there")),
        ("/quit", Command("quit", "")),
    ],
)
def test_what_a_line_means(line: str, meaning: object) -> None:
    """A slash begins a command, two begin a message with one."""
    assert parse(line) == meaning


@pytest.mark.parametrize("line", ["/", "/Retry", "/retry now", "/edits"])
def test_wrong_commands_are_refused(line: str) -> None:
    """By name; nothing is taken for a message by mistake."""
    with pytest.raises(WrongCommand, match=r"^(There is no command /|/retry takes nothing)"):
        parse(line)


def test_help_lists_every_command() -> None:
    """Each with what it does."""
    for name, (_, meaning) in COMMANDS.items():
        assert f"/{name}" in help_text()
        assert meaning in help_text()


@pytest.mark.parametrize(("text", "seed"), [("5", 5), ("-3", -3), ("random", None)])
def test_seeds(text: str, seed: int | None) -> None:
    """A number or the word."""
    assert parse_seed(text) == seed


@pytest.mark.parametrize("text", ["", "x", str(2**63), "1.5"])
def test_what_is_no_seed(text: str) -> None:
    """Is refused."""
    with pytest.raises(WrongCommand):
        parse_seed(text)


def test_a_pipe_has_no_editor(tmp_path: Path) -> None:
    """There the new text stands behind the command."""
    file = tmp_path / "lines"
    file.write_bytes(b"one\ntwo")
    with file.open("rb") as source:
        reader = PipeReader(source)
        assert [reader.line(), reader.line(), reader.line()] == ["one\n", "two", None]
        with pytest.raises(WrongCommand, match="needs the new text"):
            reader.edited("one")


@given(st.lists(st.text(alphabet="ab 界\n", max_size=12), max_size=8), st.integers(2, 9))
def test_lines_are_broken_without_losing_a_word(pieces: list[str], width: int) -> None:
    """However the text comes in pieces: every line fits, and only space at the ends of lines is lost."""
    lines, growing = [], Text()
    for piece in pieces:
        *whole, growing = wrapped(growing + Text(piece), width)
        lines += whole
    lines.append(growing)
    assert all(cell_len(line.plain) <= width for line in lines)
    assert "".join("".join(line.plain.split()) for line in lines) == "".join("".join(pieces).split())


def test_words_stay_whole_where_they_can() -> None:
    """A line ends at a space, a word longer than a line where the line ends; styles stay with their letters."""
    text = Text.assemble(("one ", "bold"), "two three\n\nabcdefghijk")
    assert [line.plain for line in wrapped(text, 8)] == ["one two", "three", "", "abcdefgh", "ijk"]
    assert wrapped(text, 8)[0].spans[0].style == "bold"


def test_figures_while_an_answer_comes() -> None:
    """The clock until the first token, then what is known; only evaluated guesses have a rate."""
    progress = Progress(seed=5)
    assert progress.line(0.25) == "waiting for the first token, 0.2 s"
    token = GeneratedToken(1, Origin.PLAIN, "a")
    progress.add(Round((token,), "a"), 0.03)
    assert progress.line(1) == "1 tokens, first token 30 ms, seed 5"
    progress.add(Round((token, token), "aa", facts=RoundFacts(accepted_count=1, evaluated_count=2)), 0.05)
    assert progress.line(1) == "3 tokens, first token 30 ms, acceptance rate 0.50, seed 5"
    assert "cached 2 of 3 prompt tokens" in result_line(RESULT)
