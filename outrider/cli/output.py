"""Standard streams that the command line writes to, with styles in a terminal."""

import os
from typing import TextIO

from rich.console import Console

# Into a file or pipe a table is as wide as it needs to be.
PLAIN_WIDTH = 160


def is_rich(stream: TextIO) -> bool:
    """Whether tables may be drawn and drawn again: a terminal that is not dumb, and NO_COLOR is not set.

    NO_COLOR means no colours only (no-color.org), but who sets it reads lines, in a log or by voice.
    """
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def write(output: TextIO, text: str) -> None:
    """Writes what somebody may be waiting for."""
    output.write(text)
    output.flush()


def console_for(file: TextIO) -> Console:
    """A console as wide as the terminal, or PLAIN_WIDTH elsewhere."""
    console = Console(file=file, highlight=False)
    return console if console.is_terminal else Console(file=file, highlight=False, width=PLAIN_WIDTH)
