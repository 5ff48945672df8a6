"""What the parser says, as one sentence."""

from dataclasses import dataclass

import pytest
import typer

from outrider.process.options import ParserError, parser_sentence


@dataclass
class Context:
    """Where a parser was."""

    command_path: str


@dataclass
class Told:
    """An error that a parser might raise."""

    message: str
    ctx: Context | None = None
    exit_code: int = 2

    def format_message(self) -> str:
        """As it was given."""
        return self.message


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("", "No command is given."),
        ("No such option: --a", "No such option: --a."),
        ("Missing argument 'A'.\n Choose from:\n\ta,\n\tb", "Missing argument 'A'. Choose from: a, b."),
        ("Invalid value for '--a': Value error, 'x' is no a.", "Invalid value for '--a': 'x' is no a."),
        ("Invalid value for '--a': Input should be a number", "Invalid value for '--a': it must be a number."),
        ("No such command 'a\x1b[31m\udcff'.", "No such command 'a\\x1b[31m\\udcff'."),
    ],
)
def test_one_line_that_ends_with_the_fix(message: str, sentence: str) -> None:
    """Without what a library says to programmers, and without characters that would drive a terminal."""
    assert parser_sentence(Told(message, Context("outrider up"))) == f"{sentence} See `outrider up --help`."


def test_an_error_without_a_place_ends_with_a_fix_too() -> None:
    """Some of the parser's errors do not know in which command they came."""
    assert parser_sentence(Told("Wrong.")).endswith("--help says behind the same command.")


def test_errors_of_the_parser_are_known_by_their_shape() -> None:
    """Those of typer are, other errors are not."""
    assert isinstance(typer.BadParameter("x"), ParserError)
    assert not isinstance(typer.Exit(2), ParserError)
    assert not isinstance(ValueError("x"), ParserError)
