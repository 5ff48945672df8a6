"""Where lines of input come from: a terminal with history, or standard input. Knows no command but their names."""

import os
import readline
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from outrider.cli.chat.conversation import WrongCommand
from outrider.errors import InvalidRequest

PROMPT, CONTINUATION = "> ", "… "


class Reader(Protocol):
    """Gives one line of input after the other."""

    is_interactive: bool
    """Whether somebody sits there, who can be told what was wrong and write another line."""

    def line(self) -> str | None:
        """The next line, None behind the last. Raises KeyboardInterrupt."""

    def edited(self, text: str) -> str:
        """The text as the user changes it. Raises WrongCommand where that cannot be."""


class PipeReader:
    """One line of standard input after the other."""

    is_interactive = False

    def __init__(self, source: BinaryIO) -> None:
        self._source = source

    def line(self) -> str | None:
        """The next line. Raises InvalidRequest when it is not text."""
        given = self._source.readline()
        try:
            return given.decode() if given else None
        except UnicodeError:
            raise InvalidRequest("line", given, "valid UTF-8") from None

    def edited(self, text: str) -> str:
        """Not here."""
        raise WrongCommand("/edit needs the new text behind it where there is no terminal.")


class TerminalReader:
    """Lines with history and completion of commands. What is typed is kept in this process only."""

    is_interactive = True

    def __init__(self, commands: Sequence[str]) -> None:
        self._commands = tuple(f"/{name}" for name in commands)
        readline.set_completer_delims(" ")
        readline.set_completer(self._completion)
        readline.parse_and_bind("tab: complete")

    def line(self) -> str | None:
        """The next line, and those that a backslash at its end joins to it."""
        try:
            lines = [input(PROMPT)]
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(input(CONTINUATION))
        except EOFError:
            print()  # noqa: T201, the prompt stands on the line still
            return None
        return "\n".join(lines)

    def edited(self, text: str) -> str:
        """Opens the user's editor; without one the text stands on the input line."""
        editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
        changed = _in_editor(shlex.split(editor), text) if editor else _on_line(text)
        if not changed.strip():
            raise WrongCommand("The message is empty, so nothing was sent.")
        if editor:
            readline.add_history(changed.replace("\n", " "))
        return changed

    def _completion(self, text: str, state: int) -> str | None:
        """Readline asks with 0, 1, 2, … until there is no more."""
        found = [name for name in self._commands if name.startswith(text)] if text.startswith("/") else []
        return found[state] if state < len(found) else None


def _in_editor(command: Sequence[str], text: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "message.txt"
        file.write_text(text + "\n", encoding="utf-8")
        try:
            code = subprocess.run([*command, str(file)], check=False).returncode
        except OSError as error:
            raise WrongCommand(f"The editor {command[0]} cannot be started: {error.strerror}.") from None
        if code:
            raise WrongCommand(f"The editor ended with code {code}, so nothing was sent.")
        return file.read_text(encoding="utf-8", errors="replace").rstrip("\n")


def _on_line(text: str) -> str:
    """The text on the input line, ready to be changed; a line holds no newline."""
    readline.set_startup_hook(lambda: readline.insert_text(text.replace("\n", " ")))
    try:
        return input(PROMPT)
    except EOFError:
        return ""
    finally:
        readline.set_startup_hook()
