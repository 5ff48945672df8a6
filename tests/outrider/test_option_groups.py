"""A command that takes dataclasses has an option for each of their fields."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from outrider.process.options import grouped, options_of


@dataclass(frozen=True)
class Size:
    """A group."""

    max_width: Annotated[int | None, typer.Option(metavar="N")] = None
    tall: Annotated[bool, typer.Option("--tall")] = False


def command_with(seen: list[object]) -> typer.Typer:
    """A command that keeps what it is called with."""
    app = typer.Typer()

    @app.command()
    @grouped
    def show(name: str, *, size: Size, loud: Annotated[bool, typer.Option("--loud")] = False) -> None:
        """Shows."""
        seen.extend((name, size, loud))

    return app


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("a", ["a", Size(), False]),
        ("a --max-width 3 --tall --loud", ["a", Size(max_width=3, tall=True), True]),
        ("--loud a --tall", ["a", Size(tall=True), True]),
    ],
)
def test_fields_are_options(words: str, expected: list[object]) -> None:
    """Each group is made of its own options, the other parameters are as ever."""
    seen: list[object] = []
    assert CliRunner().invoke(command_with(seen), words.split()).exit_code == 0
    assert seen == expected


def test_an_option_of_a_group_is_checked_like_any_other() -> None:
    """By its type."""
    seen: list[object] = []
    assert CliRunner().invoke(command_with(seen), ["a", "--max-width", "wide"]).exit_code == 2
    assert seen == []


def test_two_options_of_one_name_are_found_at_once() -> None:
    """When the command is declared, not when it is called."""

    def twice(*, size: Size, tall: bool = False) -> None:
        """Has the option --tall twice."""

    with pytest.raises(ValueError, match="duplicate parameter name: 'tall'"):
        grouped(twice)


def test_fields_by_the_names_of_their_options() -> None:
    """All of them, or those that are named."""
    assert options_of(Size(tall=True)) == {"--max-width": None, "--tall": True}
    assert options_of(Size(max_width=3), "max_width") == {"--max-width": 3}
