"""What a grammar costs a token, what forced guesses bring, and whether guesses are kept as often under one. No gate.

    python -m bench.structured --address HOST:PORT [--has-draft] [--turns 20]

A gateway with lookups must serve at the address. Answers to the same openings are taken in turns, one after another:

- Cost: plain decoding under a grammar that allows every text over plain decoding without one. Both say the same tokens.
- Forced: objects of JSON without white space, plainly, with what the grammar forces as guesses, and with all drafters.
- Kept: the share of a draft's guesses that is kept, under that grammar and without one, with chains of four.
- Hostile (--hostile N): times between the messages of a stream while N requests ask for grammars that cost much or are
  none, 16 at a time, over those beside as many that ask for harmless ones; and how the hostile ones ended.
"""

import asyncio
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count, pairwise
from typing import Annotated, Any

import typer

from outrider.cli import options
from outrider.cli.bench.common import (
    OPENINGS,
    Gateway,
    Timed,
    TokensDiffer,
    interval,
    machine,
    markdown,
    read_timed,
    revision,
    rotated,
)
from outrider.client import AsyncClient, Client, OutriderError, Speculation
from outrider.process.options import grouped, run_app, service_app

app = service_app()
TIMEOUT_S = 300.0
ANY_TEXT = r"(.|\n)*"
CHARACTER: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "full_name_of_the_character": {"type": "string", "maxLength": 24},
        "kind_of_creature": {"enum": ["human being", "talking animal", "giant or dwarf", "spirit of the wood"]},
        "number_of_brothers_and_sisters": {"type": "integer", "minimum": 0, "maximum": 12},
        "what_happens_in_the_end": {
            "type": "object",
            "properties": {
                "lives_happily_ever_after": {"type": "boolean"},
                "marries_a_prince_or_princess": {"type": "boolean"},
                "last_sentence_of_the_tale": {"type": "string", "maxLength": 60},
            },
            "required": ["lives_happily_ever_after", "marries_a_prince_or_princess", "last_sentence_of_the_tale"],
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": "", "item_separator": ",", "key_separator": ":"},
}
SCHEMA = {**CHARACTER, "required": list(CHARACTER["properties"])}
PLAIN = Speculation(enabled=False)
CHAINS = Speculation(draft_count=4, drafter="model")


def answer(client: Client, prompt: str, salt: str, tokens: int, **options: Any) -> Timed:  # noqa: ANN401 - of requests
    """Greedy answer to one prompt, with its time."""
    return read_timed(
        client.generate(prompt, max_tokens=tokens, temperature=0.0, cache_salt=salt, timeout_s=TIMEOUT_S, **options)
    )


def in_turns(
    client: Client, settings: Mapping[str, Mapping[str, Any]], prompts: Sequence[str], tokens: int
) -> dict[str, list[Timed]]:
    """The answers of every setting to every prompt, in turns. Raises TokensDiffer."""
    found: dict[str, list[Timed]] = defaultdict(list)
    salts = count()
    for turn, prompt in enumerate(prompts):
        answers = {
            name: answer(client, prompt, f"{time.time_ns()}-{next(salts)}", tokens, **settings[name])
            for name in rotated([*settings], turn)
        }
        if len({each.token_ids for each in answers.values()}) > 1:
            raise TokensDiffer(f"{prompt!r} was answered in different ways by {', '.join(answers)}")
        for name, taken in answers.items():
            found[name].append(taken)
    return found


def ratio(slow: Sequence[Timed], fast: Sequence[Timed], form: str = ".2f") -> str:
    """Ratio of times, answer by answer: how many times as fast the second is."""
    return interval(one.token_us / other.token_us for one, other in zip(slow, fast, strict=True)).show(form)


def kept(taken: Sequence[Timed]) -> str:
    """The share of guesses that were kept."""
    figures = [each.result.speculation for each in taken]
    drafted = sum(each.draft_tokens for each in figures)
    return f"{sum(each.accepted_tokens for each in figures) / max(drafted, 1):.3f}"


def hostile(number: int) -> dict[str, Any]:
    """A grammar that no client should ask for; hardly two are the same."""
    size = 100 + number
    kinds: tuple[dict[str, Any], ...] = (
        {"regex": f"x{{{1000 * size}}}"},
        {"regex": f"(.{{1,{size}}}){{1,{size}}}"},
        {"regex": "(a|aa)*" * (size % 500) + "("},
        {"json_schema": {"type": "string", "pattern": f"^(([a-z])+.)+[A-Z]{{{size}}}$"}},
        {"json_schema": {"type": "object", "not": {"const": number}}},
        {"json_schema": {"anyOf": [{"const": f"{number}-{each}"} for each in range(size % 300)] or [{}]}},
        {"json_schema": "[" * (size % 5000)},
        {"lark": "start: a" + "".join(f"\na{each}: a{each + 1} a{each + 1}" for each in range(size % 60))},
        {"choices": [f"{number} {each}" for each in range(size % 1500)]},
        {"gbnf": 'root ::= ("a" | root root)' + " | root" * (size % 200)},
    )
    return kinds[number % len(kinds)]


