"""What the prefix cache saves: the time to the first token of a new prompt, of the same again, and of one turn more.

    python -m bench.prefix [--target MODEL] [--tokens 2000] [--turns 5]

Serves the target in this process, with the cache and without by turns, and asks it over its own stream, as a gateway
does. Compares tokens, and prints medians in milliseconds.
"""

import asyncio
import random
import time
from dataclasses import replace
from statistics import median
from typing import Annotated

import typer

from bench.common import TokensDiffer, machine, revision, spec_of
from bench.streams import BareTargetStream
from outrider.cli import options
from outrider.cli.local_stack import choose_models
from outrider.model_service.server import load_model_aside
from outrider.model_service.settings import Dtype, ModelServiceSettings, available_cpus
from outrider.process import telemetry
from outrider.process.options import between, run_app, service_app
from outrider.rpc.channels import open_channel
from target_service.server import start_with

NEW_TOKENS = 20

PromptLen = Annotated[int, typer.Option("--tokens", help="Tokens of a prompt.", metavar="N", callback=between(32))]
Turns = Annotated[int, typer.Option(help="How often.", metavar="N", callback=between(1))]

app = service_app()


@app.command()
def prefix(
    *,
    target: options.Target = None,
    dtype: options.DtypeOption = None,
    threads: options.Threads = None,
    tokens: PromptLen = 2000,
    turns: Turns = 5,
) -> None:
    """Shows the time to the first token of prompts that were asked before, with the prefix cache and without."""
    telemetry.configure_logs("warning")
    model = choose_models(target, None, no_draft=True)[0]
    settings = ModelServiceSettings(
        model, dtype=dtype or Dtype.BFLOAT16, threads=threads or available_cpus(), kv_tokens=4 * tokens
    )
    for name, times_ms in asyncio.run(measure(settings, tokens, turns)).items():
        print(f"{name:>32}: {median(times_ms):8.1f} ms")
    print(f"Medians of {turns}; {tokens} tokens a prompt; {settings.dtype}, {settings.threads} threads.")
    print(f"{machine()}; commit {revision() or 'unknown'}.")


async def measure(settings: ModelServiceSettings, num_tokens: int, turns: int) -> dict[str, list[float]]:
    """Milliseconds to the first token by what was asked; raises TokensDiffer, PromptTooLong and the like."""
    model = await load_model_aside(settings)
    ids, dice = range(1, model.runner.vocabulary_size), random.Random(1)
    found: dict[str, list[float]] = {}
    for _ in range(turns):
        prompt = dice.choices(ids, k=num_tokens)
        asked = {"new": prompt, "again": prompt, "one turn more": [*prompt, *dice.choices(ids, k=NEW_TOKENS)]}
        said: set[tuple[int, ...]] = set()
        for has_cache in (False, True):
            running = await start_with(model, replace(settings, prefix_cache=has_cache))
            async with open_channel(running.address) as channel:
                answers = [
                    (name, *await first_token(BareTargetStream(channel, spec_of(each, 0, 0.0, 1))))
                    for name, each in asked.items()
                ]
            await running.stop(0)
            for name, _, passed_ms in answers:
                found.setdefault(f"{name}, {'with' if has_cache else 'without'} cache", []).append(passed_ms)
            said.add(tuple(token_id for _, token_id, _ in answers))
        if len(said) > 1:
            raise TokensDiffer(f"the first tokens are {' or '.join(map(str, said))}")
    return found


async def first_token(stream: BareTargetStream) -> tuple[int, float]:
    """The token, and the milliseconds from the message that opens the session to the one that brings it."""
    started = time.perf_counter()
    token_id = await stream.open()
    passed_ms = (time.perf_counter() - started) * 1e3
    await stream.end()
    return token_id, passed_ms


if __name__ == "__main__":
    run_app(app)
