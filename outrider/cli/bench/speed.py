"""`outrider bench speed`: how fast a model reads a prompt and answers, with and without speculation, in five lines.

Every request has a prompt that none had before, so that no memory of answers and no cache helps. The two settings take
turns, and the other one begins every other time. Two answers are asked for again without speculation, and compared.
"""

import asyncio
import json
import secrets
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from outrider.cli import options
from outrider.cli.bench.common import (
    ComputeThreads,
    JsonFlag,
    MeasuredModels,
    Spread,
    TokensDiffer,
    check_asked,
    fresh_prompt,
    interval,
    machine,
    provenance,
    run_measurement,
    served,
    spread,
    stack_of,
)
from outrider.cli.model_facts import ModelFacts, model_facts
from outrider.cli.running import Interrupts, run
from outrider.client import AsyncClient, Result, Speculation
from outrider.errors import OutriderError
from outrider.process import telemetry
from outrider.process.options import between, grouped

# Openings of a prompt, about 430 tokens of the embedded tokenizer.
OPENINGS = 16
CHECKED = 2
LEAST_PAIRS, MOST_PAIRS, LEAST_TOKENS = 2, 1000, 8

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedOptions:
    """Options: whom to ask, how often, and for how much."""

    address: Annotated[
        str | None, typer.Option(help="Gateway to ask. Default: a stack of its own.", metavar="HOST:PORT")
    ] = None
    prompts: Annotated[
        int,
        typer.Option(help="Prompts of each setting.", metavar="N", callback=between(LEAST_PAIRS, MOST_PAIRS)),
    ] = 8
    tokens: Annotated[
        int,
        typer.Option(help="Tokens of each answer.", metavar="N", callback=between(LEAST_TOKENS, options.INT32_MAX)),
    ] = 128
    temperature: Annotated[
        float, typer.Option(help="Temperature of the requests.", metavar="X", callback=between(0, 100))
    ] = 0.0
    json: JsonFlag = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedSample:
    """One answer, as its client saw it."""

    prompt: int
    speculates: bool
    prompt_tokens: int
    first_s: float
    """Seconds to the first tokens: those of reading the prompt, and of one step."""
    tokens_per_s: float
    """Rate of the tokens after the first ones."""
    draft_tokens: int
    accepted_tokens: int
    token_ids: tuple[int, ...]


@app.command()
@grouped
def speed(
    *,
    wanted: SpeedOptions,
    models: MeasuredModels,
    cpus: ComputeThreads,
    hosted: options.HostedOptions,
    connection: options.ConnectionOptions,
) -> None:
    """Measures how fast a model reads prompts and answers, with and without speculation, one request at a time."""
    telemetry.configure_logs("warning")
    tls = connection.tls(wanted.address)
    stack = None
    if wanted.address is None:
        stack = stack_of(models, cpus, hosted)
    else:
        check_asked(wanted.address, models, cpus, hosted)

    async def measuring(interrupts: Interrupts) -> None:
        async with AsyncExitStack() as exits:
            address, facts = wanted.address or "", None
            if stack is not None:
                addresses = await exits.enter_async_context(served(stack, interrupts))
                address, facts = addresses.gateway, await model_facts(addresses.target)
            client = await exits.enter_async_context(AsyncClient(address, api_key=connection.api_key, tls=tls))
            samples = await measure(client, wanted)
        conclude(wanted, samples, facts)

    run(measuring, options={**options.SHARED_OPTIONS, "max_tokens": "--tokens"})


async def measure(client: AsyncClient, wanted: SpeedOptions) -> list[SpeedSample]:
    """All samples, in the order in which they were measured, after a pair that is not. Raises TokensDiffer."""
    samples = []
    for pair in range(wanted.prompts + 1):
        for place in range(2):
            sample = await ask(client, wanted, prompt=2 * pair + place, speculates=(pair + place) % 2 == 1)
            samples += [sample] if pair else []
    for sample in [each for each in samples if each.speculates][:CHECKED]:
        plain = await ask(client, wanted, prompt=sample.prompt, speculates=False)
        if plain.token_ids != sample.token_ids:
            message = f"Prompt {sample.prompt} has other tokens with speculation; under match on a CPU it must not."
            raise TokensDiffer(message, prompt=sample.prompt)
    return samples


