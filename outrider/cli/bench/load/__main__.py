"""`outrider bench load`: what speculation is worth on a live gateway, by streams, draft tokens and temperature.

Every block asks prompts that none has asked before, in another order of settings each turn, so that neighbours can be
compared and no memory of answers helps. Some answers are asked for again without speculation when all is measured.
Prints a report, or one JSON object; `--save FILE` keeps every message.
"""

import json
import re
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import options
from outrider.cli.bench.common import (
    ComputeThreads,
    JsonFlag,
    MeasuredModels,
    SaveFile,
    Temperatures,
    check_asked,
    machine,
    pair_of,
    parse_numbers,
    parse_temperatures,
    provenance,
    revision,
    run_measurement,
    served,
    writable,
)
from outrider.cli.bench.load.driver import LEAST_REQUESTS, Block, Driver, LoadPlan
from outrider.cli.bench.load.report import is_simulated, name_of, plot, render
from outrider.cli.bench.load.summary import summarize
from outrider.cli.local_stack import Stack
from outrider.cli.options import INT32_MAX, INT64_MAX, INT64_MIN, SHARED_OPTIONS, parse_draft_count
from outrider.cli.running import Interrupts, run
from outrider.errors import InvalidRequest
from outrider.process import telemetry
from outrider.process.options import between, grouped
from outrider.rpc.wire import check_address

MOST_STREAMS, MOST_REQUESTS, MOST_TURNS = 4096, 1000, 1000
MAX_TREE_ROWS, TREE_SIZE = 32, re.compile("(?P<rows>[0-9]{1,3})x(?P<depth>[0-9]{1,3})")
MOST_ASKED = MOST_STREAMS * MOST_REQUESTS * MOST_TURNS
# What the gateway may name, some by options that hold several values.
NAMES = {
    **SHARED_OPTIONS,
    "max_tokens": "--tokens",
    "sampling.temperature": "--temperatures",
    "speculation.draft_count": "--draft-counts",
}

counted = partial(typer.Option, metavar="N")
listed = partial(typer.Option, metavar="N,...")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


ANY = "any"


