"""What the parser of command lines says about wrong usage, as one sentence that ends with the fix. Parses nothing."""

import re
from typing import Protocol, runtime_checkable

# What values are checked with begins so, which says nothing to whoever typed the value.
CHECKER_WORDS = {": Value error, ": ": ", ": Input should be ": ": it must be "}


class ParserContext(Protocol):
    """Where the parser was."""

    @property
    def command_path(self) -> str:
        """The words of the command."""


@runtime_checkable
class ParserError(Protocol):
    """An error of the parser. Known by its shape, because where its class stands differs between versions of typer."""

    exit_code: int
    ctx: ParserContext | None

    def format_message(self) -> str:
        """What is wrong, in one line or several; nothing where a command is missing, when the help is shown instead."""


def parser_sentence(error: ParserError) -> str:
    """What is wrong, in one line, and where to look how it is done."""
    told = " ".join(error.format_message().split()) or "No command is given."
    for words, better in CHECKER_WORDS.items():
        told = told.replace(words, better)
    told = told if re.search(r"[.?!]$", told) else f"{told}."
    fix = f"See `{error.ctx.command_path} --help`." if error.ctx else "See what --help says behind the same command."
    return f"{''.join(map(_printable, told))} {fix}"


def _printable(character: str) -> str:
    """What was typed may have characters that would drive the reader's terminal."""
    return character if character.isprintable() else ascii(character)[1:-1]
