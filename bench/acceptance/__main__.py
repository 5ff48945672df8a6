"""How many draft tokens each rule keeps, also with shorter distributions of the draft, on texts of the target.

    python -m bench.acceptance [--target MODEL --draft MODEL] [--tree N] [--save FILE]

Prints a report in Markdown; `--save FILE` keeps every count with the machine, the
versions and the command. Runs both models in this process: acceptance depends on no clock and no connection.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.acceptance.report import AcceptanceSummary, render
from bench.acceptance.runs import AT_A_TIME, AcceptancePlan, ModelPair, RuleCounts, measure
from bench.acceptance.trees import TreeCounts, measure_trees, render_trees
from gateway.text.tokenizer import Tokenizer
from outrider.cli import options
from outrider.cli.bench.common import (
    OPENINGS,
    SaveFile,
    Temperatures,
    machine,
    parse_temperatures,
    provenance,
    revision,
)
from outrider.cli.local_stack import choose_models
from outrider.cli.running import note
from outrider.drafters.hosted import HostedModel
from outrider.engine.runner import ModelRunner
from outrider.errors import InvalidRequest, ModelRefused
from outrider.model_service.server import load_model
from outrider.model_service.settings import Dtype, ModelServiceSettings, available_cpus
from outrider.process import telemetry
from outrider.process.options import between, refuse_together, run_app, service_app
from target_service.server import load_head

MAX_TEXTS = len(OPENINGS)
MAX_TREE_ROWS = 64


def count(words: str, least: int, most: int, *names: str, metavar: str = "N") -> object:
    """An option with a number in [least, most]."""
    return typer.Option(*names, help=words, metavar=metavar, callback=between(least, most))


app = service_app()


@app.command()
def acceptance(  # noqa: PLR0913, one parameter for each option is how typer declares a command
    *,
    target: options.Target = None,
    draft: options.Draft = None,
    head: Annotated[
        str | None,
        typer.Option(help="Folder of a head of the target, instead of a draft.", metavar="DIR", show_default=False),
    ] = None,
    dtype: options.DtypeOption = None,
    threads: options.Threads = None,
    temperatures: Temperatures = "0,0.7,1",
    draft_count: Annotated[int, count("Draft tokens a round.", 1, 7, metavar="K")] = 5,
    text_len: Annotated[int, count("Tokens of a text.", 8, 512, "--tokens")] = 96,
    stride: Annotated[int, count("Tokens from one round to the next.", 1, 512)] = 2,
    texts: Annotated[int, count("Texts to write.", 2, MAX_TEXTS)] = MAX_TEXTS,
    tree: Annotated[
        list[int] | None,
        typer.Option(
            help="Guesses of a tree, to be compared with a chain of as many under match, instead of the rules; "
            "may be given several times.",
            metavar="N",
            min=1,
            max=MAX_TREE_ROWS,
            show_default=False,
        ),
    ] = None,
    save: SaveFile = None,
) -> None:
    """Shows acceptance and tokens a round of every rule, and what the size of a draft's distribution costs."""
    telemetry.configure_logs("warning")
    refuse_together("--head", head, {"--draft": draft})
    if tree and max(tree) >= text_len:
        raise InvalidRequest("--tree", max(tree), f"less than the {text_len} tokens of a text")
    target_model, draft_model = choose_models(target, draft, no_draft=head is not None)
    plan = AcceptancePlan(parse_temperatures(temperatures), draft_count, text_len, stride)
    prompts = asyncio.run(encoded(target_model, OPENINGS[:texts]))
    tokens = len(plan.rules) * AT_A_TIME * (max(map(len, prompts)) + text_len + 2 * draft_count + 32)
    runner = load(target_model, dtype, threads, tokens)
    if head is None:
        if draft_model is None:
            raise ModelRefused(f"There is no draft for {target_model}; name one with --draft.", model=target_model)
        pair = ModelPair(runner, HostedModel(load(draft_model, dtype, threads, tokens)))
    else:
        drafter = load_head(runner, head, runner.identity.dtype)
        if not isinstance(drafter, HostedModel):
            raise InvalidRequest("--head", head, "a head that does without the target's lower layers")
        pair = ModelPair(runner, drafter)
    if tree:
        trees = measure_trees(pair, plan, prompts, tree, note)
        conclude(pair, plan, trees, render_trees(trees), save)
        return
    summary = AcceptanceSummary(plan, measure(pair, plan, prompts, note))
    conclude(pair, plan, summary.counts, render(summary), save)


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


def conclude(
    pair: ModelPair, plan: AcceptancePlan, counts: Sequence[RuleCounts | TreeCounts], report: str, save: Path | None
) -> None:
    """Writes the file that is wanted, and prints the report."""
    target, draft = pair.target.identity, pair.draft.runner.identity
    if save is not None:
        document = provenance() | {
            "models": {"target": asdict(target), "draft": asdict(draft)},
            "plan": asdict(plan) | {"rules": [each.model_dump() for each in plan.rules]},
            "counts": [asdict(each) for each in counts],
        }
        save.write_text(json.dumps(document, indent=1), encoding="utf-8")
    texts = len({each.prompt for each in counts})
    print(
        f"## {target.model_name} with {draft.model_name}\n\n"
        f"{target.dtype}; target {target.model_hash[:12]}, draft {draft.model_hash[:12]}; {texts} texts of "
        f"{plan.text_len} tokens, {len(plan.places)} rounds in each under every setting; {machine()}; "
        f"commit {revision() or 'unknown'}.\n\n{report}"
    )


if __name__ == "__main__":
    run_app(app)
