"""How far a run is: a bar with the time left in a terminal, a line for each turn elsewhere. Measures nothing."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from outrider.cli.output import is_rich


@dataclass(frozen=True, slots=True)
class Steps:
    """Counts the steps of a run; `say` begins a part of it."""

    bar: Progress
    task: TaskID
    output: TextIO | None
    """Where lines go when there is no bar."""

    def say(self, sentence: str) -> None:
        """What is going on from now on."""
        self.bar.update(self.task, description=sentence)
        if self.output is not None:
            self.output.write(f"{sentence}.\n")
            self.output.flush()

    def done(self) -> None:
        """One step is over."""
        self.bar.advance(self.task)


@contextmanager
def steps(total: int, output: TextIO | None = None) -> Iterator[Steps]:
    """A run of so many steps, shown on stderr by default, so that stdout holds the result alone."""
    stream = output or sys.stderr
    drawn = is_rich(stream)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream), transient=True, disable=not drawn) as bar:
        yield Steps(bar, bar.add_task("", total=total), None if drawn else stream)