async def ask(client: AsyncClient, wanted: SpeedOptions, *, prompt: int, speculates: bool) -> SpeedSample:
    """Asks one request, and takes the time. Raises the OutriderError that was answered."""
    text = " ".join(fresh_prompt(prompt * OPENINGS + part) for part in range(OPENINGS))
    clock = asyncio.get_running_loop().time
    bursts: list[tuple[float, Sequence[int]]] = []
    result, started_s = None, clock()
    stream = client.generate(
        text,
        max_tokens=wanted.tokens,
        ignore_eos=True,
        seed=prompt,
        temperature=wanted.temperature,
        cache_salt=secrets.token_hex(8),
        speculation=Speculation(enabled=speculates),
    )
    async with stream:
        async for event in stream:
            if isinstance(event, Result):
                result = event
            elif event.tokens:
                bursts.append((clock(), [token.token_id for token in event.tokens]))
    if result is None or not bursts:
        raise OutriderError("An answer came without tokens or without its result.")
    (first_s, first), (last_s, _) = bursts[0], bursts[-1]
    token_ids = tuple(token_id for _, each in bursts for token_id in each)
    return SpeedSample(
        prompt=prompt,
        speculates=speculates,
        prompt_tokens=result.prompt_tokens,
        first_s=first_s - started_s,
        # Where everything came at once there is no time between.
        tokens_per_s=(len(token_ids) - len(first)) / max(last_s - first_s, 1e-6),
        draft_tokens=result.speculation.draft_tokens,
        accepted_tokens=result.speculation.accepted_tokens,
        token_ids=token_ids,
    )


def conclude(wanted: SpeedOptions, samples: Sequence[SpeedSample], facts: ModelFacts | None) -> None:
    """Prints the five lines, or the samples and the same figures as JSON."""
    plain, fast = ([each for each in samples if each.speculates is speculates] for speculates in (False, True))
    reading = spread(each.prompt_tokens / each.first_s for each in plain)
    rates = [spread(each.tokens_per_s for each in found) for found in (plain, fast)]
    ratio = interval(two.tokens_per_s / one.tokens_per_s for one, two in zip(plain, fast, strict=True))
    drafted = sum(each.draft_tokens for each in fast)
    kept = sum(each.accepted_tokens for each in fast) / drafted if drafted else None
    if wanted.json:
        figures: dict[str, Spread | float | None] = {
            "prompt_tokens_per_s": reading,
            "plain_tokens_per_s": rates[0],
            "speculative_tokens_per_s": rates[1],
            "over_plain": ratio,
            "kept": kept,
        }
        shown = {name: asdict(each) if isinstance(each, Spread) else each for name, each in figures.items()}
        models = None if facts is None else asdict(facts)
        document = provenance() | {"model": models, "figures": shown, "samples": [asdict(each) for each in samples]}
        sys.stdout.write(json.dumps(document) + "\n")
        return
    served_by = f"a gateway on {wanted.address}" if facts is None else f"{facts.model} in {facts.dtype}"
    lengths = spread(each.prompt_tokens for each in samples)
    guesses = "no guesses" if kept is None else f"{kept:.0%} of guesses kept"
    lines = (
        f"{served_by}, {machine()}: {wanted.prompts} prompts each, medians and quartiles",
        f"prompt:              {reading.show(',.0f')} tokens/s, of {lengths.median:.0f} tokens",
        f"answer, plain:       {rates[0].show(',.1f')} tokens/s",
        f"answer, speculative: {rates[1].show(',.1f')} tokens/s, {guesses}",
        f"speculation:         {ratio.show('.2f')} times as fast (interval of 95 %), the same tokens where asked again",
    )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    run_measurement(app, "speed")
