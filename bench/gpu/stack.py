"""Section `stack`: draft service, target service and gateway as processes, asked over loopback like any user does."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.gpu.records import Recorder
from bench.gpu.sizes import Sizes
from bench.house.stack import serving
from outrider.cli.bench.common import fresh_prompt
from outrider.client import AsyncClient, Round, Speculation

ROOT = Path(__file__).resolve().parents[2]
PLAIN = "plain"
SETTINGS = {
    PLAIN: Speculation(enabled=False),
    "chain of 5": Speculation(draft_count=5, drafter="model"),
    "chosen": Speculation(),
}
# Requests of each stream; a single stream has more, for the sake of its percentiles.
EACH, ALONE = 2, 6


@dataclass(slots=True)
class Load:
    """What some streams saw: texts by the numbers of their prompts, and the milliseconds between two rounds."""

    texts: dict[int, list[int]] = field(default_factory=dict)
    gaps_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    rounds: list[tuple[float, int]] = field(default_factory=list)
    """When each round came, and how many tokens it brought."""
    begun_s: list[float] = field(default_factory=list)
    """When each stream had its first token."""
    ended_s: list[float] = field(default_factory=list)
    """When each stream had nothing left to ask."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of the time in which all streams ran."""
        begin_s, end_s = max(self.begun_s), min(self.ended_s)
        if end_s <= begin_s:
            raise RuntimeError("the first stream ended before the last one had begun")
        return sum(count for at_s, count in self.rounds if begin_s < at_s <= end_s) / (end_s - begin_s)


def run(recorder: Recorder, sizes: Sizes, device: torch.device) -> None:
    """Plain decoding, chains of five guesses, and what the gateway chooses, each at every number of streams."""
    models = ["--target", sizes.pair[0], "--draft", sizes.pair[1]]
    options = [*models, "--device", str(device), "--kv-tokens", str(sizes.pair_tokens), "--generation-defaults", "none"]
    # Every setting answers the same prompts, which lookups would know.
    options += ["--drafter", "model"]
    start = time.perf_counter()
    with serving(ROOT, options) as served:
        recorder.add("start", time.perf_counter() - start, "s")
        asyncio.run(_measure(recorder, sizes, served["gateway"]))


async def _measure(recorder: Recorder, sizes: Sizes, address: str) -> None:
    async with AsyncClient(address) as client:
        for streams in sizes.streams:
            numbers = range(streams * (ALONE if streams == 1 else EACH))
            plain: dict[int, list[int]] = {}
            for setting, speculation in SETTINGS.items():
                what = f"{setting}/streams={streams}"
                with recorder.case(what):
                    # What is recorded or compiled for so many rows is none of the answers' business.
                    await _load(client, range(streams), streams, speculation, sizes.tokens // 2)
                    load = await _load(client, numbers, streams, speculation, sizes.tokens)
                    plain = plain or load.texts
                    recorder.add(f"tokens a second/{what}", load.tokens_per_s, "tok/s")
                    recorder.add(f"tokens a round/{what}", statistics.mean(n for _, n in load.rounds), "tokens")
                    parts = statistics.quantiles(load.gaps_ms, n=100)
                    for percent in (50, 99):
                        recorder.add(f"round p{percent}/{what}", parts[percent - 1], "ms")
                    recorder.add(f"first token p50/{what}", statistics.median(load.first_ms), "ms")
                    differing = [number for number in numbers if load.texts[number] != plain[number]]
                    recorder.add(f"texts that differ/{what}", len(differing), "texts", of=len(numbers))


async def _load(
    client: AsyncClient, numbers: Sequence[int], streams: int, speculation: Speculation, tokens: int
) -> Load:
    """Asks for the answers to all prompts, so many at a time."""
    load = Load()

    async def stream(own: Sequence[int]) -> None:
        for place, number in enumerate(own):
            first_s = await _ask(client, load, number, speculation, tokens)
            if not place:
                load.begun_s.append(first_s)
        load.ended_s.append(time.perf_counter())

    await asyncio.gather(*(stream(numbers[place::streams]) for place in range(streams)))
    return load


async def _ask(client: AsyncClient, load: Load, number: int, speculation: Speculation, tokens: int) -> float:
    """Returns when its first token came."""
    asked_s = first_s = last_s = time.perf_counter()
    text: list[int] = []
    options = {"temperature": 0.0, "seed": number, "max_tokens": tokens, "ignore_eos": True}
    async with client.generate(fresh_prompt(number), speculation=speculation, **options) as answer:  # type: ignore[arg-type]
        async for event in answer:
            if isinstance(event, Round):
                now_s = time.perf_counter()
                (load.gaps_ms if text else load.first_ms).append((now_s - (last_s if text else asked_s)) * 1e3)
                first_s, last_s = (first_s if text else now_s), now_s
                load.rounds.append((now_s, len(event.tokens)))
                text += [token.token_id for token in event.tokens]
    load.texts[number] = text
    return first_s
