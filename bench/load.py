"""Asks a gateway from many streams at a time, and keeps when what came back. Computes no figure.

A closed loop: each stream asks its next request when its last one has ended. Settings take turns in blocks, in another
order each turn, because two settings at the same time would measure each other.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.openings import OPENINGS
from outrider.client import AsyncClient, Result, Round, Speculation
from outrider.errors import OutriderError


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One run: so many requests of each setting, `streams` of them at a time. Settings: speculative or not."""

    requests: int
    streams: int
    tokens: int
    turns: int
    temperature: float
    seed: int
    draft_count: int | None = None
    settings: tuple[bool, ...] = (True, False)

    def blocks(self) -> Iterator[tuple[bool, range]]:
        """Settings by turns with the numbers of their requests; the same numbers ask the same."""
        turns = max(1, min(self.turns, self.requests // self.streams or 1))
        for turn in range(turns):
            part = range(self.requests * turn // turns, self.requests * (turn + 1) // turns)
            for setting in self.settings if turn % 2 == 0 else self.settings[::-1]:
                yield setting, part


@dataclass(frozen=True, slots=True)
class Burst:
    """What one message brought: when, in seconds since the request was sent, and how many tokens."""

    at_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as its client saw it. `error` names why it has no answer; times are in seconds."""

    speculative: bool
    number: int
    seconds: float
    prompt_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    bursts: tuple[Burst, ...] = ()
    drafts: tuple[tuple[int, int, int], ...] = ()
    """Drafted, evaluated and accepted tokens of each round that had a proposal."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """Requests of one setting that ran side by side, and how long all of them took together."""

    speculative: bool
    seconds: float
    requests: tuple[Asked, ...]


async def run(address: str, plan: LoadPlan, begun: Callable[[bool], None], done: Callable[[], None]) -> list[Block]:
    """Takes all blocks behind one warm-up request of each setting, which is dropped. Raises what that one raises."""
    async with AsyncClient(address) as client:
        for setting in plan.settings:
            await _ask(client, plan, setting, 0)
        blocks = []
        for setting, numbers in plan.blocks():
            begun(setting)
            blocks.append(await _block(client, plan, setting, numbers, done))
        return blocks


async def _block(
    client: AsyncClient, plan: LoadPlan, setting: bool, numbers: Sequence[int], done: Callable[[], None]
) -> Block:
    waiting = iter(numbers)
    asked: list[Asked] = []

    async def stream() -> None:
        # All streams take from the same line, so none is idle while there is something to ask.
        for number in waiting:
            started_s = time.perf_counter()
            try:
                asked.append(await _ask(client, plan, setting, number))
            except OutriderError as error:
                asked.append(Asked(setting, number, time.perf_counter() - started_s, error=error.message))
            done()

    began_s = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(plan.streams)))
    return Block(setting, time.perf_counter() - began_s, tuple(sorted(asked, key=lambda each: each.number)))


async def _ask(client: AsyncClient, plan: LoadPlan, setting: bool, number: int) -> Asked:
    """One request to its end. Raises the OutriderError that the gateway answered."""
    call = client.generate(
        OPENINGS[number % len(OPENINGS)],
        max_tokens=plan.tokens,
        ignore_eos=True,
        temperature=plan.temperature,
        seed=plan.seed + number,
        speculation=Speculation(enabled=setting, draft_count=plan.draft_count if setting else None),
    )
    started_s = time.perf_counter()
    async with call:
        return await _read(call.__aiter__(), setting, number, started_s)


async def _read(events: AsyncIterator[Round | Result], setting: bool, number: int, started_s: float) -> Asked:
    token_ids: list[int] = []
    bursts: list[Burst] = []
    drafts: list[tuple[int, int, int]] = []
    prompt_tokens = 0
    async for event in events:
        if isinstance(event, Result):
            prompt_tokens = event.prompt_tokens
            continue
        bursts.append(Burst(time.perf_counter() - started_s, len(event.tokens)))
        token_ids += [token.token_id for token in event.tokens]
        facts = event.facts
        if facts.draft_count:
            drafts.append((facts.draft_count, facts.evaluated_count, facts.accepted_count))
    seconds = time.perf_counter() - started_s
    return Asked(setting, number, seconds, prompt_tokens, tuple(token_ids), tuple(bursts), tuple(drafts))
