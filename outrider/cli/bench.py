"""`outrider bench`: measurements, each in a process of its own, because what measures may need torch.

The options of a measurement are declared where it measures, in `bench`; here they only pass through.
"""

import asyncio
import sys
from collections.abc import Sequence

import typer

from outrider.cli.running import Interrupts, run

PASSING_ON = {"ignore_unknown_options": True, "allow_extra_args": True}

app = typer.Typer(help="Measures this machine and the whole stack on it.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Measures this machine and the whole stack on it."""


@app.command(context_settings=PASSING_ON, add_help_option=False)
def rounds(context: typer.Context) -> None:
    """Shows what a round costs: floors, the bare engine, empty pings, plain and speculative requests, in one run."""
    measure("bench.rounds", context.args)


@app.command(context_settings=PASSING_ON, add_help_option=False)
def load(context: typer.Context) -> None:
    """Compares a gateway with itself under loads, with numbers of draft tokens by turns: speed, gaps, CPU, answers."""
    measure("bench.load", context.args)


def command(module: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """The command line of a module that measures, with the arguments that were given."""
    # -P keeps a folder of the user's that is called like one of our packages from being imported instead.
    return (sys.executable, "-P", "-m", module, *arguments)


def measure(module: str, arguments: Sequence[str]) -> None:
    """Runs a module that measures, and ends with its exit code; a signal is passed on, and it ends its services."""
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
