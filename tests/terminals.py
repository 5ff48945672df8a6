"""A command in a terminal of its own, for tests of what users type and see."""

import asyncio
import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from helpers import eventually

ROWS, COLUMNS = 24, 80
INTERRUPT = "\x03"
UP = "\x1b[A"
# Its own session with the terminal in control, so that Ctrl-C typed there becomes the signal.
START = (
    "import fcntl, os, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "from outrider.cli import main; main()"
)
CONTROL_SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class Terminal:
    """A running command, and everything that it has shown so far."""

    process: asyncio.subprocess.Process
    handle: int
    shown: str = ""
    seen: int = 0
    received: bytearray = field(default_factory=bytearray)

    def type(self, text: str) -> None:
        """Presses keys."""
        os.write(self.handle, text.encode())

    async def until(self, words: str) -> str:
        """Waits for words behind those waited for before; returns what was shown up to them, in plain text."""
        await eventually(lambda: words in self.plain[self.seen :])
        start, self.seen = self.seen, self.plain.index(words, self.seen) + len(words)
        return self.plain[start : self.seen]

    @property
    def plain(self) -> str:
        """What was shown, without styles and movements."""
        return CONTROL_SEQUENCES.sub("", self.shown)

    def read(self) -> None:
        """Takes what the command has written; a terminal that the last process has left gives an error."""
        try:
            self.received += os.read(self.handle, 1 << 16)
        except OSError:
            asyncio.get_running_loop().remove_reader(self.handle)
        self.shown = self.received.decode(errors="ignore")


@asynccontextmanager
async def terminal(*arguments: str, changes: Mapping[str, str] | None = None) -> AsyncIterator[Terminal]:
    """Runs `outrider` in a terminal with colours; it is killed at the end if it still runs."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    unwanted = {"NO_COLOR", "VISUAL", "EDITOR", "COLUMNS", "LINES", "INPUTRC"}
    environment = {key: value for key, value in os.environ.items() if key not in unwanted}
    environment |= {"TERM": "xterm-256color", **(changes or {})}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", START, *arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    running = Terminal(process, ours)
    asyncio.get_running_loop().add_reader(ours, running.read)
    try:
        yield running
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()
        asyncio.get_running_loop().remove_reader(ours)
        os.close(ours)
