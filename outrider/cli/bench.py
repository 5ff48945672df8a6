"""`outrider bench`: measurements, each in a process of its own. Never imports what measures, which may need torch.

The options stand here and nowhere else: the module that measures has a command with the same ones.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import options
from outrider.cli.options import INT32_MAX, INT64_MAX, INT64_MIN, parse_draft_count
from outrider.cli.running import Interrupts, Work, run
from outrider.errors import InvalidRequest
from outrider.model_service.settings import MAX_THREADS
from outrider.process.options import between, grouped, options_of, refuse_together
from outrider.rpc.channels import check_address

app = typer.Typer(help="Measures this machine and the whole stack on it.", no_args_is_help=True)


def writable(option: str) -> Callable[[Path | None], Path | None]:
    """A callback that raises InvalidRequest now where a run of minutes could not be written at its end."""

    def check(file: Path | None) -> Path | None:
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            raise InvalidRequest(option, str(file), "a file in a folder that exists")
        return file

    return check


Temperatures = Annotated[str, typer.Option(help="Temperatures of the requests, with commas between.", metavar="X,...")]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", help="File for all samples.", metavar="FILE", show_default=False, callback=writable("--json")
    ),
]
SaveFile = Annotated[
    Path | None,
    typer.Option("--save", help="File for every sample, as JSON.", metavar="FILE", callback=writable("--save")),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the report.")]


class Settings(StrEnum):
    """With which settings `bench serve` asks."""

    BOTH = "both"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpus:
    """How many threads compute."""

    threads: options.Threads = None
    draft_threads: Annotated[
        int | None,
        typer.Option(
            help="Compute threads of the draft. Default: 1.",
            metavar="N",
            callback=between(1, MAX_THREADS),
            rich_help_panel="The machine",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsRun:
    """How long `bench rounds` measures, and where the figures go."""

    tokens: Annotated[int, typer.Option(help="Tokens a request.", metavar="N", callback=between(8, 512))] = 96
    turns: Annotated[
        int, typer.Option(help="Measured passes over all prompts and settings.", metavar="N", callback=between(1, 1000))
    ] = 5
    temperatures: Temperatures = "0,0.8"
    quick: Annotated[bool, typer.Option("--quick", help="Seconds instead of minutes; the figures mean little.")] = False
    json: JsonFlag = False
    save: SaveFile = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What `bench serve` asks for, how often, and where the figures go."""

    address: Annotated[
        str | None,
        typer.Option(help="Gateway to ask. Default: a stack of its own.", metavar="HOST:PORT", show_default=False),
    ] = None
    requests: Annotated[
        int, typer.Option(help="Measured requests of each setting.", metavar="N", callback=between(1, 1_000_000))
    ] = 32
    streams: Annotated[
        int, typer.Option(help="Requests that are under way at a time.", metavar="N", callback=between(1, 4096))
    ] = 4
    tokens: Annotated[int, typer.Option(help="Tokens a request.", metavar="N", callback=between(1, INT32_MAX))] = 64
    turns: Annotated[
        int, typer.Option(help="Times that settings take turns.", metavar="N", callback=between(1, 1000))
    ] = 4
    speculation: Annotated[Settings, typer.Option(help="Ask with speculation, without, or both by turns.")] = (
        Settings.BOTH
    )
    draft_count: Annotated[
        str, typer.Option(help="Draft tokens a round; auto leaves it to the gateway.", metavar="N|auto")
    ] = "auto"
    temperature: Annotated[
        float, typer.Option(help="Temperature of the requests.", metavar="X", callback=between(0, 100))
    ] = 0.8
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of the first request.", metavar="N", callback=between(INT64_MIN, INT64_MAX - 1_000_000)
        ),
    ] = 0
    json: JsonFlag = False
    save: SaveFile = None


@app.callback()
def group() -> None:
    """Measures this machine and the whole stack on it."""


@app.command()
@grouped
def rounds(*, measured: RoundsRun, models: options.Models, cpus: Cpus) -> None:
    """Shows what a round costs: floors, the bare engine, empty pings, plain and speculative requests, in one run."""
    parse_temperatures(measured.temperatures)
    _measure("bench.rounds", options_of(models) | options_of(cpus) | options_of(measured))


@app.command()
@grouped
def serve(*, load: Load, models: options.Models, cpus: Cpus) -> None:
    """Asks a gateway from many streams at a time, with and without speculation by turns: speed and latencies."""
    check_load(load, models, cpus)
    given = options_of(load) | (options_of(models) | options_of(cpus) if load.address is None else {})
    _measure("bench.serve", given)


def check_load(load: Load, models: options.Models, cpus: Cpus) -> None:
    """Raises InvalidRequest about what cannot be asked for."""
    parse_draft_count(load.draft_count)
    if load.address is not None:
        check_address("--address", load.address)
        refuse_together("--address", load.address, options_of(models) | options_of(cpus))


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
    words: list[str] = []
    for option, value in given.items():
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            # One word, so that a value may begin with a dash.
            words.append(f"{option}={value}")
    # -P keeps a folder of the user's that is called like one of our packages from being imported instead.
    return (sys.executable, "-P", "-m", module, *words)


def _measure(module: str, given: Mapping[str, object]) -> None:
    """Runs a module that measures, and ends with its exit code."""
    codes: list[int] = []
    run(_child(command(module, given), codes))
    raise typer.Exit(codes[0] if codes[0] >= 0 else 128 - codes[0])


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
