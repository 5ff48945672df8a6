"""`python -m bench.fleet.trace`: how well gateways that do not talk to each other choose among targets, simulated.

Nothing runs but the choice itself (`gateway.sessions.placement`): targets, links and time are simulated. Conversations
arrive by themselves; the same ones go to each way of choosing. A load is what round robin through one gateway makes of
them, as a share of the rows that the targets can compute.
"""

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Annotated

import typer

from bench.fleet.gateways import POLICIES
from bench.fleet.simulated import WARM_UP, FleetFigures, SimulatedFleet
from bench.fleet.texts import MEAN_LIVE_TOKENS, TalkTurn, TraceOptions, cacheable, trace_of
from outrider.cli.bench.common import SaveFile, markdown, parse_numbers, provenance, revision
from outrider.estimates.prefixes import BLOCK_TOKENS
from outrider.model_service.settings import available_cpus
from outrider.process.options import between, grouped, run_app, service_app

TRIED_TURNS_A_S, TRIES = 80.0, 2
ORACLE, ROUND_ROBIN = "oracle", "round robin"

app = service_app()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """Options: the fleet and its load."""

    targets: Annotated[int, typer.Option(help="Targets.", metavar="N", callback=between(2, 64))] = 4
    gateways: Annotated[str, typer.Option(help="Numbers of gateways.", metavar="G,...")] = "1,2,4,8"
    loads: Annotated[str, typer.Option(help="Loads, in percent.", metavar="P,...")] = "50,80"
    shared: Annotated[str, typer.Option(help="Conversations with a usual beginning, in percent.", metavar="P,...")] = (
        "0,25,75"
    )
    cache: Annotated[
        int, typer.Option(help="Tokens of a target's cache.", metavar="N", callback=between(8_192, 1 << 22))
    ] = 427_000
    working_set: Annotated[
        float, typer.Option(help="Tokens of all conversations, in caches.", metavar="X", callback=between(0.1, 64))
    ] = 2.0
    turns: Annotated[int, typer.Option(help="Turns; 2 of 5 warm up.", callback=between(50, 100_000))] = 3_000
    save: SaveFile = None


@dataclass(frozen=True, slots=True)
class TraceCell:
    """One way of choosing under one load."""

    load: int
    shared: int
    turns_a_s: float
    gateways: int
    choice: str


def options_of(wanted: SimulationOptions, shared: int, turns_a_s: float) -> TraceOptions:
    live = int(wanted.working_set * wanted.cache / MEAN_LIVE_TOKENS)
    return TraceOptions(shared / 100, turns_a_s, live, wanted.turns)


@cache
def _trace(options: TraceOptions) -> list[TalkTurn]:
    return trace_of(options)


def figures_of(cell: TraceCell, wanted: SimulationOptions) -> FleetFigures:
    """What comes of a trace in one fleet."""
    policy, pushes = POLICIES[cell.choice]
    fleet = SimulatedFleet(wanted.targets, cell.gateways, policy, wanted.cache // BLOCK_TOKENS, pushes=pushes)
    return fleet.run(_trace(options_of(wanted, cell.shared, cell.turns_a_s)))


def cells_of(wanted: SimulationOptions) -> list[TraceCell]:
    """All runs, at arrivals that give round robin the loads that are wanted."""
    gateways = parse_numbers("--gateways", wanted.gateways, int, 1, 64)
    loads = parse_numbers("--loads", wanted.loads, int, 1, 99)
    cells = []
    for shared in parse_numbers("--shared", wanted.shared, int, 0, 100):
        for load in loads:
            turns_a_s = TRIED_TURNS_A_S
            for _ in range(TRIES):
                tried = figures_of(TraceCell(load, shared, turns_a_s, 1, ROUND_ROBIN), wanted)
                turns_a_s *= load / 100 / tried.load
            cells += [TraceCell(load, shared, turns_a_s, number, choice) for number in gateways for choice in POLICIES]
    return sorted(cells, key=lambda each: each.load)


@app.command()
@grouped
def trace(*, wanted: SimulationOptions) -> None:
    """Compares ways of choosing a target under conversations that arrive by themselves, all simulated."""
    cells = cells_of(wanted)
    with ProcessPoolExecutor(available_cpus()) as pool:
        found = list(pool.map(partial(figures_of, wanted=wanted), cells))
    if wanted.save is not None:
        runs = [asdict(cell) | asdict(figures) for cell, figures in zip(cells, found, strict=True)]
        document = {"options": asdict(replace(wanted, save=None)), "runs": runs}
        wanted.save.write_text(json.dumps(provenance() | document), encoding="utf-8")
    sys.stdout.write(report(wanted, cells, found))


def report(wanted: SimulationOptions, cells: Sequence[TraceCell], found: Sequence[FleetFigures]) -> str:
    """A line for each run."""
    by_cell = dict(zip(cells, found, strict=True))
    rows = []
    for cell, each in by_cell.items():
        robin, oracle = (by_cell[replace(cell, choice=choice)] for choice in (ROUND_ROBIN, ORACLE))
        rows.append(
            [
                f"{cell.load} %",
                f"{cell.shared} %",
                str(cell.gateways),
                cell.choice,
                f"{each.load:.2f}",
                f"{each.hits:.3f}",
                f"{each.hits / oracle.hits:.3f}",
                *(f"{each.first_ms(share):.0f}" for share in (0.5, 0.9, 0.99)),
                f"{each.worst_over(robin):.2f}",
                f"{each.work_spread:.3f}",
                f"{each.busy_spread:.3f}",
            ]
        )
    head = ["load", "shared", "gateways", "choice", "work", "hits", "of oracle", "p50", "p90", "p99"]
    head += ["worst over RR", "CoV of work", "of busy"]
    traces = {(cell.load, cell.shared): cell.turns_a_s for cell in cells}
    lines = [
        f"{load} %, {shared} % shared: {turns_a_s:.0f} turns a second, of whose prompts "
        f"{cacheable(_trace(options_of(wanted, shared, turns_a_s)), int(WARM_UP * wanted.turns)):.3f} was said before"
        for (load, shared), turns_a_s in traces.items()
    ]
    return (
        f"## All SIMULATED: {wanted.targets} targets, gateways that do not talk to each other\n\n{wanted.turns} turns "
        f"of conversations whose tokens are {wanted.working_set:g} caches of {wanted.cache} tokens; commit "
        f"{revision() or 'unknown'}. Times to first tokens in ms of simulated time.\n\n{markdown(head, rows)}\n\n"
        + "".join(f"- {each}.\n" for each in lines)
    )


if __name__ == "__main__":
    run_app(app)
