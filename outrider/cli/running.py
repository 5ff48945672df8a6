"""Runs a command's coroutine: signals become cancellation, errors one sentence and an exit code."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager

import typer

from outrider.cli.options import SHARED_OPTIONS, in_options
from outrider.errors import OutriderError
from outrider.process.children import ServiceFailed
from outrider.process.run import stop_signals

# The codes of sysexits.h; a child that ended with any other one had an internal fault.
SYSEXITS = range(64, 79)


class Interrupts:
    """The first of `stop_signals` cancels the work, which drains; a further one runs `urgent` as well."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.urgent: Callable[[], None] = lambda: None

    async def run(self, work: "Work") -> None:
        """Runs the work to its end, or until a signal came, and handles the signals of this process from then on."""
        task = asyncio.create_task(work(self))

        def handle(number: int) -> None:
            if self.signal_number is not None:
                self.urgent()
                return
            self.signal_number = number
            task.cancel()

        for number in stop_signals():
            asyncio.get_running_loop().add_signal_handler(number, handle, number)
        try:
            await task
        except asyncio.CancelledError:
            if self.signal_number is None:
                raise


Work = Callable[[Interrupts], Coroutine[None, None, None]]


def run(work: Work, *, serves: bool = False, options: Mapping[str, str] = SHARED_OPTIONS) -> None:
    """Runs a command and raises typer.Exit unless it ended well.

    A signal is how a command that `serves` ends, so it is a success there; elsewhere the code is 128 + signal.
    `options` are what it calls the fields that an error may name.
    """
    interrupts = Interrupts()
    with failures_as_exits(options):
        asyncio.run(interrupts.run(work))
    if interrupts.signal_number is not None and not serves:
        raise typer.Exit(128 + interrupts.signal_number)


@contextmanager
def failures_as_exits(options: Mapping[str, str]) -> Iterator[None]:
    """Turns what goes wrong within it into a sentence, by the names of options, and the typer.Exit to raise."""
    try:
        yield
    except ServiceFailed as error:
        note(f"outrider: {error.message}")
        raise typer.Exit(error.code if error.code in SYSEXITS else OutriderError.exit_code) from None
    except OutriderError as error:
        note(f"outrider: {in_options(error, options)}")
        raise typer.Exit(error.exit_code) from None


def note(sentence: str) -> None:
    """Writes one line for the user to stderr."""
    typer.echo(sentence, err=True)


def service_log(name: str, line: str) -> None:
    """A line of a service's log on stderr."""
    note(f"{name}: {line}")
