"""`outrider bench serve`: what a gateway gives to many streams at a time, with and without speculation by turns.

Prints a table, or one JSON object with the names of `vllm bench serve`; `--save FILE` keeps every request. Asks nothing
itself: `load` asks, `load_figures` computes, `load_report` renders. Never imports torch.
"""

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime

from bench import machine
from bench.load import Block, LoadPlan, run
from bench.load_figures import equal_answers, figures
from bench.load_report import tell
from bench.progress import steps
from bench.stack import served, stack_of
from outrider.cli import options
from outrider.cli.bench import Cpus, Load, Settings, check_load
from outrider.cli.local_stack import Stack
from outrider.cli.options import SHARED_OPTIONS, parse_draft_count
from outrider.cli.running import Interrupts, Work
from outrider.cli.running import run as run_work
from outrider.errors import OutriderError
from outrider.process import logs
from outrider.process.options import grouped, run_app, service_app

NAMES = {True: "speculative", False: "plain"}

app = service_app()


class NothingAnswered(OutriderError):
    """Every request failed; the first failure says why."""

    status = "UNAVAILABLE"
    reason = "NOTHING_ANSWERED"
    exit_code = 69


@app.command()
@grouped
def serve(*, load: Load, models: options.Models, cpus: Cpus) -> None:
    """Asks a gateway from many streams at a time, with and without speculation by turns: speed and latencies."""
    logs.configure("warning")
    check_load(load, models, cpus)
    stack = (
        None if load.address is not None else stack_of(models, cpus, needs_draft=load.speculation is not Settings.OFF)
    )
    run_work(measuring(load, plan_of(load), stack), options={**SHARED_OPTIONS, "max_tokens": "--tokens"})


def plan_of(load: Load) -> LoadPlan:
    """The run that the options ask for."""
    return LoadPlan(
        requests=load.requests,
        streams=load.streams,
        tokens=load.tokens,
        turns=load.turns,
        temperature=load.temperature,
        seed=load.seed,
        draft_count=parse_draft_count(load.draft_count),
        settings={Settings.BOTH: (True, False), Settings.ON: (True,), Settings.OFF: (False,)}[load.speculation],
    )


def measuring(load: Load, plan: LoadPlan, stack: Stack | None) -> Work:
    """The work of the command."""

    async def work(interrupts: Interrupts) -> None:
        async with gateway(load.address, stack, interrupts) as address:
            with steps(plan.requests * len(plan.settings)) as progress:

                def begun(setting: bool) -> None:
                    progress.say(f"Asking {'with' if setting else 'without'} speculation")

                blocks = await run(address, plan, begun, progress.done)
        conclude(document(address, plan, blocks), blocks, load)

    return work


@asynccontextmanager
async def gateway(address: str | None, stack: Stack | None, interrupts: Interrupts) -> AsyncIterator[str]:
    """The gateway to ask: the one that was named, or one that lives as long as this."""
    if address is not None or stack is None:
        yield address or ""
        return
    async with served(stack, interrupts) as addresses:
        yield addresses.gateway


def document(address: str, plan: LoadPlan, blocks: list[Block]) -> dict[str, object]:
    """The result: where it comes from, then one object with vLLM's names for each setting."""
    by_setting = {
        NAMES[setting]: figures([each for each in blocks if each.speculative is setting], plan.streams)
        for setting in plan.settings
    }
    told: dict[str, object] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "backend": "outrider",
        "address": address,
        "machine": machine.describe(),
        "versions": machine.versions(),
        "plan": asdict(plan),
        **by_setting,
    }
    if len(by_setting) == len(NAMES):
        equal, compared = equal_answers(blocks)
        told |= {"equal_answers": equal, "compared_answers": compared}
    return told


def conclude(told: dict[str, object], blocks: list[Block], load: Load) -> None:
    """Writes the file that is wanted, and prints the result. Raises NothingAnswered."""
    asked = [each for block in blocks for each in block.requests]
    if all(each.error for each in asked):
        raise NothingAnswered(f"All {len(asked)} requests failed, the first of them: {asked[0].error}")
    if load.save is not None:
        kept = told | {"blocks": [asdict(block) for block in blocks]}
        load.save.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    if load.json:
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        tell(told, sys.stdout)


if __name__ == "__main__":
    run_app(app, prefix="outrider: ")
