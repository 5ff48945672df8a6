"""Runs a command's coroutine: signals become cancellation, errors one sentence and an exit code. Knows no command."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

import typer

from outrider.cli.naming import SHARED_OPTIONS, in_options
from outrider.errors import OutriderError
from outrider.service_process import ServiceFailed

# The codes of sysexits.h; a child that ended with any other one had an internal fault.
SYSEXITS = range(64, 79)


class Interrupts:
    """The first SIGINT or SIGTERM cancels the work, which drains; a further one runs `urgent` as well."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.urgent: Callable[[], None] = _nothing

    def listen(self, work: asyncio.Task[None]) -> None:
        """Handles the signals of this process from now on; needs a running loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._handle, number, work)

    def _handle(self, number: int, work: asyncio.Task[None]) -> None:
        if self.signal_number is not None:
            self.urgent()
            return
        self.signal_number = number
        work.cancel()


def _nothing() -> None:
    """What `urgent` does while there is nothing to hurry."""


Work = Callable[[Interrupts], Awaitable[None]]


async def _until_interrupted(work: Work) -> int | None:
    """Runs the work to its end and returns None, or until a signal came, and returns its number."""
    interrupts = Interrupts()
    task = asyncio.ensure_future(_as_coroutine(work, interrupts))
    interrupts.listen(task)
    try:
        await task
    except asyncio.CancelledError:
        if interrupts.signal_number is None:
            raise
    return interrupts.signal_number


async def _as_coroutine(work: Work, interrupts: Interrupts) -> None:
    await work(interrupts)


def run(work: Work, *, serves: bool = False, options: Mapping[str, str] = SHARED_OPTIONS) -> None:
    """Runs a command and raises typer.Exit unless it ended well.

    A signal is how a command that `serves` ends, so it is a success there; elsewhere the code is 128 + signal.
    `options` are what it calls the fields that an error may name.
    """
    with failures_told(options):
        number = asyncio.run(_until_interrupted(work))
    if number is not None and not serves:
        raise typer.Exit(128 + number)


@contextmanager
def failures_told(options: Mapping[str, str]) -> Iterator[None]:
    """Turns what goes wrong within it into a sentence, by the names of options, and the typer.Exit to raise."""
    try:
        yield
    except ServiceFailed as error:
        code = error.code if error.code in SYSEXITS else OutriderError.exit_code
        raise fail(error.message, code) from None
    except OutriderError as error:
        raise fail(in_options(error, options), error.exit_code) from None


def note(sentence: str) -> None:
    """One line for the user on stderr."""
    typer.echo(sentence, err=True)


def service_log(name: str, line: str) -> None:
    """A line of a service's log on stderr."""
    note(f"{name}: {line}")


def fail(sentence: str, code: int) -> typer.Exit:
    """Tells the user what went wrong and returns the exit to raise."""
    note(f"outrider: {sentence}")
    return typer.Exit(code)
