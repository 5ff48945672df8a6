"""`python -m bench.pair`: what run-ahead is worth over a network, with real services.

Pairs are simulated, of devices that only wait as long as real ones would take, or compute on a core each. No figure is
shown if any answer is not plain decoding's, token for token.
"""

import json
import sys
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import typer

from bench.pair.campaign import PairRun, cores, measure
from bench.pair.devices import COMPUTING, PRESETS, models_of
from bench.pair.report import render
from bench.pair.settings import PairPlan, SettingKind, settings_of
from outrider.cli.bench.common import AUTO, SaveFile, machine, parse_numbers, provenance, revision
from outrider.cli.options import SHARED_OPTIONS
from outrider.cli.running import Interrupts, run
from outrider.errors import InvalidRequest
from outrider.process import telemetry
from outrider.process.options import between, grouped, run_app, service_app
from outrider.rpc.messages.tree import MAX_BRANCHES

app = service_app()

counted = partial(typer.Option, metavar="N")
listed = partial(typer.Option, metavar="N,...")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """Options: the grid, how often, and where the figures go."""

    pairs: Annotated[
        str,
        listed(
            help=f"Simulated targets with a draft of 1B, {', '.join(PRESETS)}, and sized:200m that computes, with the "
            f"embedded draft or one of a twentieth of its weights, {', '.join(COMPUTING)}.",
            metavar="NAME,...",
        ),
    ] = "8b,70b"
    delays: Annotated[
        str, listed(help="Milliseconds that a way to or from a service takes longer.", metavar="MS,...")
    ] = "0,0.25,1,5"
    streams: Annotated[str, listed(help="Numbers of requests side by side.")] = "1,4,16,64"
    settings: Annotated[str, listed(help=f"Ways to serve a pair: {', '.join(SettingKind)}.", metavar="NAME,...")] = (
        ",".join(SettingKind)
    )
    draft_counts: Annotated[
        str,
        listed(help="Guesses a round, of each way but plain; auto is the gateway's choice.", metavar="N|auto,..."),
    ] = "2,3,5,7"
    branches: Annotated[str, listed(help="Branches of run-ahead.")] = "32"
    temperature: Annotated[
        float, typer.Option(help="Temperature of the requests.", metavar="X", callback=between(0, 2))
    ] = 0.0
    tokens: Annotated[int, counted(help="Tokens a request.", callback=between(16, 4096))] = 96
    requests: Annotated[
        int, counted(help="Requests of a stream in a block, which has at least 8.", callback=between(2, 1000))
    ] = 2
    turns: Annotated[int, counted(help="Passes over the grid.", callback=between(1, 1000))] = 3
    stretch_per_stream: Annotated[
        float,
        typer.Option(
            help="All devices and ways take longer by so many times the streams, but never shorter, and figures are "
            "divided by that again, so that this host is not what is measured.",
            metavar="X",
            callback=between(0, 100),
        ),
    ] = 0.25
    save: SaveFile = None


@app.command()
@grouped
def pair(*, wanted: PairOptions) -> None:
    """Compares run-ahead with plain, remote and hosted drafting, by network delay and streams."""
    telemetry.configure_logs("warning")
    plan = plan_of(wanted)

    async def measuring(interrupts: Interrupts) -> None:
        conclude(plan, wanted, *await measure(plan, interrupts))

    run(measuring, options={**SHARED_OPTIONS, "max_tokens": "--tokens"})


def plan_of(wanted: PairOptions) -> PairPlan:
    """The grid that the options describe. Raises InvalidRequest."""
    kinds = dict.fromkeys(wanted.settings.split(","))
    if not kinds.keys() <= set(SettingKind) or SettingKind.PLAIN not in kinds:
        names = ", ".join(SettingKind)
        limit = f"of {names} with commas between, and {SettingKind.PLAIN} among them, which all are compared with"
        raise InvalidRequest("--settings", wanted.settings, limit)
    fixed = [each for each in wanted.draft_counts.split(",") if each != AUTO]
    counts: list[int | None] = [*parse_numbers("--draft-counts", ",".join(fixed), int, 1, 16)] if fixed else []
    if AUTO in wanted.draft_counts.split(","):
        counts.append(None)
    branches = parse_numbers("--branches", wanted.branches, int, 1, MAX_BRANCHES)
    plan = PairPlan(
        pairs=tuple(dict.fromkeys(wanted.pairs.split(","))),
        delays_ms=parse_numbers("--delays", wanted.delays, float, 0, 1000),
        streams=parse_numbers("--streams", wanted.streams, int, 1, 256),
        settings=tuple(settings_of(map(SettingKind, kinds), counts, branches)),
        tokens=wanted.tokens,
        requests=wanted.requests,
        turns=wanted.turns,
        temperature=wanted.temperature,
        stretch_per_stream=wanted.stretch_per_stream,
    )
    for name in plan.pairs:
        models_of(name, 1.0)
        if name in COMPUTING:
            cores()
    return plan


def conclude(plan: PairPlan, wanted: PairOptions, runs: list[PairRun], others: list[str]) -> None:
    """Writes every block to the file when there is one, and prints the report, with what `others` did meanwhile."""
    simulated = [name for name in plan.pairs if name not in COMPUTING]
    if wanted.save is not None:
        document = {"simulated": simulated, "plan": asdict(plan), "runs": [asdict(each) for each in runs]}
        wanted.save.write_text(json.dumps(provenance() | document), encoding="utf-8")
    said = f"{', '.join(simulated)} SIMULATED" if simulated else "Nothing simulated"
    host = ", where ".join(filter(None, (machine(), " and then ".join(others))))
    sys.stdout.write(
        f"## {said}: what run-ahead is worth\n\n{plan.tokens} tokens a request, temperature {plan.temperature:g}, "
        f"{plan.turns} turns, settings interleaved; {host}; commit {revision() or 'unknown'}.\n\n"
        f"{render(plan, runs)}\n"
    )


if __name__ == "__main__":
    run_app(app)
