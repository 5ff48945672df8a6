"""`outrider bench timeline`: when draft, wire and target were busy in some rounds of one answer, drawn as lanes.

All times are those that the rounds bring, measured by the gateway and the services; they need no common clock. What a
wait holds beside queue and compute is the way, half of it each way. Work that took longer than the gateway waited for
it was under way before: an unasked verdict, or guesses that were made ahead. It is drawn to end with that wait.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import accumulate
from typing import Annotated

import typer

from outrider.cli import options
from outrider.cli.bench.common import (
    ComputeThreads,
    JsonFlag,
    MeasuredModels,
    check_asked,
    fresh_prompt,
    machine,
    provenance,
    run_measurement,
    served,
    settings_of,
    stack_of,
    timed,
)
from outrider.cli.local_stack import Stack
from outrider.cli.options import INT32_MAX, INT64_MAX, INT64_MIN, SHARED_OPTIONS, parse_draft_count
from outrider.cli.running import Interrupts, run
from outrider.client import AsyncClient, RoundFacts, Speculation
from outrider.errors import InvalidRequest
from outrider.process import telemetry
from outrider.process.options import between, grouped, refuse_together
from outrider.rpc.messages.tree import MAX_BRANCHES

LEAST_COLUMNS, MOST_COLUMNS = 40, 1000
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Lane(StrEnum):
    """Place where time passes."""

    DRAFT = "draft"
    WIRE = "wire"
    TARGET = "target"


class Doing(StrEnum):
    """What a place does."""

    COMPUTE = "compute"
    QUEUE = "queue"
    WAY = "way"


SIGNS = {Doing.COMPUTE: "█", Doing.QUEUE: "░", Doing.WAY: "─"}


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """A piece of time of one place, in microseconds since the first round that is shown began."""

    lane: Lane
    doing: Doing
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Drawn:
    """A round, when it began, and what was done for it."""

    number: int
    start_us: int
    tokens: int
    facts: RoundFacts
    spans: tuple[TimeSpan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineOptions:
    """Options: whom to ask, for what, and which of its rounds are drawn."""

    address: Annotated[
        list[str] | None,
        typer.Option(help="Gateway to ask, several by turns. Default: a stack of its own.", metavar="HOST:PORT"),
    ] = None
    draft_counts: Annotated[
        str,
        typer.Option(
            help="Draft tokens a round, each drawn; 0 is plain decoding, auto is the gateway's choice.",
            metavar="N|auto,...",
        ),
    ] = "4"
    drafter: Annotated[str, typer.Option(help="Whose draft tokens. Default: the gateway's choice.")] = ""
    branches: Annotated[
        int | None,
        typer.Option(
            help="Draw it all again with a gateway that has so many branches, of a stack of its own.",
            metavar="N",
            show_default=False,
            callback=between(1, MAX_BRANCHES),
        ),
    ] = None
    skip: Annotated[
        int, typer.Option(help="Rounds before the first that is drawn.", metavar="N", callback=between(0, INT32_MAX))
    ] = 4
    rounds: Annotated[int, typer.Option(help="Rounds to draw.", metavar="N", callback=between(1, 1000))] = 6
    columns: Annotated[
        int, typer.Option(help="Width of the lanes.", metavar="N", callback=between(LEAST_COLUMNS, MOST_COLUMNS))
    ] = 100
    temperature: Annotated[
        float, typer.Option(help="Temperature of the requests.", metavar="X", callback=between(0, 100))
    ] = 0.0
    seed: Annotated[
        int, typer.Option(help="Seed of the requests.", metavar="N", callback=between(INT64_MIN, INT64_MAX))
    ] = 0
    json: JsonFlag = False

    @property
    def settings(self) -> dict[str, Speculation]:
        """What is asked for, by name. Raises InvalidRequest."""
        counts = dict.fromkeys(parse_draft_count(part) for part in self.draft_counts.split(","))
        found = settings_of(counts, (self.drafter,))
        return {name: replace(each, return_rounds=True) for name, each in found.items()}

    @property
    def max_tokens(self) -> int:
        """Enough for all rounds, however much each of them brings; the answer is left when they have come."""
        most = max((each.draft_count or 32 for each in self.settings.values() if each.enabled), default=0)
        return (1 + self.skip + self.rounds) * (1 + most)


@app.command()
@grouped
def timeline(
    *,
    wanted: TimelineOptions,
    models: MeasuredModels,
    cpus: ComputeThreads,
    hosted: options.HostedOptions,
    connection: options.ConnectionOptions,
) -> None:
    """Draws when draft, wire and target were busy in some rounds of one answer, from the rounds' own times."""
    telemetry.configure_logs("warning")
    settings, tls = wanted.settings, connection.tls(next(iter(wanted.address or ()), None))
    for address in wanted.address or ():
        check_asked(address, models, cpus, hosted)
        refuse_together("--address", address, {"--branches": wanted.branches})
    stacks: dict[str, Stack] = {}
    if not wanted.address:
        stack = stack_of(models, cpus, hosted)
        stacks["in turns"] = stack
        if wanted.branches:
            flags = stack.gateway_flags | {"--branches": wanted.branches}
            stacks[f"{wanted.branches} branches"] = replace(stack, gateway_flags=flags)

    async def measuring(interrupts: Interrupts) -> None:
        pictures: list[tuple[str, list[Drawn]]] = []

        async def draw(place: str, address: str) -> None:
            async with AsyncClient(address, api_key=connection.api_key, tls=tls) as client:
                for name, speculation in settings.items():
                    title = f"{place}, {name}" if len(stacks) + len(wanted.address or ()) > 1 else name
                    pictures.append((title, await ask(client, wanted, speculation)))

        for address in wanted.address or ():
            await draw(address, address)
        for place, stack in stacks.items():
            async with served(stack, interrupts) as addresses:
                await draw(place, addresses.gateway)
        conclude(wanted, pictures)

    run(measuring, options={**SHARED_OPTIONS, "speculation.draft_count": "--draft-counts"})


