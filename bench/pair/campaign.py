"""Runs a grid: real services and gateways around the devices of pairs, with a slow wire between, settings by turns.

The services of a pair serve all its gateways: one for each delay and set of options. They share no prefixes, and
gateways look nothing up, so nothing of one answer helps another. Everything is answered again in plain decoding: by a
target that takes no time, or by the same one where it computes. Services that compute have a core each.
"""

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import count, pairwise, product

from bench.pair.devices import COMPUTING, models_of
from bench.pair.settings import GuessSetting, PairPlan
from bench.pair.wire import WireLink, delayed
from outrider.cli.bench.common import TokensDiffer, rotated
from outrider.cli.bench.load.driver import Block, Burst, Driver, LoadPlan
from outrider.cli.local_stack import Flags, Stack, gateway_launch, metrics_address, model_launch
from outrider.cli.other_work import cpu_times, others_said
from outrider.cli.running import Interrupts, note, service_log
from outrider.client import Speculation
from outrider.errors import InvalidRequest
from outrider.model_files.generation_defaults import NONE
from outrider.process.children import Supervisor

# More than all sessions of a load have: a simulated forward looks through the cache that there is.
KV_TOKENS = 65_536
# Of the reference: its devices take no time that counts.
NO_TIME = 0.001
CHECKED_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class PairRun:
    """One setting under one load, once; times are those of the stretched devices."""

    pair: str
    delay_ms: float
    setting: GuessSetting
    stretch: float
    block: Block

    @property
    def steps(self) -> list[tuple[float, Burst]]:
        """Each message after an answer's first, with the seconds since the one before it."""
        began_s, ended_s = self.block.began.at_s, self.block.ended.at_s
        pairs = ((one, two) for each in self.block.answers for one, two in pairwise(each.bursts))
        return [(two.at_s - one.at_s, two) for one, two in pairs if began_s <= two.at_s <= ended_s]

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all streams while they decode, by the clock of devices that are not stretched."""
        steps = self.steps
        seconds, tokens = sum(seconds for seconds, _ in steps), sum(burst.tokens for _, burst in steps)
        return self.block.streams * tokens / seconds * self.stretch

    @property
    def idle_ms(self) -> float:
        """Milliseconds of a round in which the target's model does not compute, by the same clock."""
        block = self.block
        share = 1 - (block.ended.busy_s["target"] - block.began.busy_s["target"]) / block.seconds
        return 1e3 * share * sum(seconds for seconds, _ in self.steps) / len(self.steps) / self.stretch

    def came(self, what: str) -> float:
        """Share of the rounds for which branches were asked of whose branches came what RoundFacts calls so."""
        found = [burst.branches for _, burst in self.steps if burst.branches]
        return found.count(what) / max(1, len(found))

    @property
    def cpus(self) -> dict[str, float]:
        """CPUs that each process kept busy; the proxies' are not among them."""
        began, ended = self.block.began.cpu_s, self.block.ended.cpu_s
        return {name: (ended[name] - began[name]) / self.block.seconds for name in began}


async def measure(plan: PairPlan, interrupts: Interrupts) -> tuple[list[PairRun], list[str]]:
    """Every block of a grid, in the order in which they ran, and what else took this machine's time meanwhile.

    Raises TokensDiffer where any answer is not plain's.
    """
    runs: list[PairRun] = []
    others: dict[str, None] = {}
    numbers = count()
    stretches = [(name, plan.stretch(name, each)) for name in plan.pairs for each in plan.streams]
    for name, stretch in dict.fromkeys(stretches):
        async with AsyncExitStack() as exits, Supervisor(note, service_log) as supervisor:
            # Services end before the wire between them, which they would miss.
            interrupts.urgent = supervisor.kill
            campaign = PairCampaign(plan, name, stretch, numbers, supervisor, exits)
            await campaign.start()
            before = cpu_times()
            runs += await campaign.run()
            # While the services are still there, whose own time this is.
            others[others_said(before, cpu_times())] = None
    return runs, [each for each in others if each]


def cores() -> list[int]:
    """Where the target's and the draft's service compute. Raises InvalidRequest with one core alone."""
    found = sorted(os.sched_getaffinity(0))[:2]
    if len(found) < 2:
        raise InvalidRequest("--pairs", ",".join(COMPUTING), "left out on one core: both services need their own")
    return found


