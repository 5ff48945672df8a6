"""Commands that run in a process of their own, because what they do may need torch, which no command here imports."""

import asyncio
import sys
from collections.abc import Sequence

import typer

from outrider.cli.running import Interrupts, run


def command(module: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """The command line of a module, with the arguments that were given."""
    # -P keeps a folder of the user's that is called like one of our packages from being imported instead.
    return (sys.executable, "-P", "-m", module, *arguments)


def run_module(module: str, arguments: Sequence[str]) -> None:
    """Runs a module and ends with its exit code; a signal is passed on, and it ends what it started."""
    codes: list[int] = []

    async def work(interrupts: Interrupts) -> None:
        # A session of its own, so that Ctrl-C reaches the child once, from here.
        child = await asyncio.create_subprocess_exec(*command(module, arguments), start_new_session=True)
        interrupts.urgent = child.terminate
        try:
            codes.append(await child.wait())
        except asyncio.CancelledError:
            child.terminate()
            await child.wait()
            raise

    run(work)
    raise typer.Exit(codes[0] if codes[0] >= 0 else 128 - codes[0])