async def ask(client: AsyncClient, wanted: TimelineOptions, speculation: Speculation) -> list[Drawn]:
    """The rounds to draw, of one answer after another that warms everything up. Raises the OutriderError answered."""
    rounds: Sequence[tuple[int, RoundFacts]] = ()
    for number in range(2):
        found, _, _ = await timed(
            client,
            fresh_prompt(number),
            max_tokens=wanted.max_tokens,
            ignore_eos=True,
            seed=wanted.seed,
            temperature=wanted.temperature,
            speculation=speculation,
        )
        rounds = [(len(each.tokens), each.facts) for each in found]
    # The first one reads the prompt.
    return drawn(rounds[1:], wanted.skip, wanted.rounds)


def drawn(rounds: Sequence[tuple[int, RoundFacts]], skip: int, count: int) -> list[Drawn]:
    """`count` rounds after the first `skip`, each with its tokens, one after another. Raises InvalidRequest."""
    shown = rounds[skip : skip + count]
    if not shown:
        raise InvalidRequest("--skip", skip, f"less than the {len(rounds)} rounds of the answer")
    starts = accumulate((facts.round_us for _, facts in shown[:-1]), initial=0)
    return [
        Drawn(number, start_us, tokens, facts, tuple(spans_of(facts, start_us)))
        for number, ((tokens, facts), start_us) in enumerate(zip(shown, starts, strict=True), skip + 1)
    ]


