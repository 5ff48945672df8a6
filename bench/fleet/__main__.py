"""`python -m bench.fleet`: what further equal targets bring a gateway, with real services on simulated devices.

Weak scaling: so many streams for each target, and as many drafts as asked for. A share of the prompts begin with one of
some long texts, the first of which is the most usual by far (Zipf). Some answers are asked for again in plain decoding,
and no figure is shown where one differs.
"""

import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from statistics import fmean, pstdev
from typing import Annotated

import typer

from outrider.cli.bench.common import (
    OPENINGS,
    SaveFile,
    TokensDiffer,
    fresh_prompt,
    machine,
    markdown,
    parse_numbers,
    provenance,
    revision,
)
from outrider.cli.bench.load.driver import CHECKED, Block, Driver, LoadPlan, scrape
from outrider.cli.local_stack import Stack, gateway_launch, metrics_address, model_launch
from outrider.cli.options import SHARED_OPTIONS
from outrider.cli.running import Interrupts, note, run, service_log
from outrider.model_files.generation_defaults import NONE
from outrider.process import telemetry
from outrider.process.children import Supervisor
from outrider.process.options import between, grouped, run_app, service_app

PLACEMENTS = "outrider_target_placements_total"
QUERIES, HITS = "outrider_prefix_cache_queries_total", "outrider_prefix_cache_hits_total"
EXPONENT = 1.2
LINES = 12  # of a shared beginning, some 250 tokens

app = service_app()
counted = partial(typer.Option, metavar="N")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Options: the fleets, their load, and where the figures go."""

    targets: Annotated[str, typer.Option(help="Numbers of targets, each a fleet.", metavar="N,...")] = "1,2,4"
    drafts: Annotated[int, counted(help="Targets for each draft service.", callback=between(1, 64))] = 1
    draft_counts: Annotated[str, typer.Option(help="Guesses a round.", metavar="K,...")] = "0,4"
    streams: Annotated[int, counted(help="Requests side by side for each target.", callback=between(1, 256))] = 8
    shared: Annotated[float, typer.Option(help="Share of prompts with a shared beginning.", callback=between(0, 1))] = (
        0.5
    )
    beginnings: Annotated[int, counted(help="Shared beginnings.", callback=between(1, 64))] = 16
    tokens: Annotated[int, counted(help="Tokens a request.", callback=between(16, 4096))] = 48
    requests: Annotated[int, counted(help="Requests of a stream in a block.", callback=between(2, 1000))] = 4
    stretch: Annotated[
        float, typer.Option(help="Devices take so many times as long, and figures are divided by it.", metavar="X")
    ] = 16.0
    save: SaveFile = None


@dataclass(frozen=True, slots=True)
class FleetRun:
    """One fleet under one load."""

    num_targets: int
    draft_count: int
    tokens_per_s: float
    """By the clock of devices that are not stretched."""
    busy: tuple[float, ...]
    """Share of the time in which each target's device computed."""
    drafts_busy: tuple[float, ...]
    first_token_ms: float
    """Median, by the same clock."""
    hit_rate: float
    """Share of prompts' tokens that targets found in their caches."""
    placements: Mapping[str, float]
    cpus: float
    """CPUs that the busiest process kept busy."""

    @property
    def spread(self) -> float:
        """Coefficient of variation of the busy shares."""
        return pstdev(self.busy) / fmean(self.busy)


@app.command()
@grouped
def fleet(*, wanted: FleetOptions) -> None:
    """Measures the same load for each target with one and with several targets."""
    telemetry.configure_logs("warning")
    sizes = parse_numbers("--targets", wanted.targets, int, 1, 64)
    draft_counts = parse_numbers("--draft-counts", wanted.draft_counts, int, 0, 16)

    async def measuring(interrupts: Interrupts) -> None:
        runs = [each for size in sizes for each in await measured(size, draft_counts, wanted, interrupts)]
        conclude(wanted, runs)

    run(measuring, options={**SHARED_OPTIONS, "max_tokens": "--tokens"})


def prompt_of(number: int, wanted: FleetOptions) -> str:
    """A prompt that no other number has, after a beginning that others share, or after none."""
    dice = random.Random(number)
    if dice.random() >= wanted.shared:
        return fresh_prompt(number)
    ranks = range(wanted.beginnings)
    [rank] = dice.choices(ranks, [(1 + each) ** -EXPONENT for each in ranks])
    lines = random.Random(f"beginning {rank}").choices(OPENINGS, k=LINES)
    return f"Book {rank}. {' '.join(lines)} {fresh_prompt(number)}"


