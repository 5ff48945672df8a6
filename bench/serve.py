"""`outrider bench serve`: what speculation is worth on a live gateway, with it and without by turns.

Every turn asks the same prompts with the same seeds in both settings, in another order each turn, so that neighbours
can be compared, and their answers too. Prints a table, or one JSON object; `--save FILE` keeps every request.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Annotated

import typer

from bench.common import (
    OPENINGS,
    Cpus,
    JsonFlag,
    SaveFile,
    markdown,
    progress,
    provenance,
    run_measurement,
    served,
    spread,
    stack_of,
)
from outrider import logs
from outrider.addresses import check_address
from outrider.cli import options
from outrider.cli.naming import SHARED_OPTIONS
from outrider.cli.parsing import INT32_MAX, INT64_MAX, INT64_MIN, parse_draft_count
from outrider.cli.running import Interrupts, run
from outrider.client import AsyncClient, Round, Speculation
from outrider.command_line import between, refuse_together
from outrider.option_groups import grouped, options_of

SETTINGS = {"speculative": True, "plain": False}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What is asked for, how often, and where the figures go."""

    address: Annotated[
        str | None,
        typer.Option(help="Gateway to ask. Default: a stack of its own.", metavar="HOST:PORT", show_default=False),
    ] = None
    requests: Annotated[
        int, typer.Option(help="Measured requests of each setting.", metavar="N", callback=between(1, 1_000_000))
    ] = 32
    streams: Annotated[
        int, typer.Option(help="Requests of a turn, side by side.", metavar="N", callback=between(1, 4096))
    ] = 4
    tokens: Annotated[int, typer.Option(help="Tokens a request.", metavar="N", callback=between(1, INT32_MAX))] = 64
    draft_count: Annotated[
        str, typer.Option(help="Draft tokens a round; auto leaves it to the gateway.", metavar="N|auto")
    ] = "auto"
    temperature: Annotated[
        float, typer.Option(help="Temperature of the requests.", metavar="X", callback=between(0, 100))
    ] = 0.8
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of the first request.", metavar="N", callback=between(INT64_MIN, INT64_MAX - 1_000_000)
        ),
    ] = 0
    json: JsonFlag = False
    save: SaveFile = None


@dataclass(slots=True)
class TimedAnswer:
    """One request as its client saw it."""

    number: int
    first_token_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """Requests of one setting that ran side by side, and how long all of them took together."""

    setting: str
    seconds: float
    answers: list[TimedAnswer]

    @property
    def tokens_per_s(self) -> float:
        """Of all requests together, from the first one's beginning to the last one's end."""
        return sum(len(each.token_ids) for each in self.answers) / self.seconds