def spans_of(facts: RoundFacts, start_us: int) -> Iterator[TimeSpan]:
    """What was done for a round that began then, in order; guesses of the target's own process are in its wait."""
    guesses, verdict = facts.draft_queue_us + facts.draft_compute_us, facts.verify_queue_us + facts.verify_compute_us
    asked_us = start_us + facts.draft_wait_us
    is_hosted = not facts.draft_wait_us and facts.verify_wait_us >= guesses + verdict
    works = [(Lane.TARGET, Doing.QUEUE, facts.verify_queue_us), (Lane.TARGET, Doing.COMPUTE, facts.verify_compute_us)]
    before = [(Lane.DRAFT, Doing.QUEUE, facts.draft_queue_us), (Lane.DRAFT, Doing.COMPUTE, facts.draft_compute_us)]
    if is_hosted:
        yield from _waited(asked_us, facts.verify_wait_us, [*before, *works])
    else:
        yield from _waited(start_us, facts.draft_wait_us, before)
        yield from _waited(asked_us, facts.verify_wait_us, works)


def _waited(start_us: float, wait_us: int, works: Sequence[tuple[Lane, Doing, int]]) -> Iterator[TimeSpan]:
    """A wait with the works that were done meanwhile, which end with it where they are longer."""
    way_us = max(0.0, (wait_us - sum(each for *_, each in works)) / 2)
    at_us = start_us + wait_us - way_us - sum(each for *_, each in works)
    if way_us:
        yield TimeSpan(Lane.WIRE, Doing.WAY, start_us, at_us)
    for lane, doing, work_us in works:
        if work_us:
            yield TimeSpan(lane, doing, at_us, at_us + work_us)
        at_us += work_us
    if way_us:
        yield TimeSpan(Lane.WIRE, Doing.WAY, at_us, at_us + way_us)


def picture(title: str, rounds: Sequence[Drawn], columns: int, column_us: float) -> str:
    """Picture of the lanes as text. What is shorter than a column has one."""
    number, tokens = [" "] * columns, [" "] * columns
    lanes = {lane: [" "] * columns for lane in Lane}
    for each in rounds:
        place = int(each.start_us / column_us)
        for row, text in ((number, f"|{each.number} {each.facts.branches}"), (tokens, f"|{each.tokens}")):
            row[place : place + len(text)] = text
    # What computes is drawn last, and never hidden.
    spans = [span for doing in reversed(SIGNS) for each in rounds for span in each.spans if span.doing is doing]
    for span in spans:
        first = max(0, int(span.start_us / column_us))
        last = max(first + 1, round(span.end_us / column_us))
        lanes[span.lane][first:last] = SIGNS[span.doing] * (min(last, columns) - first)
    rows = [("round", number), *lanes.items(), ("tokens", tokens)]
    total_us = rounds[-1].start_us + rounds[-1].facts.round_us
    count = sum(each.tokens for each in rounds)
    lines = [f"{title}: {count} tokens in {len(rounds)} rounds of {total_us / 1e3:.1f} ms together"]
    lines += [f"{name:>7} {''.join(row[:columns]).rstrip()}" for name, row in rows]
    return "\n".join(lines)


def conclude(wanted: TimelineOptions, pictures: Sequence[tuple[str, Sequence[Drawn]]]) -> None:
    """Prints all pictures on one scale, or their rounds and spans as JSON."""
    if wanted.json:
        shown = [{"setting": title, "rounds": [asdict(each) for each in rounds]} for title, rounds in pictures]
        sys.stdout.write(json.dumps(provenance() | {"timelines": shown}) + "\n")
        return
    longest_us = max(rounds[-1].start_us + rounds[-1].facts.round_us for _, rounds in pictures)
    column_us = max(longest_us, 1) / wanted.columns
    signs = ", ".join(f"{sign} {doing}" for doing, sign in SIGNS.items())
    drawings = "\n\n".join(picture(title, rounds, wanted.columns, column_us) for title, rounds in pictures)
    sys.stdout.write(f"{drawings}\n\n{signs}; a column is {column_us / 1e3:.2f} ms; {machine()}\n")


if __name__ == "__main__":
    run_measurement(app, "timeline")
