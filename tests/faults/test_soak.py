"""Two gateways under requests of every kind, of which a third leave, while target and draft are killed in turn.

Half a minute by default; OUTRIDER_SOAK_MINUTES asks for more (`make test-fuzz`: 20). Prints what it found as a table.
"""

import asyncio
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple

import httpx
import pytest
from faults.service import KV_TOKENS, MODELS, launch_of
from faults.soak import SURFACES, Gateway, Piece, Reading, has_one_answer, requests
from support.basics import eventually
from support.grid import plain_of
from support.observability import num_descriptors
from support.stack import until_quiet

from outrider.cli.bench.common import machine, markdown, revision
from outrider.cli.bench.load.driver import scrape
from outrider.cli.model_facts import model_facts
from outrider.cli.running import note
from outrider.cli.up import memory_bytes
from outrider.errors import OutriderError
from outrider.process.children import Change, State, Supervisor
from outrider.rpc.channels import open_channel
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub

SEED = 17
MINUTES = float(os.environ.get("OUTRIDER_SOAK_MINUTES", "0.5"))
# A short run has four kills, too.
KILL_EVERY_S = min(20.0, MINUTES * 60 / 5)
NUM_STREAMS = 16
GATEWAYS = ("gateway 1", "gateway 2")
# How long a request may take, and a service until it is back: far more than either needs on any machine.
DEADLINE_S, RESTART_S = 600.0, 180.0
LEAVING_SHARE, LEAVING_MESSAGES, LEAVING_S = 1 / 3, 24, 0.3
# Full within seconds, so that what is remembered on purpose does not look like a leak.
MEMORY_TOKENS = 16_384
SAMPLE_S = 1.0
# The first part of the samples is not looked at; over the others memory may grow by so much: the heap of a process goes
# on growing for a while, some 0.3 MiB with each of the first fifty kills, though no object is left.
WARM_SHARE, MAX_GROWTH_BYTES = 0.25, 24 << 20
BUSY = ("outrider_num_requests_running", "outrider_num_requests_waiting")
SURVIVED = ("target_reopens", "fallback_rounds")
MIB, KIB = 1 << 20, 1 << 10


class Sample(NamedTuple):
    """Memory of a process at a moment."""

    at_s: float
    num_bytes: int


def growth_a_second(samples: Sequence[Sample]) -> float:
    """Bytes, by the line of least squares."""
    return statistics.linear_regression(*zip(*samples, strict=True)).slope


def check_flat(name: str, samples: Sequence[Sample]) -> None:
    """Fails when the memory of a process has grown too much."""
    growth = growth_a_second(samples) * (samples[-1].at_s - samples[0].at_s)
    assert growth <= MAX_GROWTH_BYTES, f"the memory of {name} has grown by {growth / MIB:.1f} MiB"