def writable_svg(param: typer.CallbackParam, file: Path | None) -> Path | None:
    """Raises InvalidRequest about a file that is no SVG, or that cannot be written."""
    if file is not None and file.suffix != ".svg":
        raise InvalidRequest(param.opts[0], str(file), "a file that ends in .svg")
    return writable(param, file)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options: what is asked for, how often, and where the figures go."""

    address: Annotated[
        str | None, typer.Option(help="Gateway to ask. Default: a stack of its own.", metavar="HOST:PORT")
    ] = None
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            help="Where a process of that gateway's stack serves /metrics. Once for each.", metavar="NAME=HOST:PORT"
        ),
    ] = None
    streams: Annotated[str, listed(help="Numbers of requests side by side.")] = "1,4,16,32"
    draft_counts: Annotated[
        str,
        typer.Option(
            help="Draft tokens a round; 0 is plain decoding, auto is the gateway's choice.", metavar="N|auto,..."
        ),
    ] = "0,2,4,auto"
    drafters: Annotated[
        str,
        typer.Option(
            help=f"Whose draft tokens, by turns: names of drafters, or {ANY} for the gateway's choice.",
            metavar="NAME,...",
        ),
    ] = ANY
    trees: Annotated[
        str,
        typer.Option(
            help="Trees that the draft grows, by rows and most depth, as in 16x4,31x5. Default: none.",
            metavar="ROWSxDEPTH,...",
        ),
    ] = ""
    temperatures: Temperatures = "0,0.8"
    tokens: Annotated[int, counted(help="Tokens a request.", callback=between(8, INT32_MAX))] = 48
    requests: Annotated[
        int,
        counted(
            help=f"Requests of a stream in a block, which has at least {LEAST_REQUESTS}.",
            callback=between(2, MOST_REQUESTS),
        ),
    ] = 3
    turns: Annotated[
        int, counted(help="Measured passes over all settings and loads.", callback=between(2, MOST_TURNS))
    ] = 6
    connections: Annotated[
        int, counted(help="Connections that the streams share.", callback=between(1, MOST_STREAMS))
    ] = 1
    seed: Annotated[
        int, counted(help="Seed of the first request.", callback=between(INT64_MIN, INT64_MAX - MOST_ASKED))
    ] = 0
    json: JsonFlag = False
    save: SaveFile = None
    plot: Annotated[
        Path | None,
        typer.Option(
            help="File for a plot of the speed-up over streams.",
            metavar="FILE.svg",
            show_default=False,
            callback=writable_svg,
        ),
    ] = None


@app.command()
@grouped
def load(
    *,
    wanted: LoadOptions,
    models: MeasuredModels,
    cpus: ComputeThreads,
    hosted: options.HostedOptions,
    connection: options.ConnectionOptions,
) -> None:
    """Compares a gateway with itself under loads, with numbers of draft tokens by turns: speed, gaps, CPU, answers."""
    telemetry.configure_logs("warning")
    plan, metrics = plan_of(wanted), metrics_of(wanted)
    check(wanted, models, hosted, cpus)
    tls = connection.tls(wanted.address)
    stack = own_stack(models, cpus, hosted) if wanted.address is None else None

    async def measuring(interrupts: Interrupts) -> None:
        async with AsyncExitStack() as exits:
            driver = Driver(plan, wanted.address or "", metrics, connection.api_key, tls)
            if stack is not None:
                addresses = await exits.enter_async_context(served(stack, interrupts))
                driver = Driver(plan, addresses.gateway, addresses.metrics)
            blocks = await driver.run()
        conclude(driver, wanted, blocks)

    run(measuring, options=NAMES)


def own_stack(models: MeasuredModels, cpus: ComputeThreads, hosted: options.HostedOptions) -> Stack:
    """The stack that is started and measured: lookups are on, and with REST the gateway serves its metrics too.

    Raises ModelRefused.
    """
    stack = replace(pair_of(models, cpus, lookup=True), rest_port=0)
    # Beside the draft service, so that drafters can be compared.
    target_flags = hosted.target_flags(stack.draft, stack.draft_threads)
    return replace(stack, target_flags=target_flags | {"--head": hosted.head or stack.target_flags["--head"]})


def check(wanted: LoadOptions, models: MeasuredModels, hosted: options.HostedOptions, cpus: ComputeThreads) -> None:
    """Raises InvalidRequest about options that have no effect beside others, and about what is no address."""
    if wanted.address is not None:
        check_asked(wanted.address, models, cpus, hosted)
    elif wanted.metrics:
        raise InvalidRequest("--metrics", wanted.metrics, "left out without --address: a stack of its own is known")


def plan_of(wanted: LoadOptions) -> LoadPlan:
    """The plan that the options describe. Raises InvalidRequest."""
    try:
        draft_counts = tuple(dict.fromkeys(parse_draft_count(part) for part in wanted.draft_counts.split(",")))
    except InvalidRequest:
        draft_counts = ()
    if 0 not in draft_counts:
        limit = "numbers or auto with commas between, and 0 among them, which all are compared with"
        raise InvalidRequest("--draft-counts", wanted.draft_counts, limit)
    return LoadPlan(
        streams=parse_numbers("--streams", wanted.streams, int, 1, MOST_STREAMS),
        draft_counts=draft_counts,
        drafters=tuple("" if name == ANY else name for name in wanted.drafters.split(",")),
        trees=parse_trees(wanted.trees),
        temperatures=parse_temperatures(wanted.temperatures),
        tokens=wanted.tokens,
        requests=wanted.requests,
        turns=wanted.turns,
        connections=wanted.connections,
        seed=wanted.seed,
    )


def parse_trees(text: str) -> tuple[tuple[int, int], ...]:
    """Rows and depth of each tree, each once. Raises InvalidRequest."""
    found = [TREE_SIZE.fullmatch(part) for part in text.split(",")] if text else []
    sizes = [(int(each["rows"]), int(each["depth"])) for each in found if each]
    if len(sizes) < len(found) or not all(1 <= depth <= rows <= MAX_TREE_ROWS for rows, depth in sizes):
        limit = f"ROWSxDEPTH with commas between, rows in [1, {MAX_TREE_ROWS}] and depths in [1, rows]"
        raise InvalidRequest("--trees", text, limit)
    return tuple(dict.fromkeys(sizes))


def metrics_of(wanted: LoadOptions) -> dict[str, str]:
    """Addresses of processes that serve /metrics, by their names. Raises InvalidRequest."""
    found: dict[str, str] = {}
    for text in wanted.metrics or ():
        name, _, address = text.partition("=")
        if not name or name in found:
            raise InvalidRequest("--metrics", text, "NAME=HOST:PORT, and the only one of its name")
        found[name] = check_address("--metrics", address)
    return found


def conclude(driver: Driver, wanted: LoadOptions, blocks: Sequence[Block]) -> None:
    """Writes the files that are wanted, and prints the report, or its figures as JSON."""
    figures, models = summarize(blocks), driver.models
    document: dict[str, object] = provenance() | {
        "address": driver.address,
        "models": models,
        "simulated": is_simulated(models),
        "plan": asdict(driver.plan),
        "figures": [asdict(each) for each in figures],
    }
    if wanted.save is not None:
        wanted.save.write_text(json.dumps(document | {"blocks": [asdict(each) for each in blocks]}), encoding="utf-8")
    if wanted.plot is not None:
        wanted.plot.write_text(plot(figures, models), encoding="utf-8")
    if wanted.json:
        sys.stdout.write(json.dumps(document) + "\n")
        return
    plan = driver.plan
    print(
        f"## {name_of(models)} under load\n\n{plan.tokens} tokens a request, {plan.requests} requests a stream and "
        f"block, {plan.turns} turns, settings\ninterleaved; {machine()}; commit {revision() or 'unknown'}.\n\n"
        f"{render(figures, blocks)}"
    )


if __name__ == "__main__":
    run_measurement(app, "load")
