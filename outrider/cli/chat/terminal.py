"""Input and output of a conversation: a terminal with history and styles, or pipes."""

import json
import os
import readline
import sys
from collections.abc import Callable, Iterable

from rich.console import Console
from rich.text import Text

from outrider.answer import reasoning_of
from outrider.cli.chat.conversation import ChatTurn
from outrider.cli.options import decoded
from outrider.cli.output import write
from outrider.cli.rounds import CONTROL_PICTURES, legend, styled, trees
from outrider.cli.running import note
from outrider.cli.views import sample_object
from outrider.client import Event, Round

PROMPT, CONTINUATION = "> ", "… "
GREETING = "The whole conversation is sent with every message. Ctrl-C stops an answer, /help lists the commands."

Reader = Callable[[], str | None]
"""Gives the next line of input, None after the last."""


def read_pipe() -> str | None:
    """Next line of standard input, None after the last. Raises InvalidRequest when it is not text."""
    given = sys.stdin.buffer.readline()
    return decoded("line", given) if given else None


def prepare_terminal(commands: Iterable[str]) -> None:
    """Completes commands on the input line. Its history is kept in this process only."""

    def complete(text: str, state: int) -> str | None:
        # Readline calls with 0, 1, 2, … until there is no more.
        found = [f"/{name}" for name in commands if text.startswith("/") and f"/{name}".startswith(text)]
        return found[state] if state < len(found) else None

    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")


def read_terminal() -> str | None:
    """The next line, and those that a backslash at its end joins to it; None for Ctrl-D."""
    try:
        lines = [input(PROMPT)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input(CONTINUATION))
    except EOFError:
        # The prompt stands on the line still.
        write(sys.stdout, "\n")
        return None
    return "\n".join(lines)


class Screen:
    """Shows the bare text as it comes, or one JSON object a turn when it is over; everything else goes to stderr."""

    def __init__(self, *, as_json: bool = False, with_rounds: bool = False) -> None:
        self._as_json = as_json
        self._with_rounds = with_rounds

    def show(self, event: Event) -> None:
        """Shows the next event of an answer."""
        if not self._as_json:
            write(sys.stdout, event.text)

    def end(self, turn: ChatTurn) -> None:
        """Shows the figures of a turn, after its last event."""
        if not self._as_json:
            write(sys.stdout, "\n")
            self.say(turn.figures())
        elif turn.result is not None:
            answer = sample_object(turn.rounds, turn.result, with_rounds=self._with_rounds)
            write(sys.stdout, json.dumps({"user": turn.user, **answer}, ensure_ascii=False) + "\n")

    def interrupt(self) -> None:
        """Ends what is shown of an answer that is cut short, before whatever is said about that."""

    def say(self, text: str) -> None:
        """Shows a line that is no part of an answer."""
        note(text)


class StyledScreen(Screen):
    """Tokens in the styles of their origins, and figures below each answer."""

    def __init__(self, console: Console, *, rejected: bool) -> None:
        super().__init__()
        self._console = console
        self._is_thinking = False
        console.print(legend(rejected=rejected), soft_wrap=True)
        self.say(GREETING)

    def show(self, event: Event) -> None:
        """Shows what came; what the model thinks first is dim, and stands above the answer."""
        if thought := reasoning_of(event.deltas):
            self._console.print(Text(thought.translate(CONTROL_PICTURES), "dim italic"), end="", soft_wrap=True)
            self._is_thinking = True
        if self._is_thinking and event.text:
            self._console.print("\n")
            self._is_thinking = False
        text = styled(event) if isinstance(event, Round) else Text(event.text.translate(CONTROL_PICTURES))
        # Soft wrap leaves breaking lines to the terminal: a piece does not know in which column it begins.
        self._console.print(text, end="", soft_wrap=True)

    def end(self, turn: ChatTurn) -> None:
        self._is_thinking = False
        self._console.print()
        for tree in trees(turn.rounds):
            self._console.print(tree)
        self.say(turn.figures())

    def interrupt(self) -> None:
        """Ends the line, on which an error would stand otherwise."""
        self._console.print()

    def say(self, text: str) -> None:
        self._console.print(Text(text.translate(CONTROL_PICTURES), "dim"), soft_wrap=True)


def choose_ends(commands: Iterable[str], *, as_json: bool, rejected: bool) -> tuple[Reader, Screen, bool]:
    """Input, output, and whether somebody sits there who can read what was wrong and write another line.

    A terminal on both sides gets history and styles, a dumb one plain text; a pipe gets one line a turn.
    """
    if as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return read_pipe, Screen(as_json=as_json, with_rounds=rejected), False
    prepare_terminal(commands)
    if os.environ.get("TERM", "dumb") in {"dumb", "unknown"}:
        return read_terminal, Screen(), True
    return read_terminal, StyledScreen(Console(highlight=False), rejected=rejected), True
