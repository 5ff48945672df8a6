"""What a round costs and why: floors, the bare engine, empty pings, and requests through real processes, in one run.

Prints a Markdown report; `--json FILE` keeps every sample with the machine, the versions and the command. Measures
nothing itself: `campaign` measures, `summary` computes, `report` renders. `outrider bench rounds` starts it.
"""

import json as json_format
from dataclasses import asdict
from pathlib import Path

from bench import machine
from bench.campaign import Campaign, channels_to
from bench.instruments import Instruments
from bench.plan import Plan
from bench.report import render
from bench.samples import DRAFT, TARGET
from bench.stack import choose_pair, served
from bench.summary import Summary
from bench.verdicts import verdicts
from outrider import logs
from outrider.cli import options
from outrider.cli.bench import JsonFile, Quick, Temperatures, Tokens, Turns, parse_temperatures
from outrider.cli.running import Interrupts, Work, run
from outrider.cli.stack import Stack
from outrider.command_line import run_app, service_app
from outrider.model_service_flags import Dtype, available_cpus

app = service_app()


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
    logs.configure("warning")
    target_model, draft_model = choose_pair(target, draft)
    stack = Stack(
        target=target_model,
        draft=draft_model,
        dtype=(dtype or Dtype.BFLOAT16).value,
        threads=threads or available_cpus(),
        draft_threads=draft_threads,
    )
    plan = Plan(stack, tokens, turns, parse_temperatures(temperatures))
    run(measuring(plan.quick() if quick else plan, json))


def measuring(plan: Plan, file: Path | None) -> Work:
    """The work of the command: loads the pair, starts the stack, measures, prints."""

    async def work(interrupts: Interrupts) -> None:
        instruments = Instruments(plan)
        async with served(plan.stack, interrupts) as addresses, channels_to(addresses) as channels:
            measurements = await Campaign(plan, instruments, channels).run()
        summary = Summary(measurements, instruments.shapes[TARGET], instruments.shapes[DRAFT])
        tell(plan, summary, file)

    return work


def tell(plan: Plan, summary: Summary, file: Path | None) -> None:
    """Writes the file when there is one, then prints the report."""
    if file is not None:
        file.write_text(json_format.dumps(document(plan, summary), indent=1), encoding="utf-8")
    print(f"{heading(plan)}\n\n{render(summary)}")


def heading(plan: Plan) -> str:
    """What was measured, where and how often."""
    stack = plan.stack
    requests = plan.turns * len(plan.prompts)
    return (
        f"## {Path(stack.target).name} with {Path(stack.draft or '').name}\n\n"
        f"{stack.dtype}, {stack.threads} and {stack.draft_threads} threads, {plan.tokens} tokens a request, {requests} "
        f"requests a setting and temperature, interleaved with every instrument; {machine.describe()}; "
        f"commit {machine.revision() or 'unknown'}. Medians, with quartiles in brackets. "
        "Tokens were equal in all settings."
    )


def document(plan: Plan, summary: Summary) -> dict[str, object]:
    """Where the samples come from, the samples, and what they were held against.

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
        "samples": asdict(summary.measurements),
    }


if __name__ == "__main__":
    run_app(app)