async def measured(
    size: int, draft_counts: Sequence[int], wanted: FleetOptions, interrupts: Interrupts
) -> list[FleetRun]:
    """The runs of one fleet. Raises ServiceFailed, TokensDiffer, NothingToMeasure."""
    stack = Stack(
        target=f"sim:h100-8b@rows=0.13,stretch={wanted.stretch:g}",
        draft=f"sim:h100-1b@acceptance=0.75+0.1,rows=0.15,stretch={wanted.stretch:g}",
        gateway_flags={"--no-lookup": True, "--generation-defaults": NONE},
        kv_tokens=65_536,
        rest_port=0,
    )
    plan = LoadPlan(
        streams=(size * wanted.streams,),
        draft_counts=tuple(draft_counts),
        temperatures=(0.0,),
        tokens=wanted.tokens,
        requests=wanted.requests,
        turns=1,
        connections=1,
        seed=0,
    )
    async with Supervisor(note, service_log) as supervisor:
        interrupts.urgent = supervisor.kill
        names = {role: [f"{role} {number + 1}" for number in range(most)] for role, most in _sizes(size, wanted)}
        launches = [replace(model_launch(role, stack), name=name) for role in names for name in names[role]]
        await supervisor.start(*launches)
        places = {role: ",".join(supervisor.addresses(name)["address"] for name in names[role]) for role in names}
        [address] = await supervisor.start(gateway_launch(stack, places["target"], places["draft"]))
        processes = [*names["target"], *names["draft"], "gateway"]
        metrics = {name: place for name in processes if (place := metrics_address(supervisor.addresses(name)))}
        driver = Driver(plan, address, metrics, numbers=count(1), prompt=partial(prompt_of, wanted=wanted))
        async with driver.connected():
            return [await _run(driver, names["target"], name, wanted) for name in driver.settings]


def _sizes(size: int, wanted: FleetOptions) -> list[tuple[str, int]]:
    return [("target", size), ("draft", -(-size // wanted.drafts))]


async def _run(driver: Driver, targets: Sequence[str], setting: str, wanted: FleetOptions) -> FleetRun:
    note(f"{len(targets)} targets, {setting}.")
    await driver.warm_up(setting)
    before = await _counts(driver, targets)
    block = await driver.block(0.0, len(targets) * wanted.streams, setting, 0)
    after = await _counts(driver, targets)
    await _check(driver, block)
    found = {name: after[name] - before.get(name, 0.0) for name in after}
    began, ended = block.began, block.ended
    busy = {each: (ended.busy_s[each] - began.busy_s[each]) / block.seconds for each in ended.busy_s}
    firsts = sorted(block.first_tokens_s)
    return FleetRun(
        len(targets),
        driver.settings[setting].draft_count or 0,
        block.tokens_per_s * wanted.stretch,
        tuple(busy[each] for each in targets),
        tuple(share for each, share in busy.items() if each not in targets),
        1e3 * firsts[len(firsts) // 2] / wanted.stretch,
        found.pop(HITS) / max(found.pop(QUERIES), 1.0),
        found,
        max((ended.cpu_s[each] - began.cpu_s[each]) / block.seconds for each in began.cpu_s),
    )


async def _counts(driver: Driver, targets: Sequence[str]) -> dict[str, float]:
    """Placements by reason, and the tokens that targets looked for in their caches and found there."""
    counts = {each.labels["reason"]: each.value for each in await scrape(driver.metrics["gateway"], PLACEMENTS)}
    samples = [each for target in targets for each in await scrape(driver.metrics[target], QUERIES, HITS)]
    return counts | {name: sum(each.value for each in samples if each.name == name) for name in (QUERIES, HITS)}


async def _check(driver: Driver, block: Block) -> None:
    for answer in block.answers[-CHECKED:]:
        if await driver.plain_tokens(answer, block.temperature) != answer.token_ids:
            message = f"Request {answer.number} has other tokens under {block.setting} than plain decoding gives."
            raise TokensDiffer(message, number=answer.number, setting=block.setting)


def conclude(wanted: FleetOptions, runs: Sequence[FleetRun]) -> None:
    """Writes every run to the file when there is one, and prints the report."""
    if wanted.save is not None:
        document = {"options": asdict(replace(wanted, save=None)), "runs": [asdict(each) for each in runs]}
        wanted.save.write_text(json.dumps(provenance() | document), encoding="utf-8")
    head = [
        "targets",
        "K",
        "tokens/s",
        "of one, per target",
        "busy",
        "CoV",
        "drafts",
        "first token ms",
        "hits",
        "placed",
        "CPUs",
    ]
    ones = {each.draft_count: each.tokens_per_s / each.num_targets for each in reversed(runs)}
    rows = [
        [
            str(each.num_targets),
            str(each.draft_count),
            f"{each.tokens_per_s:.0f}",
            f"{each.tokens_per_s / each.num_targets / ones[each.draft_count]:.2f}",
            f"{min(each.busy):.2f} to {max(each.busy):.2f}",
            f"{each.spread:.3f}",
            f"{min(each.drafts_busy):.2f} to {max(each.drafts_busy):.2f}",
            f"{each.first_token_ms:.0f}",
            f"{each.hit_rate:.2f}",
            ", ".join(f"{reason} {number:g}" for reason, number in each.placements.items() if number),
            f"{each.cpus:.2f}",
        ]
        for each in runs
    ]
    sys.stdout.write(
        f"## All devices SIMULATED: targets that share the sessions of one gateway\n\n{wanted.streams} streams a "
        f"target, {wanted.tokens} tokens a request, {wanted.shared:.0%} of the prompts with one of "
        f"{wanted.beginnings} shared beginnings, devices {wanted.stretch:g} times as slow; {machine()}; commit "
        f"{revision() or 'unknown'}.\n\n"
        f"{markdown(head, rows)}\n\nThe busiest process's CPUs must be far from 1, or the host was measured.\n"
    )


if __name__ == "__main__":
    run_app(app)
