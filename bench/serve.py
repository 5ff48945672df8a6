"""`outrider bench serve`: what speculation is worth on a live gateway, with it and without by turns.

Every turn asks the same prompts with the same seeds in both settings, in another order each turn, so that neighbours
can be compared, and their answers too. Prints a table, or one JSON object; `--save FILE` keeps every request.
"""

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import typer

from bench.common import (
    OPENINGS,
    ComputeThreads,
    JsonFlag,
    SaveFile,
    markdown,
    provenance,
    run_measurement,
    served,
    spread,
    stack_of,
    timed,
)
from outrider.cli import options
from outrider.cli.options import INT32_MAX, INT64_MAX, INT64_MIN, SHARED_OPTIONS, parse_draft_count
from outrider.cli.running import Interrupts, note, run
from outrider.client import AsyncClient, Speculation
from outrider.process import telemetry
from outrider.process.options import between, grouped, options_of, refuse_together
from outrider.rpc.channels import check_address

SETTINGS = {"speculative": True, "plain": False}

count_option = partial(typer.Option, metavar="N")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What is asked for, how often, and where the figures go."""

    address: Annotated[
        str | None, typer.Option(help="Gateway to ask. Default: a stack of its own.", metavar="HOST:PORT")
    ] = None
    requests: Annotated[
        int, count_option(help="Measured requests of each setting.", callback=between(1, 1_000_000))
    ] = 32
    streams: Annotated[int, count_option(help="Requests of a turn, side by side.", callback=between(1, 4096))] = 4
    tokens: Annotated[int, count_option(help="Tokens a request.", callback=between(1, INT32_MAX))] = 64
    draft_count: Annotated[
        str, typer.Option(help="Draft tokens a round; auto leaves it to the gateway.", metavar="N|auto")
    ] = "auto"
    temperature: Annotated[
        float, typer.Option(help="Temperature of the requests.", metavar="X", callback=between(0, 100))
    ] = 0.8
    seed: Annotated[
        int, count_option(help="Seed of the first request.", callback=between(INT64_MIN, INT64_MAX - 1_000_000))
    ] = 0
    json: JsonFlag = False
    save: SaveFile = None


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One request as its client saw it."""

    number: int
    first_token_s: float
    token_ids: list[int]
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
def serve(*, wanted: ServeOptions, models: options.Models, cpus: ComputeThreads) -> None:
    """Compares a gateway with itself, with and without speculation by turns: tokens/s, first tokens and answers."""
    telemetry.configure_logs("warning")
    check(wanted, models, cpus)
    stack = None if wanted.address is not None else stack_of(models, cpus)

    async def measuring(interrupts: Interrupts) -> None:
        async with AsyncExitStack() as exits:
            address = wanted.address or ""
            if stack is not None:
                address = (await exits.enter_async_context(served(stack, interrupts))).gateway
            blocks = await ask_in_turns(address, wanted)
        conclude(address, wanted, blocks)

    run(measuring, options={**SHARED_OPTIONS, "max_tokens": "--tokens"})


def check(wanted: ServeOptions, models: options.Models, cpus: ComputeThreads) -> None:
    """Raises InvalidRequest about what cannot be asked for."""
    parse_draft_count(wanted.draft_count)
    if wanted.address is not None:
        check_address("--address", wanted.address)
        refuse_together("--address", wanted.address, options_of(models) | options_of(cpus))


async def ask_in_turns(address: str, wanted: ServeOptions) -> list[Block]:
    """All blocks, two a turn, behind one request of each setting to warm up. Raises what the gateway answers."""
    blocks = []
    async with AsyncClient(address) as client:
        for setting in SETTINGS:
            await ask(client, wanted, setting, 0)
        firsts = range(0, wanted.requests, wanted.streams)
        for turn, first in enumerate(firsts):
            note(f"Turn {turn + 1} of {len(firsts)}.")
            numbers = range(first, min(first + wanted.streams, wanted.requests))
            for setting in list(SETTINGS)[:: -1 if turn % 2 else 1]:
                started_s = time.perf_counter()
                answers = await asyncio.gather(*(ask(client, wanted, setting, number) for number in numbers))
                blocks.append(Block(setting, time.perf_counter() - started_s, answers))
    return blocks


async def ask(client: AsyncClient, wanted: ServeOptions, setting: str, number: int) -> TimedAnswer:
    """One request to its end; its number decides its prompt and its seed. Raises what the gateway answers."""
    enabled = SETTINGS[setting]
    draft_count = parse_draft_count(wanted.draft_count) if enabled else None
    rounds, first_token_s, _ = await timed(
        client,
        OPENINGS[number % len(OPENINGS)],
        max_tokens=wanted.tokens,
        ignore_eos=True,
        temperature=wanted.temperature,
        seed=wanted.seed + number,
        speculation=Speculation(enabled=enabled, draft_count=draft_count),
    )
    token_ids = [token.token_id for each in rounds for token in each.tokens]
    drafted = sum(each.facts.draft_count for each in rounds)
    accepted = sum(each.facts.accepted_count for each in rounds)
    return TimedAnswer(number, first_token_s, token_ids, drafted, accepted)


def conclude(address: str, wanted: ServeOptions, blocks: list[Block]) -> None:
    """Writes the file that is wanted, and prints the comparison, or its figures as JSON."""
    plan = {name: value for name, value in asdict(wanted).items() if name not in {"json", "save"}}
    document: dict[str, object] = {"address": address, **provenance(), "plan": plan}
    speeds, answers, rows = [], [], [["tokens/s"], ["time to first token, ms"]]
    for setting in SETTINGS:
        speeds.append([block.tokens_per_s for block in blocks if block.setting == setting])
        answers.append([each for block in blocks if block.setting == setting for each in block.answers])
        speed, first_token_s = spread(speeds[-1]), spread(each.first_token_s for each in answers[-1])
        rows[0].append(speed.show(".1f"))
        rows[1].append(first_token_s.show(".1f", 1e3))
        document[setting] = {
            "completed": len(answers[-1]),
            "max_concurrency": wanted.streams,
            "total_output_tokens": sum(len(each.token_ids) for each in answers[-1]),
            "output_throughput": asdict(speed),
            "ttft_s": asdict(first_token_s),
            "num_draft_tokens": sum(each.draft_tokens for each in answers[-1]),
            "num_accepted_tokens": sum(each.accepted_tokens for each in answers[-1]),
        }
    # A turn's two blocks lie side by side in time, so what slowed both touches their ratio little.
    ratio = spread(fast / slow for fast, slow in zip(*speeds, strict=True))
    equal, compared = sum(one.token_ids == two.token_ids for one, two in zip(*answers, strict=True)), wanted.requests
    document |= {"ratio": asdict(ratio), "equal_answers": equal, "compared_answers": compared}
    if wanted.save is not None:
        kept = document | {"blocks": [asdict(block) for block in blocks]}
        wanted.save.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    if wanted.json:
        sys.stdout.write(json.dumps(document) + "\n")
        return
    print(markdown(("medians (quartiles)", *SETTINGS), rows))
    print(f"Speculation gives {ratio.show('.2f')} times the tokens/s of plain decoding.")
    sameness = " token for token" if equal == compared else "; under the rule match on a CPU all must be"
    print(f"{equal} of {compared} answers are the same{sameness}.")


if __name__ == "__main__":
    run_measurement(app, "serve")