def harmless(number: int) -> dict[str, Any]:
    """One of a few small grammars."""
    return {"regex": f"[a-z]{{{number % 9 + 1}}}"}


async def gaps(client: AsyncClient, turns: int, tokens: int) -> list[float]:
    """Milliseconds between the messages of plain streams, one after the other."""
    found = []
    for prompt in OPENINGS[:turns]:
        times = []
        async for _ in client.generate(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True, speculation=PLAIN):
            times.append(time.perf_counter())
        found += [1e3 * (behind - before) for before, behind in pairwise(times)]
    return found


async def beside(
    connect: Callable[[], AsyncClient], requests: Iterable[dict[str, Any]], tokens: int
) -> tuple[list[float], Counter[str]]:
    """Gaps of streams while requests are made, and how these ended."""
    ends: Counter[str] = Counter()
    slots = asyncio.Semaphore(16)
    async with connect() as client, connect() as attacker:

        async def ask(options: dict[str, Any]) -> None:
            async with slots:
                try:
                    await attacker.generate("Once", max_tokens=2, timeout_s=TIMEOUT_S, **options).result()
                    ends["answered"] += 1
                except OutriderError as error:
                    ends[error.reason] += 1

        attack = asyncio.gather(*map(ask, requests))
        found: list[float] = []
        while not attack.done():
            found += await gaps(client, 1, tokens)
        await attack
    return found, ends


def under_attack(connect: Callable[[], AsyncClient], count: int, tokens: int) -> list[list[str]]:
    """Rows of a table: the 99th percentile of gaps beside harmless and hostile requests, and how the latter ended."""
    with_harmless, _ = asyncio.run(beside(connect, map(harmless, range(count)), tokens))
    with_hostile, ends = asyncio.run(beside(connect, map(hostile, range(count)), tokens))
    calm, pressed = (statistics.quantiles(each, n=100)[98] for each in (with_harmless, with_hostile))
    return [
        ["hostile requests", ", ".join(f"{name} {number}" for name, number in ends.most_common())],
        ["99th percentile of gaps beside harmless ones, ms", f"{calm:.2f}"],
        ["beside hostile ones, ms", f"{pressed:.2f}, {pressed / calm:.2f} times"],
    ]


@app.command()
@grouped
def structured(
    *,
    address: Gateway,
    has_draft: Annotated[bool, typer.Option("--has-draft", help="There is a draft that reads grammars.")] = False,
    turns: Annotated[int, typer.Option(help="Openings.", min=1, max=len(OPENINGS))] = 20,
    tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 96,
    num_hostile: Annotated[
        int, typer.Option("--hostile", help="Grammars to ask for that nobody should.", min=0, metavar="N")
    ] = 0,
    connection: options.ConnectionOptions,
) -> None:
    """Shows what a grammar costs a token, what forced guesses bring, and whether guesses are kept as often."""
    api_key, tls = connection.api_key, connection.tls(address)
    prompts = OPENINGS[:turns]
    any_text: dict[str, Any] = {"regex": ANY_TEXT}
    shaped: dict[str, Any] = {"json_schema": SCHEMA}
    plain: dict[str, Any] = {"speculation": PLAIN}
    cost: dict[str, dict[str, Any]] = {"without": plain, "any text": {**plain, **any_text}}
    forced: dict[str, dict[str, Any]] = {
        "plain": {**plain, **shaped},
        "forced": {"speculation": Speculation(drafter="lookup"), **shaped},
        "auto": {"speculation": Speculation(), **shaped},
    }
    with Client(address, api_key=api_key, tls=tls) as client:
        in_turns(client, cost, prompts[:2], tokens)
        costs = in_turns(client, cost, prompts, tokens)
        in_turns(client, forced, prompts[:2], tokens)
        found = in_turns(client, forced, prompts, tokens)
        rows = [
            ["any text: time a token over that without a grammar", ratio(costs["any text"], costs["without"], ".3f")],
            ["without a grammar, ms a token", f"{statistics.median(t.token_us for t in costs['without']) / 1e3:.2f}"],
            ["object, plain, ms a token", f"{statistics.median(t.token_us for t in found['plain']) / 1e3:.2f}"],
            ["object: forced guesses over plain", ratio(found["plain"], found["forced"])],
            ["object: auto over plain", ratio(found["plain"], found["auto"])],
        ]
        if has_draft:
            free = in_turns(client, {"free": {"speculation": CHAINS}}, prompts, tokens)["free"]
            under = in_turns(client, {"under": {"speculation": CHAINS, **shaped}}, prompts, tokens)["under"]
            rows += [["guesses kept, without a grammar", kept(free)], ["guesses kept, object", kept(under)]]
    if num_hostile:
        rows += under_attack(partial(AsyncClient, address, api_key=api_key, tls=tls), num_hostile, tokens)
    print(f"{machine()}; at most {tokens} tokens an answer, temperature 0; commit {revision() or 'unknown'}.")
    print(f"Medians with intervals of 95 %, {len(prompts)} openings.\n\n{markdown(['what', 'found'], rows)}")


if __name__ == "__main__":
    run_app(app)
