"""How a conversation looks without a terminal: bare text, or one line of JSON a turn. Knows no gateway."""

import json
import time
from typing import Protocol, TextIO

from outrider.cli.chat.conversation import Turn
from outrider.cli.chat.status import Progress, result_line
from outrider.cli.output import sample_object
from outrider.client import Event, Round


class Screen(Protocol):
    """Shows answers, event by event, and whatever else there is to say."""

    def begin(self, turn: Turn) -> None:
        """Comes before the events of an answer."""

    def show(self, event: Event) -> None:
        """Shows what came."""

    def end(self, turn: Turn) -> None:
        """Comes behind the last event: the turn as it is kept."""

    def interrupt(self) -> None:
        """Comes instead of the end, before whatever is said about that."""

    def tell(self, text: str) -> None:
        """Says something that is no answer."""


class PlainScreen:
    """The text alone and a newline behind each answer; figures and everything else go to the notes."""

    def __init__(self, output: TextIO, notes: TextIO) -> None:
        self._output = output
        self._notes = notes
        self._started_s = 0.0
        self._progress = Progress(0)

    def begin(self, turn: Turn) -> None:
        """Starts the clock."""
        self._started_s, self._progress = time.monotonic(), Progress(turn.seed)

    def show(self, event: Event) -> None:
        """Writes the text."""
        self._progress.add(event, time.monotonic() - self._started_s)
        self._write(event.text)

    def end(self, turn: Turn) -> None:
        """Writes the newline, and the figures to the notes."""
        self._write("\n")
        self.tell(ending(turn, self._progress))

    def interrupt(self) -> None:
        """Writes nothing, because the text is all that there is."""

    def tell(self, text: str) -> None:
        """Writes it to the notes."""
        self._notes.write(text + "\n")
        self._notes.flush()

    def _write(self, text: str) -> None:
        self._output.write(text)
        self._output.flush()


class JsonScreen:
    """One object a turn, when it is over: the sample as `generate --json` tells it, and the message that it answers."""

    def __init__(self, output: TextIO, notes: TextIO, *, tells_rounds: bool) -> None:
        self._output = output
        self._notes = notes
        self._tells_rounds = tells_rounds
        self._rounds: list[Round] = []

    def begin(self, turn: Turn) -> None:
        """Forgets the answer before."""
        self._rounds = []

    def show(self, event: Event) -> None:
        """Keeps the round."""
        if isinstance(event, Round):
            self._rounds.append(event)

    def end(self, turn: Turn) -> None:
        """Writes the object."""
        if turn.result is None:
            return
        answer = sample_object(self._rounds, turn.result, with_rounds=self._tells_rounds)
        self._output.write(json.dumps({"user": turn.user, **answer}, ensure_ascii=False) + "\n")
        self._output.flush()

    def interrupt(self) -> None:
        """Writes nothing: half an object is none."""

    def tell(self, text: str) -> None:
        """Writes it to the notes."""
        self._notes.write(text + "\n")
        self._notes.flush()


def ending(turn: Turn, progress: Progress) -> str:
    """The line under an answer."""
    return result_line(turn.result) if turn.result else f"stopped, {progress.line(progress.now_s)}"