@app.command()
@grouped
def serve(*, wanted: ServeOptions, models: options.Models, cpus: Cpus) -> None:
    """Compares a gateway with itself, with and without speculation by turns: tokens/s, first tokens and answers."""
    logs.configure("warning")
    check(wanted, models, cpus)
    stack = None if wanted.address is not None else stack_of(models, cpus)

    async def measuring(interrupts: Interrupts) -> None:
        async with AsyncExitStack() as exits:
            address = wanted.address or ""
            if stack is not None:
                address = (await exits.enter_async_context(served(stack, interrupts))).gateway
            begin = exits.enter_context(progress(2 * -(-wanted.requests // wanted.streams)))
            blocks = await ask_in_turns(address, wanted, begin)
        conclude(address, wanted, blocks)

    run(measuring, options={**SHARED_OPTIONS, "max_tokens": "--tokens"})


def check(wanted: ServeOptions, models: options.Models, cpus: Cpus) -> None:
    """Raises InvalidRequest about what cannot be asked for."""
    parse_draft_count(wanted.draft_count)
    if wanted.address is not None:
        check_address("--address", wanted.address)
        refuse_together("--address", wanted.address, options_of(models) | options_of(cpus))


async def ask_in_turns(address: str, wanted: ServeOptions, begin: Callable[[str], None]) -> list[Block]:
    """All blocks, two a turn, behind one request of each setting to warm up. Raises what the gateway answers."""
    blocks = []
    async with AsyncClient(address) as client:
        for setting in SETTINGS:
            await ask(client, wanted, setting, 0)
        for turn, first in enumerate(range(0, wanted.requests, wanted.streams)):
            numbers = range(first, min(first + wanted.streams, wanted.requests))
            for setting in list(SETTINGS)[:: -1 if turn % 2 else 1]:
                begin(f"Asking {'with' if SETTINGS[setting] else 'without'} speculation")
                started_s = time.perf_counter()
                answers = await asyncio.gather(*(ask(client, wanted, setting, number) for number in numbers))
                blocks.append(Block(setting, time.perf_counter() - started_s, answers))
    return blocks


async def ask(client: AsyncClient, wanted: ServeOptions, setting: str, number: int) -> TimedAnswer:
    """One request to its end; its number decides its prompt and its seed. Raises what the gateway answers."""
    enabled, answer, started_s = SETTINGS[setting], TimedAnswer(number), time.perf_counter()
    draft_count = parse_draft_count(wanted.draft_count) if enabled else None
    stream = client.generate(
        OPENINGS[number % len(OPENINGS)],
        max_tokens=wanted.tokens,
        ignore_eos=True,
        temperature=wanted.temperature,
        seed=wanted.seed + number,
        speculation=Speculation(enabled=enabled, draft_count=draft_count),
    )
    async with stream:
        async for event in stream:
            if isinstance(event, Round):
                answer.first_token_s = answer.first_token_s or time.perf_counter() - started_s
                answer.token_ids += [token.token_id for token in event.tokens]
                answer.draft_tokens += event.facts.draft_count
                answer.accepted_tokens += event.facts.accepted_count
    return answer


def conclude(address: str, wanted: ServeOptions, blocks: list[Block]) -> None:
    """Writes the file that is wanted, and prints the comparison, or its figures as JSON."""
    of_setting = {name: [block for block in blocks if block.setting == name] for name in SETTINGS}
    answers = {name: [each for block in own for each in block.answers] for name, own in of_setting.items()}
    speeds = {name: [block.tokens_per_s for block in own] for name, own in of_setting.items()}
    speed = {name: spread(own) for name, own in speeds.items()}
    first_token = {name: spread(each.first_token_s for each in own) for name, own in answers.items()}
    # A turn's two blocks lie side by side in both lists, so what slowed both touches their ratio little.
    ratio = spread(fast / slow for fast, slow in zip(*speeds.values(), strict=True))
    equal = sum(one.token_ids == two.token_ids for one, two in zip(*answers.values(), strict=True))
    document: dict[str, object] = {"address": address, **provenance()}
    document |= {"plan": {name: value for name, value in asdict(wanted).items() if name not in {"json", "save"}}}
    for name, own in answers.items():
        document[name] = {
            "completed": len(own),
            "max_concurrency": wanted.streams,
            "total_output_tokens": sum(len(each.token_ids) for each in own),
            "output_throughput": asdict(speed[name]),
            "ttft_s": asdict(first_token[name]),
            "num_draft_tokens": sum(each.draft_tokens for each in own),
            "num_accepted_tokens": sum(each.accepted_tokens for each in own),
        }
    document |= {"ratio": asdict(ratio), "equal_answers": equal, "compared_answers": wanted.requests}
    if wanted.save is not None:
        kept = document | {"blocks": [asdict(block) for block in blocks]}
        wanted.save.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    if wanted.json:
        sys.stdout.write(json.dumps(document) + "\n")
        return
    rows = [
        ("tokens/s", *(each.show(".1f") for each in speed.values())),
        ("time to first token, ms", *(each.show(".1f", 1e3) for each in first_token.values())),
    ]
    print(markdown(("medians (quartiles)", *SETTINGS), rows))
    print(f"Speculation gives {ratio.show('.2f')} times the tokens/s of plain decoding, turn by turn.")
    sameness = " token for token" if equal == wanted.requests else "; under the rule match on a CPU all must be"
    print(f"{equal} of {wanted.requests} answers are the same{sameness}.")


if __name__ == "__main__":
    run_measurement(app, "serve")
