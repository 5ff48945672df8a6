"""How many draft tokens each rule keeps, and what truncating a draft's distribution costs, on texts of the target.

    python -m bench.acceptance [--target MODEL --draft MODEL] [--markdown FILE] [--json FILE]

Prints tables; `--markdown FILE` writes them as a report, `--json FILE` keeps every count with the machine, the versions
and the command. Runs both models in this process: acceptance depends on no clock and no connection.
"""

import asyncio
import json as json_format
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from bench.acceptance.report import render, show, tables
from bench.acceptance.runs import AT_A_TIME, AcceptancePlan, ModelPair, measure
from bench.acceptance.summary import AcceptanceSummary
from bench.common import (
    OPENINGS,
    Temperatures,
    choose_pair,
    machine,
    parse_temperatures,
    provenance,
    revision,
    writable,
)
from gateway.text.tokenizer import Tokenizer
from outrider.cli import options
from outrider.cli.running import note
from outrider.engine.runner import ModelRunner
from outrider.model_service.server import load_model
from outrider.model_service.settings import Dtype, ModelServiceSettings, available_cpus
from outrider.process import telemetry
from outrider.process.options import between, run_app, service_app

MAX_TEXTS = len(OPENINGS)

TextLen = Annotated[int, typer.Option("--tokens", help="Tokens of a text.", metavar="N", callback=between(8, 512))]
Stride = Annotated[int, typer.Option(help="Tokens from one round to the next.", metavar="N", callback=between(1, 512))]
Texts = Annotated[int, typer.Option(help="Texts to write.", metavar="N", callback=between(2, MAX_TEXTS))]
DraftCount = Annotated[int, typer.Option(help="Draft tokens a round.", metavar="K", callback=between(1, 7))]
Markdown = Annotated[
    Path | None,
    typer.Option(help="File for the report.", metavar="FILE", show_default=False, callback=writable("--markdown")),
]
Json = Annotated[
    Path | None,
    typer.Option(help="File for all samples.", metavar="FILE", show_default=False, callback=writable("--json")),
]

app = service_app()


@app.command()
def acceptance(  # noqa: PLR0913, one parameter for each option is how typer declares a command
    *,
    target: options.Target = None,
    draft: options.Draft = None,
    dtype: options.DtypeOption = None,
    threads: options.Threads = None,
    temperatures: Temperatures = "0,0.7,1",
    draft_count: DraftCount = 5,
    text_len: TextLen = 96,
    stride: Stride = 2,
    texts: Texts = MAX_TEXTS,
    markdown: Markdown = None,
    json: Json = None,
) -> None:
    """Shows acceptance and tokens a round of every rule, and what the size of a draft's distribution costs."""
    telemetry.configure_logs("warning")
    target_model, draft_model = choose_pair(target, draft)
    plan = AcceptancePlan(parse_temperatures(temperatures), draft_count, text_len, stride)
    prompts = asyncio.run(encoded(target_model, OPENINGS[:texts]))
    tokens = AT_A_TIME * (max(map(len, prompts)) + text_len + 2 * draft_count + 32)
    pair = ModelPair(*(load(name, dtype, threads, tokens) for name in (target_model, draft_model)))
    conclude(pair, AcceptanceSummary(plan, measure(pair, plan, prompts, note)), markdown, json)


def load(model: str, dtype: Dtype | None, threads: int | None, kv_tokens: int) -> ModelRunner:
    """A model as a service loads it. Raises ModelRefused and InvalidRequest."""
    wanted = dtype or Dtype.BFLOAT16
    settings = ModelServiceSettings(model, dtype=wanted, threads=threads or available_cpus(), kv_tokens=kv_tokens)
    runner = load_model(settings).runner
    torch.set_num_threads(runner.torch_threads)
    return runner


async def encoded(model: str, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids as the gateway makes them."""
    tokenizer = Tokenizer(model)
    return [list(await tokenizer.encode(prompt)) for prompt in prompts]


def conclude(pair: ModelPair, summary: AcceptanceSummary, markdown: Path | None, json: Path | None) -> None:
    """Writes the files that are wanted, and prints the tables."""
    figures = tables(summary)
    if json is not None:
        plan = summary.plan
        document = provenance() | {
            "models": {"target": asdict(pair.target.identity), "draft": asdict(pair.draft.identity)},
            "plan": asdict(plan) | {"rules": [each.model_dump() for each in plan.rules]},
            "counts": asdict(summary.counts),
        }
        json.write_text(json_format.dumps(document, indent=1), encoding="utf-8")
    if markdown is not None:
        markdown.write_text(f"{heading(pair, summary)}\n\n{render(figures)}\n", encoding="utf-8")
    show(figures, Console())


def heading(pair: ModelPair, summary: AcceptanceSummary) -> str:
    """What was measured, and where."""
    plan, target, draft = summary.plan, pair.target.identity, pair.draft.identity
    texts = len({each.prompt for each in summary.counts.tallies})
    return (
        f"## {target.model_name} with {draft.model_name}\n\n"
        f"{target.dtype}; target {target.model_hash[:12]}, draft {draft.model_hash[:12]}; {texts} texts of "
        f"{plan.text_len} tokens, {len(plan.places)} rounds in each under every setting; {machine()}; "
        f"commit {revision() or 'unknown'}."
    )


if __name__ == "__main__":
    run_app(app)
