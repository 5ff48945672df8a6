"""What a round costs and why: floors, the bare engine, empty pings, and requests through real processes, in one run.

Prints a Markdown report, or with `--json` an object; `--save FILE` keeps every sample with the machine, the versions
and the command. Measures nothing itself: `campaign` measures, `summary` computes, `report` renders.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from bench import machine
from bench.campaign import Campaign, channels_to
from bench.instruments import Instruments
from bench.plan import Plan
from bench.report import render
from bench.samples import DRAFT, TARGET
from bench.stack import served, stack_of
from bench.summary import Summary
from bench.verdicts import verdicts
from outrider.cli import options
from outrider.cli.bench import Cpus, RoundsRun, parse_temperatures
from outrider.cli.running import Interrupts, Work, run
from outrider.process import logs
from outrider.process.options import grouped, run_app, service_app

app = service_app()


@app.command()
@grouped
def rounds(*, measured: RoundsRun, models: options.Models, cpus: Cpus) -> None:
    """Shows what a round costs: floors, the bare engine, empty pings, plain and speculative requests, in one run."""
    logs.configure("warning")
    plan = Plan(stack_of(models, cpus), measured.tokens, measured.turns, parse_temperatures(measured.temperatures))
    run(measuring(plan.quick() if measured.quick else plan, measured))


def measuring(plan: Plan, measured: RoundsRun) -> Work:
    """The work of the command: loads the pair, starts the stack, measures, prints."""

    async def work(interrupts: Interrupts) -> None:
        instruments = Instruments(plan)
        async with served(plan.stack, interrupts) as addresses, channels_to(addresses) as channels:
            measurements = await Campaign(plan, instruments, channels).run()
        summary = Summary(measurements, instruments.shapes[TARGET], instruments.shapes[DRAFT])
        tell(plan, summary, measured)

    return work


def tell(plan: Plan, summary: Summary, measured: RoundsRun) -> None:
    """Writes the file when there is one, then prints the report, or the figures as JSON without the samples."""
    told = document(plan, summary)
    if measured.save is not None:
        samples = {"samples": asdict(summary.measurements)}
        measured.save.write_text(json.dumps(told | samples, indent=1), encoding="utf-8")
    if measured.json:
        sys.stdout.write(json.dumps(told | {"report": render(summary)}) + "\n")
    else:
        print(f"{heading(plan)}\n\n{render(summary)}")


def heading(plan: Plan) -> str:
    """What was measured, where and how often."""
    stack = plan.stack
    requests = plan.turns * len(plan.prompts)
    types = stack.dtype if stack.draft_dtype in {None, stack.dtype} else f"{stack.dtype} with {stack.draft_dtype}"
    return (
        f"## {Path(stack.target).name} with {Path(stack.draft or '').name}\n\n"
        f"{types}, {stack.threads} and {stack.draft_threads} threads, {plan.tokens} tokens a request, {requests} "
        f"requests a setting and temperature, interleaved with every instrument; {machine.describe()}; "
        f"commit {machine.revision() or 'unknown'}. Medians, with quartiles in brackets. "
        "Tokens were equal in all settings."
    )


def document(plan: Plan, summary: Summary) -> dict[str, object]:
    """Where the samples come from, and what they were held against.

    A run in which tokens differ ends before it has a document.
    """
    return {
        "command": machine.command(),
        "machine": machine.describe(),
        "versions": machine.versions(),
        "revision": machine.revision(),
        "plan": asdict(plan),
        "models": {role: asdict(shape) for role, shape in summary.shapes.items()},
        "tokens_equal": True,
        "machine_was_busy": summary.busy,
        "verdicts": [{**asdict(each), "met": each.met} for each in verdicts(summary)],
    }


if __name__ == "__main__":
    run_app(app)
