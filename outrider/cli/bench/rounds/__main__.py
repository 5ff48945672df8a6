"""What a round costs and why: floors, the bare engine, empty pings, and requests through real processes, in one run.

Prints a Markdown report, or with `--json` an object; `--save FILE` keeps every sample with the machine, the versions
and the command.
"""

import sys
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.bench.common import (
    ComputeThreads,
    JsonFlag,
    MeasuredModels,
    SaveFile,
    Temperatures,
    machine,
    pair_of,
    parse_temperatures,
    provenance,
    revision,
    run_measurement,
    served,
)
from outrider.cli.bench.rounds.campaign import Campaign
from outrider.cli.bench.rounds.instruments import Instruments
from outrider.cli.bench.rounds.report import render
from outrider.cli.bench.rounds.samples import RoundsPlan
from outrider.cli.bench.rounds.summary import RoundsSummary
from outrider.cli.running import Interrupts, run
from outrider.client import AsyncClient
from outrider.process import telemetry
from outrider.process.options import between, grouped
from outrider.rpc.channels import open_channel

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@grouped
def rounds(
    *,
    tokens: Annotated[int, typer.Option(help="Tokens a request.", metavar="N", callback=between(8, 512))] = 96,
    turns: Annotated[
        int, typer.Option(help="Measured passes over all prompts and settings.", metavar="N", callback=between(1, 1000))
    ] = 5,
    temperatures: Temperatures = "0,0.8",
    quick: Annotated[
        bool, typer.Option("--quick", help="Seconds instead of minutes; the figures mean little.")
    ] = False,
    json: JsonFlag = False,
    save: SaveFile = None,
    models: MeasuredModels,
    cpus: ComputeThreads,
) -> None:
    """Shows what a round costs: floors, the bare engine, empty pings, plain and speculative requests, in one run."""
    telemetry.configure_logs("warning")
    plan = RoundsPlan(pair_of(models, cpus, lookup=False), tokens, turns, parse_temperatures(temperatures))
    plan = plan.quick() if quick else plan

    async def measuring(interrupts: Interrupts) -> None:
        instruments = Instruments(plan)
        async with (
            served(plan.stack, interrupts) as addresses,
            AsyncClient(addresses.gateway) as gateway,
            open_channel(addresses.target) as target,
            open_channel(addresses.draft or "") as draft,
        ):
            measurements = await Campaign(plan, instruments, gateway, target, draft).run()
        summary = RoundsSummary(measurements, instruments.sizes)
        conclude(plan, summary, save, as_json=json)

    run(measuring)


def conclude(plan: RoundsPlan, summary: RoundsSummary, save: Path | None, *, as_json: bool) -> None:
    """Writes the file when there is one, then prints the report, or the figures as JSON without the samples."""
    # A run in which tokens differ ends before it has a document.
    document = provenance() | {
        "plan": asdict(plan),
        "models": {role: asdict(size) for role, size in summary.sizes.items()},
        "tokens_equal": True,
        "machine_was_busy": summary.busy,
    }
    if save is not None:
        save.write_text(dumps(document | {"samples": asdict(summary.measurements)}, indent=1), encoding="utf-8")
    if as_json:
        sys.stdout.write(dumps(document | {"report": render(summary)}) + "\n")
    else:
        stack = plan.stack
        types = stack.dtype if stack.draft_dtype in {None, stack.dtype} else f"{stack.dtype} with {stack.draft_dtype}"
        print(
            f"## {Path(stack.target).name} with {Path(stack.draft or '').name}\n\n"
            f"{types}, {stack.threads} and {stack.draft_threads} threads, {plan.tokens} tokens a request, "
            f"{plan.turns * len(plan.prompts)} requests a setting and temperature, interleaved with every instrument; "
            f"{machine()}; commit {revision() or 'unknown'}. Medians, with quartiles in brackets. "
            f"Tokens were equal in all settings.\n\n{render(summary)}"
        )


if __name__ == "__main__":
    run_measurement(app, "rounds")
