"""Whether a cached prefix shows one API key what another has asked: the time to the first token. No gate.

    python -m bench.keys [--turns 40] [--prompt-tokens 2000] [--target ...] [--draft ...]

A stack lets two keys in. A turn has two prompts that were never asked before, one with a `cache_salt` and one without.
The first key asks both; then it asks again, and the second key asks for each of them as the first one did, in another
order each turn. The key that finds the prompt in a cache has its first token sooner, and learns how many tokens were
found.
"""

import asyncio
import hashlib
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from bench.common import (
    ComputeThreads,
    MeasuredModels,
    interval,
    machine,
    markdown,
    revision,
    rotated,
    run_measurement,
    served,
    spread,
    stack_of,
)
from outrider.cli.model_facts import model_facts
from outrider.cli.options import SHARED_OPTIONS
from outrider.cli.running import Interrupts, note, run
from outrider.client import AsyncClient, GenerationOptions, Round
from outrider.process import telemetry
from outrider.process.options import between, grouped

KEYS = {"alice": "sk-alice-of-a-measurement", "bob": "sk-bob-of-a-measurement"}
SALT = "a salt that both keys send"
REQUESTS = NEW, AGAIN, OTHER, SALTED = (
    "new",
    "the same key again",
    "another key",
    "another key, the same cache_salt",
)
# Ids that every model has, and that mean nothing special.
TOKEN_IDS = range(100, 1000)
ANSWER_TOKENS = 4
POLL_S = 0.005

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyOptions:
    """Options: what is asked for, and how often."""

    turns: Annotated[int, typer.Option(help="Turns of four requests.", metavar="N", callback=between(1, 1000))] = 40
    prompt_tokens: Annotated[
        int, typer.Option(help="Tokens of a prompt.", metavar="N", callback=between(64, 100_000))
    ] = 2000


@dataclass(frozen=True, slots=True)
class Found:
    """Findings of one request: milliseconds to its first token, and how much of its prompt was in the cache."""

    first_ms: float
    cached_tokens: int


async def ask(client: AsyncClient, services: Sequence[str], prompt: Sequence[int], salt: str) -> Found:
    """Asks, and waits until no service has the session any more: what it cached is there for the next one then."""
    started_s, first_ms, cached_tokens = time.perf_counter(), 0.0, 0
    wanted = GenerationOptions(max_tokens=ANSWER_TOKENS, seed=1, temperature=0.0, ignore_eos=True, cache_salt=salt)
    async with client.generate(prompt, **wanted) as stream:
        async for event in stream:
            if isinstance(event, Round):
                first_ms = first_ms or 1e3 * (time.perf_counter() - started_s)
            else:
                cached_tokens = event.cached_prompt_tokens
    # A service reports their number only when it is asked.
    while any([(await model_facts(service)).sessions for service in services]):  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    return Found(first_ms, cached_tokens)


async def measure(
    clients: Mapping[str, AsyncClient], services: Sequence[str], turns: int, prompt_tokens: int
) -> dict[str, list[Found]]:
    """Findings of each kind of request, turn by turn; `services` are the addresses of target and draft."""
    found: defaultdict[str, list[Found]] = defaultdict(list)
    generator = random.Random(0)
    alice, bob = clients.values()
    for turn in range(turns + 1):
        note(f"Turn {turn} of {turns}{'' if turn else ', to warm up'}.")
        plain, salted = (generator.choices(TOKEN_IDS, k=prompt_tokens) for _ in range(2))
        await ask(alice, services, salted, SALT)
        said = {NEW: await ask(alice, services, plain, "")}
        asked = {AGAIN: (alice, plain, ""), OTHER: (bob, plain, ""), SALTED: (bob, salted, SALT)}
        for name in rotated(tuple(asked), turn):
            client, prompt, salt = asked[name]
            said[name] = await ask(client, services, prompt, salt)
        for name, each in said.items() if turn else ():
            found[name].append(each)
    return found


def render(found: Mapping[str, Sequence[Found]]) -> str:
    """Medians with quartiles, ratios to the new request of the same turn with their intervals, and cached tokens."""
    rows = []
    for name in REQUESTS:
        ratios = (each.first_ms / new.first_ms for each, new in zip(found[name], found[NEW], strict=True))
        cached = [each.cached_tokens for each in found[name]]
        first = spread(each.first_ms for each in found[name])
        rows.append([name, first.show(".1f"), interval(ratios).show(".3f"), f"{min(cached):,} to {max(cached):,}"])
    return markdown(["request", "first token, ms (quartiles)", "over new (95 %)", "cached tokens"], rows)


@app.command()
@grouped
def keys(*, wanted: KeyOptions, models: MeasuredModels, cpus: ComputeThreads) -> None:
    """Compares the first token of a prompt that is new with that of one which the same or another key asked before."""
    telemetry.configure_logs("warning")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "keys.toml")
        hashes = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
        path.write_text("".join(f'[{name}]\nsha256 = "{digest}"\n' for name, digest in hashes.items()))
        stack = replace(stack_of(models, cpus), prefix_cache=True, api_keys=str(path))

        async def measuring(interrupts: Interrupts) -> None:
            async with AsyncExitStack() as exits:
                addresses = await exits.enter_async_context(served(stack, interrupts))
                clients = {
                    name: await exits.enter_async_context(AsyncClient(addresses.gateway, api_key=key))
                    for name, key in KEYS.items()
                }
                services = list(filter(None, (addresses.target, addresses.draft)))
                found = await measure(clients, services, wanted.turns, wanted.prompt_tokens)
            print(
                f"{Path(stack.target).name} with {Path(stack.draft or '').name}; {machine()}; {wanted.turns} turns, "
                f"prompts of {wanted.prompt_tokens:,} tokens;\ncommit {revision() or 'unknown'}.\n\n{render(found)}"
            )

        run(measuring, options=SHARED_OPTIONS)


if __name__ == "__main__":
    run_measurement(app, "keys")
