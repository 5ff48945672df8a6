"""`outrider bench`: measurements, each in a process of its own. Never imports what measures, which needs torch.

The options stand here and nowhere else: the module that measures has a command with the same ones.
"""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import options
from outrider.cli.running import Interrupts, Work, run
from outrider.command_line import between
from outrider.errors import InvalidRequest

app = typer.Typer(help="Measures this machine and the whole stack on it.", no_args_is_help=True)


def writable(file: Path | None) -> Path | None:
    """Returns the path of a file; raises InvalidRequest now where a run of minutes could not be written at its end."""
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise InvalidRequest("--json", str(file), "a file in a folder that exists")
    return file


Tokens = Annotated[int, typer.Option(help="Tokens a request.", metavar="N", callback=between(8, 512))]
Turns = Annotated[
    int, typer.Option(help="Measured passes over all prompts and settings.", metavar="N", callback=between(1, 1000))
]
Temperatures = Annotated[str, typer.Option(help="Temperatures of the requests, with commas between.", metavar="X,...")]
Quick = Annotated[bool, typer.Option("--quick", help="Seconds instead of minutes; the figures mean little.")]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="File for all samples.", metavar="FILE", show_default=False, callback=writable),
]


@app.callback()
def group() -> None:
    """Measures this machine and the whole stack on it."""


@app.command()
def rounds(  # noqa: PLR0913, one parameter for each option is how typer declares a command
    *,
    target: options.Target = None,
    draft: options.Draft = None,
    dtype: options.DtypeOption = None,
    threads: options.Threads = None,
    draft_threads: options.DraftThreads = 1,
    tokens: Tokens = 96,
    turns: Turns = 5,
    temperatures: Temperatures = "0,0.8",
    quick: Quick = False,
    json: JsonFile = None,
) -> None:
    """Shows what a round costs: floors, the bare engine, empty pings, plain and speculative requests, in one run."""
    parse_temperatures(temperatures)
    given = {
        "--target": target,
        "--draft": draft,
        "--dtype": dtype,
        "--threads": threads,
        "--draft-threads": draft_threads,
        "--tokens": tokens,
        "--turns": turns,
        "--temperatures": temperatures,
        "--json": json,
    }
    codes: list[int] = []
    run(_child((*command("bench.rounds", given), *(("--quick",) if quick else ())), codes))
    raise typer.Exit(codes[0] if codes[0] >= 0 else 128 - codes[0])


def parse_temperatures(text: str) -> tuple[float, ...]:
    """Temperatures with commas between, each once. Raises InvalidRequest."""
    try:
        temperatures = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        temperatures = ()
    if not temperatures or not all(0 <= each <= 100 for each in temperatures):
        raise InvalidRequest("--temperatures", text, "numbers in [0, 100] with commas between")
    return temperatures


def command(module: str, given: Mapping[str, object]) -> tuple[str, ...]:
    """The command line of a module that measures, with the options that were given."""
    # -P keeps a folder of the user's that is called like one of our packages from being imported instead.
    words = (word for option, value in given.items() if value is not None for word in (option, str(value)))
    return (sys.executable, "-P", "-m", module, *words)


def _child(arguments: tuple[str, ...], codes: list[int]) -> Work:
    """Runs a child to its end and appends its exit code; a signal is passed on, and the child ends its services."""

    async def work(interrupts: Interrupts) -> None:
        # A session of its own, so that Ctrl-C reaches the child once, from here.
        child = await asyncio.create_subprocess_exec(*arguments, start_new_session=True)
        interrupts.urgent = child.terminate
        try:
            codes.append(await child.wait())
        except asyncio.CancelledError:
            child.terminate()
            await child.wait()
            raise

    return work
