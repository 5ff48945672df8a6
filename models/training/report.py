"""What a run says while it works and when it has ended. Decides nothing."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from training.evaluation import HeldOut, Losses
from training.stage import Stage


@dataclass(frozen=True, slots=True)
class Row:
    """What one stage took and reached."""

    name: str
    steps: int
    tokens: int
    losses: Losses


class Report:
    """Speaks through one console: a bar where it is a terminal, and a line every so many steps everywhere."""

    def __init__(self, console: Console, every: int) -> None:
        self.console = console
        self.every = every

    @contextmanager
    def learning(self, stage: Stage) -> Iterator[Callable[[int, float], None]]:
        """A bar for a stage; yields what is told the steps done and the loss."""
        what = " and ".join(f"{each.batch} x {each.block_len:,}" for each in stage.portions) + " tokens a step"
        self.console.print(f"{stage.name}: {stage.steps:,} steps, {what}")
        with self._bar() as bar:
            task = bar.add_task(stage.name, total=stage.steps, note="")

            def advance(step: int, loss: float) -> None:
                bar.update(task, completed=step, note=f"loss {loss:.3f}")
                if step % self.every == 0 or step == stage.steps:
                    bar.console.print(f"{stage.name}: step {step:,}, loss {loss:.3f}")

            yield advance

    @contextmanager
    def measuring(self, name: str) -> Iterator[Callable[[], None]]:
        """A bar of unknown length for the held-out loss; yields what is called now and then."""
        with self._bar() as bar:
            task = bar.add_task(f"{name}: held-out loss", total=None, note="")
            yield lambda: bar.advance(task)

    def _bar(self) -> Progress:
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
        return Progress(
            TextColumn("{task.description}"), *columns, console=self.console, disable=not self.console.is_terminal
        )

    def table(self, rows: Sequence[Row], held_out: HeldOut) -> None:
        """Prints held-out losses in nats a token, by what stands before the tokens."""
        behind = [length - held_out.block_len // 2 for length in held_out.window_lens]
        names = (f"behind {count:,}" for count in behind)
        table = Table(Column("stage", no_wrap=True), "steps", "tokens", f"blocks of {held_out.block_len}", *names)
        for row in rows:
            losses = (row.losses.blocks, *row.losses.by_window)
            shown = ("-" if math.isnan(value) else f"{value:.3f}" for value in losses)
            table.add_row(row.name, f"{row.steps:,}", f"{row.tokens:,}", *shown)
        self.console.print("Held-out loss in nats a token; behind so many tokens the same ones are measured.")
        self.console.print(table)