@dataclass(slots=True)
class PairCampaign:
    """The part of a grid that one pair of services serves."""

    plan: PairPlan
    pair: str
    stretch: float
    numbers: Iterator[int]
    supervisor: Supervisor
    exits: AsyncExitStack

    async def start(self) -> None:
        """Starts the services. Raises ServiceFailed."""
        stack = self.stack
        launches = [model_launch(role, stack) for role in ("target", "draft")]
        if self.pair in COMPUTING:
            places = zip(launches, cores(), strict=True)
            launches = [replace(each, command=("taskset", "-c", str(core), *each.command)) for each, core in places]
        else:
            quick, _ = models_of(self.pair, NO_TIME)
            reference = model_launch("target", replace(stack, target=quick, target_flags={}))
            launches.append(replace(reference, name="reference"))
        await self.supervisor.start(*launches)

    @property
    def stack(self) -> Stack:
        """The pair, with its draft in the target's process too, for those who ask for it there."""
        target, draft = models_of(self.pair, self.stretch)
        return Stack(
            target=target,
            draft=draft,
            target_flags={"--draft-model": draft},
            gateway_flags={"--no-lookup": True, "--generation-defaults": NONE},
            kv_tokens=KV_TOKENS,
            prefix_cache=False,
            rest_port=0,
        )

    async def driver(self, name: str, target: str, draft: str | None, settings: Sequence[GuessSetting]) -> Driver:
        """Starts a gateway in front of services, and connects with it."""
        flags: Flags = settings[0].gateway_flags if settings else {}
        stack = replace(self.stack, gateway_flags=self.stack.gateway_flags | flags)
        [address] = await self.supervisor.start(replace(gateway_launch(stack, target, draft), name=name))
        places = {each: metrics_address(self.supervisor.addresses(each)) for each in ("target", "draft", name)}
        plan = LoadPlan(
            streams=self.plan.streams,
            draft_counts=(),
            temperatures=(self.plan.temperature,),
            tokens=self.plan.tokens,
            requests=self.plan.requests,
            turns=self.plan.turns,
            connections=1,
            seed=0,
        )
        named: dict[str, Speculation] = {each.name: each.speculation for each in settings}
        metrics = {"gateway" if each == name else each: place for each, place in places.items() if place}
        driver = Driver(plan, address, metrics, settings=named, numbers=self.numbers)
        await self.exits.enter_async_context(driver.connected())
        for setting in named:
            await driver.warm_up(setting)
        return driver

    async def run(self) -> list[PairRun]:
        """Measures the loads that have this stretch."""
        plan = self.plan
        services = [self.supervisor.addresses(role)["address"] for role in ("target", "draft")]
        links = [WireLink(each, ms * 1e-3 * self.stretch) for ms in plan.delays_ms for each in services]
        places = iter(self.exits.enter_context(delayed(links)))
        drivers: dict[tuple[float, str], Driver] = {}
        by_flags: dict[str, list[GuessSetting]] = {}
        for setting in plan.settings:
            by_flags.setdefault(str(setting.gateway_flags), []).append(setting)
        for ms in plan.delays_ms:
            target, draft = next(places), next(places)
            for flags, settings in by_flags.items():
                driver = await self.driver(f"gateway at {ms:g} ms {flags}", target, draft, settings)
                drivers |= {(ms, each.name): driver for each in settings}
        answering = self.supervisor.addresses("target" if self.pair in COMPUTING else "reference")
        reference = await self.driver("plain gateway", answering["address"], None, [])
        named, runs = {each.name: each for each in plan.settings}, list[PairRun]()
        streams = [each for each in plan.streams if plan.stretch(self.pair, each) == self.stretch]
        for turn, ms, load in product(range(plan.turns), plan.delays_ms, streams):
            note(f"{self.pair}, {ms:g} ms, {load} streams, turn {turn + 1} of {plan.turns}.")
            for name in rotated(list(named), turn):
                block = await drivers[ms, name].block(plan.temperature, load, name, turn)
                runs.append(PairRun(self.pair, ms, named[name], self.stretch, block))
        note("Asking all of it again without speculation.")
        await check(reference, [run.block for run in runs])
        return runs


async def check(reference: Driver, blocks: Sequence[Block]) -> None:
    """Asks for all answers again in plain decoding. Raises TokensDiffer about the first that differs."""
    room = asyncio.Semaphore(CHECKED_AT_ONCE)

    async def ask(block: Block, place: int) -> None:
        async with room:
            answer = block.answers[place]
            block.plain[answer.number] = await reference.plain_tokens(answer, block.temperature)
        if block.plain[answer.number] != answer.token_ids:
            message = f"Request {answer.number} has other tokens under {block.setting} than plain decoding gives."
            raise TokensDiffer(message, number=answer.number, setting=block.setting)

    try:
        async with asyncio.TaskGroup() as group:
            for block in blocks:
                for place in range(len(block.answers)):
                    group.create_task(ask(block, place))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
