"""How a conversation looks in a terminal: tokens in the styles of their origins, moving figures. Knows no gateway.

Whole lines are printed for good; only the line that grows and the figures are drawn again. So an answer may be longer
than the screen, and stays in the terminal's own history.
"""

import time

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from outrider.cli.chat.conversation import Turn
from outrider.cli.chat.screens import ending
from outrider.cli.chat.status import Progress
from outrider.cli.output import CONTROL_PICTURES, legend, styled
from outrider.client import Event, Round

REFRESHES_PER_S = 12
GREETING = "The whole conversation is sent with every message. /help lists the commands."


class LiveScreen:
    """Draws one answer at a time."""

    def __init__(self, console: Console, *, rejected: bool) -> None:
        self._console = console
        self._line = Text()
        self._started_s = 0.0
        self._progress = Progress(0)
        self._live = self._new_live()
        console.print(legend(rejected=rejected), soft_wrap=True)
        console.print(Text(GREETING, "dim"), soft_wrap=True)

    def begin(self, turn: Turn) -> None:
        """Starts the clock and the drawing."""
        self._line, self._progress = Text(), Progress(turn.seed)
        self._started_s = time.monotonic()
        self._live = self._new_live()
        self._live.start()

    def show(self, event: Event) -> None:
        """Prints the lines that have become whole."""
        self._progress.add(event, time.monotonic() - self._started_s)
        text = styled(event) if isinstance(event, Round) else Text(event.text.translate(CONTROL_PICTURES))
        *whole, self._line = wrapped(self._line + text, self._console.width)
        for line in whole:
            self._console.print(line)

    def end(self, turn: Turn) -> None:
        """Prints the last line and the figures."""
        self._live.stop()
        self._console.print(self._line, soft_wrap=True)
        self._console.print(Text(ending(turn, self._progress), "dim"), soft_wrap=True)

    def interrupt(self) -> None:
        """Ends the drawing, and the line on which an error would stand otherwise."""
        self._live.stop()
        self._console.print(self._line, soft_wrap=True)

    def tell(self, text: str) -> None:
        """Prints it."""
        self._console.print(Text(text.translate(CONTROL_PICTURES), "dim"), soft_wrap=True)

    def _new_live(self) -> Live:
        return Live(
            console=self._console, refresh_per_second=REFRESHES_PER_S, transient=True, get_renderable=self._region
        )

    def _region(self) -> Group:
        """What is drawn again and again."""
        figures = self._progress.line(time.monotonic() - self._started_s)
        return Group(self._line, Text(f"{figures}, Ctrl-C stops", "dim", no_wrap=True, overflow="ellipsis"))


def wrapped(text: Text, width: int) -> list[Text]:
    """Lines that fit into a width, broken at spaces where there are any; the last one is still to grow.

    Where a line ends depends on nothing that comes later, as long as no word is in two of them.
    """
    lines = []
    for paragraph in text.split("\n", allow_blank=True):
        rest = paragraph
        while (end := line_end(rest.plain, width)) is not None:
            line, rest = rest[:end], rest[end:]
            line.rstrip()
            lines.append(line)
        lines.append(rest)
    return lines


def line_end(text: str, width: int) -> int | None:
    """The index behind the first line of a paragraph, None when all of it fits into one."""
    if cell_len(text) <= width:
        return None
    end = 1
    while cell_len(text[: end + 1]) <= width:
        end += 1
    # The space itself may stand beyond the edge, where nobody sees it.
    return text.rfind(" ", 0, end + 1) + 1 or end
