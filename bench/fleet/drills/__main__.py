"""`python -m bench.fleet.drills`: real services on simulated devices die, hang, leave and come under load.

Each drill has a gateway of its own in front of four targets. Every answer is compared with plain decoding by a target
to which nothing happens.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from bench.fleet.drills.figures import TARGETS, Drill, DrillRun
from bench.fleet.drills.fleet import DrillFleet, GatewayLog, Partition, cpu_s
from bench.fleet.drills.report import report
from bench.fleet.drills.streams import AskedLoad, keep_busy, plain_answers
from outrider.cli.bench.common import SaveFile, machine, provenance, revision
from outrider.cli.bench.load.driver import scrape
from outrider.cli.running import Interrupts, note, run
from outrider.client import Speculation
from outrider.errors import InvalidRequest
from outrider.process import telemetry
from outrider.process.options import between, grouped, run_app, service_app

DRAFTS = 3
SESSIONS = "outrider_sessions"
LOOK_S = 0.5
PLAIN_STRETCH = 0.1

app = service_app()
counted = partial(typer.Option, metavar="N")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOptions:
    """Options: which drills, under which load."""

    drills: Annotated[str, typer.Option(help=f"Of {', '.join(Drill)}.", metavar="NAME,...")] = ",".join(Drill)
    streams: Annotated[int, counted(help="Requests side by side.", callback=between(1, 256))] = 64
    tokens: Annotated[int, counted(help="Tokens a request.", callback=between(16, 4096))] = 160
    guesses: Annotated[int, counted(help="Guesses a round; 0 leaves it to the gateway.", callback=between(0, 16))] = 4
    before: Annotated[
        float, typer.Option(help="Seconds before it happens, half of which warm up.", callback=between(1, 600))
    ] = 12.0
    after: Annotated[float, typer.Option(help="Seconds after that.", callback=between(2, 600))] = 16.0
    stretch: Annotated[float, typer.Option(help="Devices take so many times as long.", metavar="X")] = 8.0
    save: SaveFile = None


@app.command()
@grouped
def drills(*, wanted: DrillOptions) -> None:
    """Lets services die, hang, leave and come under load, and counts what clients see of it."""
    telemetry.configure_logs("warning")
    names = tuple(dict.fromkeys(wanted.drills.split(",")))
    if not set(names) <= set(Drill):
        raise InvalidRequest("--drills", wanted.drills, f"of {', '.join(Drill)}, with commas between")
    load = AskedLoad(wanted.streams, wanted.tokens, Speculation(draft_count=wanted.guesses or None))

    async def measuring(interrupts: Interrupts) -> None:
        began = datetime.now(UTC)
        with tempfile.TemporaryDirectory(prefix="outrider-drills-") as folder:
            renewed = TARGETS if Drill.ROLLED in names else 0
            async with DrillFleet(TARGETS + 1, DRAFTS, wanted.stretch, Path(folder), renewed) as fleet:
                interrupts.urgent = fleet.kill
                runs = [await drilled(Drill(name), fleet, load, wanted) for name in names]
            async with DrillFleet(1, 0, PLAIN_STRETCH, Path(folder)) as fleet:
                interrupts.urgent = fleet.kill
                fleet.list_all(fleet.names["target"], [])
                async with fleet.gateway(GatewayLog()) as gateway:
                    note("Asking all of it again in plain decoding.")
                    most = max(each.number for run in runs for each in run.answers)
                    plain = await plain_answers(gateway.address, load, most + 1)
        conclude(wanted, runs, plain, began)

    run(measuring)


async def drilled(drill: Drill, fleet: DrillFleet, load: AskedLoad, wanted: DrillOptions) -> DrillRun:
    """One drill, in front of services of which none has been hurt."""
    note(f"{drill.value}.")
    targets, drafts = fleet.names["target"][:TARGETS], fleet.names["draft"]
    log, is_over = GatewayLog(), asyncio.Event()
    async with AsyncExitStack() as exits:
        partition = await exits.enter_async_context(Partition(fleet.services[targets[0]].address))
        replaced = {targets[0]: partition.address} if drill is Drill.CUT_OFF else {}
        fleet.list_all(targets, drafts[:1] if drill is Drill.DRAFTS_JOINED else drafts, replaced)
        gateway = await exits.enter_async_context(fleet.gateway(log))
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(keep_busy(gateway.address, load, drill.value, is_over))
            await asyncio.sleep(wanted.before / 2)
            pids = [os.getpid(), gateway.pid, *(each.pid for each in fleet.services.values())]
            began_s, began_cpu_s = time.perf_counter(), cpu_s(pids)
            await asyncio.sleep(wanted.before / 2)
            at_s, used_s = time.perf_counter(), cpu_s(pids) - began_cpu_s
            happen(drill, fleet, partition)
            if drill is Drill.ROLLED:
                await roll(fleet, at_s, wanted.after)
            sessions = await watched(fleet, at_s, wanted.after, drill)
            is_over.set()
            if drill is Drill.STOPPED:
                fleet.signal(drill.hurt[0], signal.SIGCONT)
            partition.heal()
    await fleet.replace(*drill.hurt)
    cpus = used_s / (at_s - began_s) / (os.cpu_count() or 1)
    before_s, reopened = at_s - began_s, log.reopened
    answers, load_average = asking.result(), os.getloadavg()[0]
    return DrillRun(drill, answers, at_s, before_s, wanted.after, cpus, load_average, reopened, sessions)


def happen(drill: Drill, fleet: DrillFleet, partition: Partition) -> None:
    """Does what the drill is about, at once."""
    targets, drafts = fleet.names["target"], fleet.names["draft"]
    match drill:
        case Drill.KILLED | Drill.DRAFT_KILLED:
            fleet.signal(drill.hurt[0], signal.SIGKILL)
        case Drill.STOPPED:
            fleet.signal(drill.hurt[0], signal.SIGSTOP)
        case Drill.DRAINED:
            fleet.signal(drill.hurt[0], signal.SIGTERM)
        case Drill.CUT_OFF:
            partition.cut()
        case Drill.JOINED:
            fleet.list_all(targets, drafts)
        case Drill.DRAFTS_JOINED:
            fleet.list_all(targets[:TARGETS], drafts)


async def roll(fleet: DrillFleet, at_s: float, after_s: float) -> None:
    """Replaces the targets by those of other weights, one after the other at equal times; the old ones then drain."""
    renewed, drafts, step_s = fleet.names["renewed"], fleet.names["draft"], after_s / TARGETS
    for number, name in enumerate(Drill.ROLLED.hurt, 1):
        fleet.list_all([*renewed[:number], *Drill.ROLLED.hurt[number:]], drafts)
        fleet.signal(name, signal.SIGTERM)
        await asyncio.sleep(max(0.0, at_s + number * step_s - time.perf_counter()))


async def watched(
    fleet: DrillFleet, at_s: float, after_s: float, drill: Drill
) -> list[tuple[float, Mapping[str, float]]]:
    """Waits until so long after it happened; where a target joins, with the sessions of all from time to time."""
    found: list[tuple[float, Mapping[str, float]]] = []
    places = {name: fleet.services[name].launch.further["metrics"] for name in fleet.names["target"]}
    while (left_s := at_s + after_s - time.perf_counter()) > 0:
        if drill is Drill.JOINED:
            samples = await asyncio.gather(*(scrape(place, SESSIONS) for place in places.values()))
            counts = {name: each[0].value for name, each in zip(places, samples, strict=True)}
            found.append((time.perf_counter() - at_s, counts))
        await asyncio.sleep(min(LOOK_S, left_s))
    return found


def conclude(
    wanted: DrillOptions, runs: Sequence[DrillRun], plain: Mapping[int, Sequence[int]], began: datetime
) -> None:
    """Writes every run to the file when there is one, and prints the report."""
    if wanted.save is not None:
        shown = [asdict(each) | {"failed": each.failed, "differing": each.differing(plain)} for each in runs]
        document = {"options": asdict(replace(wanted, save=None)), "runs": shown}
        wanted.save.write_text(json.dumps(provenance() | document), encoding="utf-8")
    guesses = f"{wanted.guesses} guesses a round" if wanted.guesses else "as many guesses as the gateway chooses"
    sys.stdout.write(
        f"## Drills: {TARGETS} targets and {DRAFTS} drafts on SIMULATED devices, with real services and a real gateway"
        f"\n\n{began:%Y-%m-%d %H:%M} UTC, {wanted.streams} streams, {wanted.tokens} tokens a request, {guesses}, "
        f"temperature 0.8, devices {wanted.stretch:g} times as slow; seconds are those of the clock; {machine()}; "
        f"commit {revision() or 'unknown'}.\n\n{report(runs, plain)}\n"
    )
    for each in runs:
        for error in dict.fromkeys(each.failed):
            note(f"{each.drill.value}: {error}")
        if numbers := each.differing(plain):
            note(f"{each.drill.value}: other tokens in requests {numbers}.")


if __name__ == "__main__":
    run_app(app)
