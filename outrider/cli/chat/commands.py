"""What a line of input means. Pure: does nothing about it."""

from dataclasses import dataclass

from outrider.cli.chat.conversation import WrongCommand

COMMANDS = {
    "retry": ("", "answer the last message again, with another seed"),
    "edit": ("[TEXT]", "change the last message, in $VISUAL or $EDITOR or on the line, and answer it again"),
    "system": ("[TEXT|-]", "show, set or, with -, remove the system message"),
    "seed": ("[N|random]", "show or fix the seed; random draws one for every answer"),
    "save": ("FILE", "write the conversation to a file, as JSON"),
    "reset": ("", "forget the conversation, but not the system message"),
    "help": ("", "show this list"),
    "quit": ("", "leave, as Ctrl-D does"),
}
WITHOUT_ARGUMENT = frozenset(name for name, (argument, _) in COMMANDS.items() if not argument)


@dataclass(frozen=True, slots=True)
class Said:
    """A message of the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command and what stood behind it, without space around."""

    name: str
    argument: str


def parse(line: str) -> Said | Command | None:
    """A command begins with a slash, two slashes a message that begins with one; None for a line without a word.

    Raises WrongCommand about a command that there is not, or that takes no argument.
    """
    text = line.strip()
    if not text.startswith("/") or text.startswith("//"):
        return Said(text.removeprefix("/")) if text else None
    name, _, argument = text[1:].partition(" ")
    if name not in COMMANDS:
        raise WrongCommand(f"There is no command /{name}; /help lists all, and // begins a message with a slash.")
    if argument and name in WITHOUT_ARGUMENT:
        raise WrongCommand(f"/{name} takes nothing behind it.")
    return Command(name, argument.strip())


def help_text() -> str:
    """All commands, one a line."""
    usages = {f"/{name} {argument}".rstrip(): meaning for name, (argument, meaning) in COMMANDS.items()}
    width = max(map(len, usages))
    lines = [f"{usage:<{width}}  {meaning}" for usage, meaning in usages.items()]
    keys = "Ctrl-C stops an answer and keeps what came, twice leaves. A \\ at its end goes on with a line."
    return "\n".join([*lines, keys])


def parse_seed(text: str) -> int | None:
    """A seed, None for random. Raises WrongCommand about any other text."""
    if text == "random":
        return None
    try:
        seed = int(text)
    except ValueError:
        seed = 2**63
    if not -(2**63) <= seed < 2**63:
        raise WrongCommand(f"/seed is {text[:40]!r}, but must be a whole number of 64 bits, or random.")
    return seed
