"""A load that jumps: how soon K follows when few streams become many, and many become few again. No gate.

    python -m bench.jump [--low 1] [--high 32] [--seconds 5] [--jumps 4] [--plot FILE.svg] [--target ...] [--draft ...]

A stack of its own serves streams that ask one request after the other under `auto`. Between two jumps the load stays
for some seconds. A jump counts as followed when the tokens that are drafted a round stay near what they are at the end
of that time: within half a token, or a quarter.
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from bench.chart import Panel, line_chart
from bench.common import (
    OPENINGS,
    ComputeThreads,
    MeasuredModels,
    Spread,
    machine,
    markdown,
    revision,
    run_measurement,
    served,
    stack_of,
)
from outrider.cli.options import SHARED_OPTIONS
from outrider.cli.running import Interrupts, note, run
from outrider.client import AsyncClient, Round
from outrider.process import telemetry
from outrider.process.options import between, grouped

BIN_S = 0.25
NEAR_TOKENS, NEAR_SHARE = 0.5, 0.25
TOKENS = 48

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class JumpOptions:
    """The loads, and how long each stays."""

    low: Annotated[int, typer.Option(help="Streams of the low load.", callback=between(1, 4096))] = 1
    high: Annotated[int, typer.Option(help="Streams of the high load.", callback=between(1, 4096))] = 32
    seconds: Annotated[float, typer.Option(help="How long each load stays.", callback=between(2, 600))] = 5.0
    jumps: Annotated[int, typer.Option(help="Jumps that are measured.", callback=between(2, 100))] = 4
    temperature: Annotated[float, typer.Option(help="Of the requests.", callback=between(0, 100))] = 0.0
    plot: Annotated[Path | None, typer.Option(help="File for a plot of K over time.", metavar="FILE.svg")] = None


@dataclass(frozen=True, slots=True)
class Jump:
    """One load from its beginning to the next jump; rounds are (seconds since the run began, drafted, tokens)."""

    streams: int
    began_s: float
    ended_s: float
    rounds: list[tuple[float, int, int]]

    def drafted(self) -> list[tuple[float, float]]:
        """Draft tokens a round in each BIN_S, at its middle, where there were rounds."""
        bins: dict[int, list[int]] = {}
        for at_s, drafted, _ in self.rounds:
            bins.setdefault(int((at_s - self.began_s) / BIN_S), []).append(drafted)
        return [(self.began_s + (number + 0.5) * BIN_S, fmean(found)) for number, found in sorted(bins.items())]

    @property
    def settled(self) -> float:
        """Draft tokens a round in the second half of the time."""
        half_s = (self.began_s + self.ended_s) / 2
        return fmean(drafted for at_s, drafted, _ in self.rounds if at_s >= half_s)

    @property
    def followed_s(self) -> float:
        """Seconds from the jump to the end of the last bin that is not near what it comes to."""
        near = max(NEAR_TOKENS, NEAR_SHARE * self.settled)
        away = [at_s for at_s, drafted in self.drafted() if abs(drafted - self.settled) > near]
        return max(away) + BIN_S / 2 - self.began_s if away else 0.0

    @property
    def tokens_per_s(self) -> float:
        return sum(tokens for _, _, tokens in self.rounds) / (self.ended_s - self.began_s)


@dataclass(slots=True)
class Streams:
    """A wanted number of streams, each with one request after the other, and the rounds of all."""

    client: AsyncClient
    temperature: float
    rounds: list[tuple[float, int, int]] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _number: int = 0

    async def set(self, count: int) -> None:
        """Changes the number of streams: starts those that are missing, cancels those that are too many."""
        ended = self._tasks[count:]
        del self._tasks[count:]
        for task in ended:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*ended, return_exceptions=True)
        while len(self._tasks) < count:
            self._tasks.append(asyncio.create_task(self._stream()))

    async def _stream(self) -> None:
        while True:
            self._number += 1
            prompt, seed = OPENINGS[self._number % len(OPENINGS)], self._number
            events = self.client.generate(
                prompt, max_tokens=TOKENS, ignore_eos=True, temperature=self.temperature, seed=seed
            )
            async for event in events:
                if isinstance(event, Round):
                    self.rounds.append((time.perf_counter(), event.facts.draft_count, len(event.tokens)))


@app.command()
@grouped
def jump(*, wanted: JumpOptions, models: MeasuredModels, cpus: ComputeThreads) -> None:
    """Lets the load jump, and tells how soon K has followed."""
    telemetry.configure_logs("warning")
    stack = replace(stack_of(models, cpus), rest_port=0)

    async def measuring(interrupts: Interrupts) -> None:
        async with served(stack, interrupts) as addresses, AsyncClient(addresses.gateway) as client:
            streams = Streams(client, wanted.temperature)
            # Both loads once before, as any gateway has met them.
            for count in (wanted.low, wanted.high):
                note(f"Warming up with {count} streams.")
                await streams.set(count)
                await asyncio.sleep(wanted.seconds)
            streams.rounds.clear()
            jumps, begun_s = [], time.perf_counter()
            for number in range(wanted.jumps):
                count = (wanted.low, wanted.high)[number % 2]
                note(f"Jump {number + 1} of {wanted.jumps}, to {count} streams.")
                began_s = time.perf_counter()
                await streams.set(count)
                await asyncio.sleep(wanted.seconds)
                ended_s = time.perf_counter()
                rounds = [(at_s - begun_s, *rest) for at_s, *rest in streams.rounds if began_s <= at_s <= ended_s]
                jumps.append(Jump(count, began_s - begun_s, ended_s - begun_s, rounds))  # type: ignore[arg-type]
            await streams.set(0)
        conclude(wanted, f"{models.target or 'the embedded target'}", jumps)

    run(measuring, options=SHARED_OPTIONS)


def conclude(wanted: JumpOptions, target: str, jumps: list[Jump]) -> None:
    """Prints a row for each jump, and draws K over time where that is wanted."""
    print(f"{target}, {machine()}, commit {revision()}")
    rows = [
        [
            str(each.streams),
            f"{each.settled:.2f}",
            f"{each.followed_s:.2f}",
            f"{each.tokens_per_s:.0f}",
        ]
        for each in jumps
    ]
    print(markdown(("streams", "drafted a round, in the end", "followed after, s", "tokens/s"), rows))
    if wanted.plot is not None:
        lines = {
            f"{each.streams} ({number + 1})": [
                (at_s, Spread(drafted, drafted, drafted, 1)) for at_s, drafted in each.drafted()
            ]
            for number, each in enumerate(jumps)
        }
        title = f"K while the load jumps from {wanted.low} to {wanted.high} streams and back: {target}"
        chart = line_chart(title, "seconds", "draft tokens a round", [Panel("", lines)], 0.0, is_logarithmic=False)
        wanted.plot.write_text(chart, encoding="utf-8")


if __name__ == "__main__":
    run_measurement(app, "jump")