@dataclass
class Soak:
    """A running stack, its clients, and what was found. `findings` also has what processes log but warnings."""

    supervisor: Supervisor
    services: Mapping[str, str]
    gateways: Sequence[Gateway]
    changes: Sequence[Change]
    findings: list[str]
    expected: dict[int, Sequence[Sequence[int]]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[Sample]] = field(default_factory=lambda: {name: [] for name in GATEWAYS})
    longest_pause_s: float = 0.0
    is_over: bool = False

    async def stream(self, number: int) -> None:
        """Asks one request after the other until the soak is over. What is wrong with one ends nothing."""
        chance = Random(f"{SEED} {number}")
        while not self.is_over:
            which, gateway = chance.randrange(len(requests())), chance.choice(self.gateways)
            surface, leaves_behind = chance.choice(list(SURFACES)), None
            if chance.random() < LEAVING_SHARE:
                leaves_behind = 0 if surface == "REST, whole" else chance.randrange(LEAVING_MESSAGES)
            leaves_s = LEAVING_S * chance.random()
            reading, messages = Reading(self.expected.get(which)), 0
            asked_s = last_s = time.monotonic()
            pieces = SURFACES[surface](gateway, requests()[which])
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(DEADLINE_S) as patience:
                    if leaves_behind == 0:
                        patience.reschedule(loop.time() + leaves_s)
                    async for piece in pieces:
                        reading.take(piece)
                        messages += 1
                        now_s = time.monotonic()
                        if surface != "REST, whole":
                            self.longest_pause_s = max(self.longest_pause_s, now_s - last_s)
                        last_s = now_s
                        if messages == leaves_behind:
                            patience.reschedule(loop.time() + leaves_s)
                    reading.check_whole(requests()[which])
                kind = "drawn under ratio or block" if reading.expected is None else "equal to plain decoding"
                self.counts[f"{surface}: {kind}"] += 1
                self.counts["tokens of whole answers"] += sum(map(len, reading.said.values()))
            except TimeoutError:
                if leaves_behind is None or messages < leaves_behind:
                    self._found(number, surface, which, f"has no end after {time.monotonic() - asked_s:.0f} s")
                else:
                    self.counts[f"{surface}: cancelled"] += 1
            except (AssertionError, OutriderError, httpx.HTTPError) as error:
                self._found(number, surface, which, repr(error))
            finally:
                await pieces.aclose()

    async def kill_in_turn(self) -> None:
        """Kills target and draft by turns, each when both serve, and lets the last incarnations work for a while."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        roles = tuple(self.services)
        for number in range(1, round(MINUTES * 60 / KILL_EVERY_S)):
            await asyncio.sleep(began_s + number * KILL_EVERY_S - loop.time())
            role = roles[number % len(roles)]
            pid = self.supervisor.pid(role)
            os.kill(pid, signal.SIGKILL)
            self.counts[f"kills of the {role}"] += 1
            await eventually(lambda role=role, pid=pid: self.supervisor.pid(role) != pid, RESTART_S)
        await asyncio.sleep(KILL_EVERY_S)
        self.is_over = True

    async def sample(self) -> None:
        """Looks at the memory of the gateways until the soak is over."""
        while not self.is_over:
            for name, samples in self.samples.items():
                samples.append(Sample(time.monotonic(), memory_bytes(self.supervisor.pid(name)) or 0))
            await asyncio.sleep(SAMPLE_S)

    def warm(self, name: str) -> Sequence[Sample]:
        """The samples of a gateway that has been at work for a while."""
        samples = self.samples[name]
        return samples[int(len(samples) * WARM_SHARE) :]

    def descriptors(self) -> dict[str, int]:
        """How many each gateway has open."""
        return {name: num_descriptors(self.supervisor.pid(name)) for name in GATEWAYS}

    async def quiet(self) -> None:
        """Waits until no service holds anything, and no gateway has a request."""
        for address in self.services.values():
            async with open_channel(address) as channel:
                await until_quiet(channel)

        async def is_idle() -> bool:
            places = [self.supervisor.addresses(name)["rest"] for name in GATEWAYS]
            samples = await asyncio.gather(*(scrape(place, *BUSY) for place in places))
            return [sample.value for each in samples for sample in each] == [0.0] * len(BUSY) * len(places)

        await eventually(is_idle)

    def died(self) -> Counter[str]:
        """How often each process ended."""
        return Counter(change.service for change in self.changes if change.state is State.DIED)

    async def report(self, descriptors: Mapping[str, int]) -> str:
        """All figures as a table."""
        survived = sum((gateway.survived for gateway in self.gateways), Counter[str]())
        rows = [[name, f"{self.counts[name]:,}"] for name in sorted(self.counts)]
        rows += [[name.replace("_", " "), f"{count:,}"] for name, count in sorted(survived.items())]
        rows += [["longest pause between two messages, s", f"{self.longest_pause_s:.1f}"]]
        for name in GATEWAYS:
            samples = self.warm(name)
            shown = (samples[0], samples[len(samples) // 2], samples[-1])
            memory = ", ".join(f"{each.num_bytes / MIB:.1f}" for each in shown)
            rows += [
                [f"{name}: memory when warm, in the middle, at the end, MiB", memory],
                [f"{name}: slope, KiB a minute", f"{60 * growth_a_second(samples) / KIB:.1f}"],
                [f"{name}: descriptors before and after", f"{descriptors[name]}, {self.descriptors()[name]}"],
            ]
        for role, address in self.services.items():
            facts = await model_facts(address)
            held = f"{facts.sessions}, {facts.free_blocks:,} of {facts.blocks:,}"
            rows += [[f"{role} in the end: sessions, free blocks", held]]
        return markdown(["what", "found"], [*rows, ["wrong", f"{len(self.findings)}"]])

    def _found(self, number: int, surface: str, which: int, what: str) -> None:
        finding = f"stream {number}, {surface}, request {which}: {what}"
        note(finding)
        self.findings.append(finding)


@asynccontextmanager
async def soaking() -> AsyncIterator[Soak]:
    """Target, draft and two gateways, kept alive as `outrider up` does it."""
    changes: list[Change] = []
    findings: list[str] = []

    def log(name: str, line: str) -> None:
        # That a service was lost is a warning, and comes once for each request.
        if '"level": "warning"' not in line:
            findings.append(f"{name}: {line}")

    async with AsyncExitStack() as life:
        supervisor = Supervisor(note, log, observe=changes.append)
        await life.enter_async_context(supervisor)
        flags = {"threads": 1, "kv_tokens": KV_TOKENS}
        launches = [replace(launch_of(f"{role}_service", model=MODELS[role], **flags), name=role) for role in MODELS]
        services = dict(zip(MODELS, await supervisor.start(*launches), strict=True))
        launch = launch_of(
            "gateway",
            **services,
            tokenizer=MODELS["target"],
            lookup_memory_tokens=MEMORY_TOKENS,
            # A machine may be slow to start a service; no request may end for that.
            rebuild_budget_seconds=RESTART_S,
        )
        launch = replace(launch, further={"rest": "127.0.0.1:0"})
        await supervisor.start(*(replace(launch, name=name) for name in GATEWAYS))
        clients = []
        for name in GATEWAYS:
            places = supervisor.addresses(name)
            channel = await life.enter_async_context(open_channel(places["address"]))
            # A connection for each request, so that none is left when they have ended.
            limits = httpx.Limits(max_keepalive_connections=0)
            http = httpx.AsyncClient(base_url=f"http://{places['rest']}", timeout=None, limits=limits, trust_env=False)
            await life.enter_async_context(http)
            clients.append(Gateway(GenerationServiceStub(channel), http))
        watching = asyncio.create_task(supervisor.watch())
        try:
            yield Soak(supervisor, services, clients, changes, findings)
        finally:
            watching.cancel()
            await asyncio.wait({watching})


async def plain_answers(gateway: Gateway) -> dict[int, Sequence[Sequence[int]]]:
    """What each request that has one answer gets by plain decoding, before anything happens to the stack."""
    slots = asyncio.Semaphore(NUM_STREAMS)

    async def answer(fields: Mapping[str, Any]) -> Sequence[Sequence[int]]:
        reading = Reading(None)
        async with slots, asyncio.timeout(DEADLINE_S):
            # With a salt of its own: nothing that is compared with it may come from its cached keys.
            async for piece in gateway.over_grpc({**fields, "cache_salt": "plain"}):
                reading.take(piece)
        reading.check_whole(fields)
        return [reading.said[index] for index in sorted(reading.said)]

    asked = {number: plain_of(fields) for number, fields in enumerate(requests()) if has_one_answer(fields)}
    return dict(zip(asked, await asyncio.gather(*map(answer, asked.values())), strict=True))


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.timeout(1800 + MINUTES * 60)
async def test_no_kill_is_seen_and_nothing_is_left() -> None:
    """No token is wrong, lost or doubled, every request ends, memory is flat, and all blocks are free in the end."""
    async with soaking() as soak:
        soak.expected |= await plain_answers(soak.gateways[0])
        for gateway in soak.gateways:
            for read in (gateway.over_grpc, gateway.over_rest):
                assert [piece async for piece in read(requests()[0])]
        before = soak.descriptors()
        async with asyncio.TaskGroup() as group:
            for work in (soak.kill_in_turn(), soak.sample(), *map(soak.stream, range(NUM_STREAMS))):
                group.create_task(work)
        try:
            await soak.quiet()
        finally:
            note(f"\nSeed {SEED}, {MINUTES:g} minutes, {NUM_STREAMS} streams; {machine()}; commit {revision()}.\n")
            note(await soak.report(before))
        assert soak.findings == []
        kills = {role: soak.counts[f"kills of the {role}"] for role in soak.services}
        assert soak.died() == kills
        assert min(kills.values()) > 0
        # They were felt.
        assert all(sum(gateway.survived[name] for gateway in soak.gateways) for name in SURVIVED)
        for name in GATEWAYS:
            check_flat(name, soak.warm(name))
        await eventually(lambda: all(count <= before[name] for name, count in soak.descriptors().items()))


@pytest.mark.parametrize(
    ("pieces", "complaint"),
    [
        ([Piece(0, [5, 7], has_ended=False)], "says"),
        ([Piece(0, [5, 6], has_ended=False), Piece(0, [8], has_ended=False)], "says"),
        ([Piece(0, [5], has_ended=False), Piece(0, [5], has_ended=False)], "says"),
        ([Piece(0, [5, 6], has_ended=True)], "says"),
        ([Piece(0, [5, 6, 7, 8], has_ended=False)], "says"),
        ([Piece(0, [5, 6, 7], has_ended=True), Piece(0, [], has_ended=True)], "behind its end"),
        ([Piece(0, [5, 6, 7], has_ended=True), Piece(1, [9], has_ended=False)], "have an end"),
        ([Piece(0, [5, 6, 7], has_ended=True)], "have an end"),
    ],
    ids=["wrong", "lost", "doubled", "too short", "too long", "two ends", "no end", "no sample"],
)
def test_what_is_wrong_with_an_answer_is_found(pieces: Sequence[Piece], complaint: str) -> None:
    """Of two samples, of which the first is 5, 6, 7 and the second 9."""

    def read() -> None:
        reading = Reading([[5, 6, 7], [9]])
        for piece in pieces:
            reading.take(piece)
        reading.check_whole({"sample_count": 2})

    with pytest.raises(AssertionError, match=complaint):
        read()


def test_memory_that_grows_with_every_request_is_found() -> None:
    """Two KiB for each of 20 requests a second are too much within twenty minutes; noise of some MiB is not."""
    noise = Random(SEED)
    flat = [Sample(second, (200 << 20) + noise.randrange(4 << 20)) for second in range(1200)]
    check_flat("gateway", flat)
    with pytest.raises(AssertionError, match="has grown by"):
        check_flat("gateway", [Sample(each.at_s, each.num_bytes + int(each.at_s) * 20 * 2048) for each in flat])
