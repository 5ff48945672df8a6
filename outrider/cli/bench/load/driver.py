"""Keeps a gateway busy with a number of streams, and reads every process's clocks around the time when all of them run.

A stream asks its next request when its last one has ended. The first request of each is shorter, from a share of the
tokens up to all of them, so that the streams do not begin and end in step. Figures are of the *window*: from the moment
when every stream has had a first token, to the moment when the first stream finds nothing left to ask.

The client must not be what limits: it keeps messages as bytes with the time at which they came, and reads them when the
block is over.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.client import HTTPException
from itertools import count, islice, pairwise
from typing import NamedTuple
from urllib.parse import urlencode
from urllib.request import urlopen

import grpc
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from outrider.cli.bench.common import PLAIN, fresh_prompt, rotated, settings_of
from outrider.cli.running import note
from outrider.client import Round, Speculation
from outrider.client.calls import Caller, Terms
from outrider.client.events import event_from
from outrider.client.requests import generate_request
from outrider.errors import OutriderError, PeerLost
from outrider.rpc.channels import open_channel
from outrider.rpc.tls import Tls
from outrider.v1 import generation_service_pb2 as pb

METHOD = f"/{pb.DESCRIPTOR.services_by_name['GenerationService'].full_name}/Generate"
CLIENT = "client"
CPU, DEVICE_BUSY, MODEL = "process_cpu_seconds_total", "outrider_device_busy_seconds_total", "outrider_model_info"
SCRAPE_TIMEOUT_S = 10.0
# Of a block, however few its streams are: what a scrape costs the processes is little beside so many.
LEAST_REQUESTS = 8
# Answers of a block that are asked for again without speculation when all is measured.
CHECKED = 4

GenerateCall = grpc.aio.UnaryStreamMultiCallable[pb.GenerateRequest, bytes]


class NothingToMeasure(OutriderError):
    """The streams never ran side by side for a few rounds; more requests or more tokens help, or fewer streams."""

    status = "FAILED_PRECONDITION"
    reason = "NOTHING_TO_MEASURE"
    exit_code = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Plan of a run: a grid of loads, and how often each is asked for."""

    streams: tuple[int, ...]
    draft_counts: tuple[int | None, ...]
    """Draft tokens a round; 0 is plain decoding, and None leaves it to the gateway."""
    drafters: tuple[str, ...] = ("",)
    """Drafters of the guesses; an empty name leaves the choice to the gateway."""
    trees: tuple[tuple[int, int], ...] = ()
    """Rows and most depth of trees that a draft grows, each a setting too."""
    temperatures: tuple[float, ...]
    tokens: int
    requests: int
    """Requests of each stream in a block, the first and shorter one included; one stream has LEAST_REQUESTS or more."""
    turns: int
    connections: int
    seed: int

    @property
    def settings(self) -> dict[str, Speculation]:
        """All settings by their names."""
        return settings_of(self.draft_counts, self.drafters, self.trees)


class Burst(NamedTuple):
    """Tokens that one message brought, and when it came, by the client's clock."""

    at_s: float
    tokens: int
    drafted: int
    evaluated: int
    accepted: int
    branches: str = ""
    """What came of branches; see RoundFacts."""


@dataclass(frozen=True, slots=True)
class LoadAnswer:
    """The answer to a request; its number decides its prompt and its seed."""

    number: int
    asked_s: float
    token_ids: list[int]
    bursts: list[Burst]


@dataclass(frozen=True, slots=True)
class Clocks:
    """Seconds used up at a moment, by process: of the CPUs, and of the device where that is reported."""

    at_s: float
    cpu_s: Mapping[str, float]
    busy_s: Mapping[str, float]


@dataclass(frozen=True)
class Block:
    """Results of one setting under one load, once; properties are of the window."""

    temperature: float
    streams: int
    setting: str
    turn: int
    began: Clocks
    ended: Clocks
    answers: list[LoadAnswer]
    plain: dict[int, list[int]] = field(default_factory=dict)
    """Tokens that plain decoding gives to some of its requests, by their numbers."""

    @property
    def seconds(self) -> float:
        return self.ended.at_s - self.began.at_s

    @cached_property
    def bursts(self) -> list[Burst]:
        """One for each round that a client saw."""
        return [burst for each in self.answers for burst in each.bursts if self._holds(burst.at_s)]

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all streams together."""
        return sum(burst.tokens for burst in self.bursts) / self.seconds

    @cached_property
    def gaps_s(self) -> list[float]:
        """Seconds from each message of an answer to the next one."""
        pairs = ((one.at_s, two.at_s) for each in self.answers for one, two in pairwise(each.bursts))
        return [later_s - earlier_s for earlier_s, later_s in pairs if self._holds(later_s)]

    @property
    def first_tokens_s(self) -> list[float]:
        """Seconds from request to first token, of requests that began within the window."""
        return [each.bursts[0].at_s - each.asked_s for each in self.answers if self._holds(each.asked_s)]

    def _holds(self, at_s: float) -> bool:
        return self.began.at_s <= at_s <= self.ended.at_s


@dataclass(slots=True)
class Driver:
    """Runs a plan against the gateway at an address; `metrics` are HOST:PORT of /metrics by the names of processes."""

    plan: LoadPlan
    address: str
    metrics: Mapping[str, str]
    api_key: str | None = field(default=None, repr=False)
    tls: Tls | None = None
    settings: Mapping[str, Speculation] = field(default_factory=dict)
    """Settings by their names; by default those of the plan."""
    numbers: Iterator[int] = field(default_factory=count)
    """Numbers of the requests, of which no other driver of the same models must have any."""
    prompt: Callable[[int], str] = fresh_prompt
    models: dict[str, str] = field(default_factory=dict)
    """Names of the served models by process, as far as they have been read."""
    _calls: list[GenerateCall] = field(default_factory=list)
    _terms: Terms = field(init=False)

    def __post_init__(self) -> None:
        self.settings = self.settings or self.plan.settings

    async def run(self) -> list[Block]:
        """Measures all blocks. Raises what the gateway answers, PeerLost without /metrics, and NothingToMeasure."""
        plan, settings, blocks = self.plan, list(self.settings), []
        async with self.connected():
            note("Warming up.")
            for setting in settings:
                await self.warm_up(setting)
                await self.block(plan.temperatures[0], max(plan.streams), setting, 0)
            for turn in range(plan.turns):
                note(f"Turn {turn + 1} of {plan.turns}.")
                for temperature in plan.temperatures:
                    for streams in plan.streams:
                        for setting in rotated(settings, turn):
                            blocks.append(await self.block(temperature, streams, setting, turn))
            note("Asking some of it again without speculation.")
            for block in blocks:
                if block.setting != PLAIN:
                    for answer in block.answers[-CHECKED:]:
                        block.plain[answer.number] = await self.plain_tokens(answer, block.temperature)
        return blocks

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Keeps the connections that all requests share. Raises PeerLost without /metrics."""
        samples = await asyncio.gather(*(scrape(place, MODEL) for place in self.metrics.values()))
        for process, found in zip(self.metrics, samples, strict=True):
            self.models.update((process, sample.labels["model_name"]) for sample in found)
        caller = Caller(self.address, None, None, self.api_key, self.tls)
        self._terms = caller.terms({})
        async with AsyncExitStack() as exits:
            for _ in range(self.plan.connections):
                # Else channels to one address would share one connection.
                own = (("grpc.use_local_subchannel_pool", 1),)
                channel = await exits.enter_async_context(open_channel(self.address, caller.files, own))
                # Without a deserializer messages stay bytes.
                serialize = pb.GenerateRequest.SerializeToString
                self._calls.append(channel.unary_stream(METHOD, request_serializer=serialize))
            yield

    async def warm_up(self, setting: str) -> None:
        """Asks one request, alone and whole, so that a refusal is about what was asked for."""
        plan = self.plan
        request = self._request(next(self.numbers), plan.temperatures[0], self.settings[setting], plan.tokens)
        async for _ in self._messages(self._calls[0], request):
            pass

    async def plain_tokens(self, answer: LoadAnswer, temperature: float) -> list[int]:
        """Tokens of the same request in plain decoding, as many as the answer has."""
        request = self._request(answer.number, temperature, Speculation(enabled=False), len(answer.token_ids))
        messages = [each async for each in self._messages(self._calls[0], request)]
        return read_answer(answer.number, 0.0, messages).token_ids

    async def block(self, temperature: float, streams: int, setting: str, turn: int) -> Block:
        """Measures one setting under one load. Raises what the gateway answers, and NothingToMeasure."""
        # These were not asked before: what was answered before is remembered, and would be guessed.
        asked = list(islice(self.numbers, max(streams * self.plan.requests, LEAST_REQUESTS)))
        places, waiting = iter(enumerate(asked, 1)), set(asked[:streams])
        all_run, one_ended = asyncio.Event(), asyncio.Event()
        found: list[tuple[int, float, list[tuple[float, bytes]]]] = []

        async def stream(call: GenerateCall) -> None:
            # All streams take from the same numbers, so that none idles long before the last.
            for place, number in places:
                tokens = self.plan.tokens
                if number in waiting:
                    tokens = max(1, tokens * place // streams)
                request, messages = self._request(number, temperature, self.settings[setting], tokens), []
                asked_s = time.perf_counter()
                async for message in self._messages(call, request):
                    messages.append(message)
                    waiting.discard(number)
                    if not waiting:
                        all_run.set()
                found.append((number, asked_s, messages))
            one_ended.set()

        try:
            async with asyncio.TaskGroup() as group:
                for index in range(streams):
                    group.create_task(stream(self._calls[index % len(self._calls)]))
                await all_run.wait()
                began, is_late = await self._clocks(), one_ended.is_set()
                await one_ended.wait()
                ended = await self._clocks()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        answers = [read_answer(*each) for each in sorted(found, key=lambda each: each[0])]
        block = Block(temperature, streams, setting, turn, began, ended, answers)
        if is_late or not (block.gaps_s and block.first_tokens_s):
            raise NothingToMeasure(
                f"{streams} streams did not run side by side long enough under {setting}: ask for more --requests, "
                "more --tokens, or fewer --streams."
            )
        return block

    async def _messages(self, call: GenerateCall, request: pb.GenerateRequest) -> AsyncIterator[tuple[float, bytes]]:
        reading = call(request, metadata=self._terms.metadata)
        try:
            while isinstance(message := await reading.read(), bytes):
                yield time.perf_counter(), message
        except grpc.aio.AioRpcError as error:
            raise self._terms.failure(error) from None

    def _request(self, number: int, temperature: float, speculation: Speculation, tokens: int) -> pb.GenerateRequest:
        return generate_request(
            self.prompt(number),
            {
                "max_tokens": tokens,
                "ignore_eos": True,
                "temperature": temperature,
                "seed": self.plan.seed + number,
                "speculation": speculation,
            },
        )

    async def _clocks(self) -> Clocks:
        """Clocks of this client and of all processes whose metrics are known."""
        started_s, cpu_s = time.perf_counter(), {CLIENT: time.process_time()}
        busy_s: dict[str, float] = {}
        samples = await asyncio.gather(*(scrape(place, CPU, DEVICE_BUSY) for place in self.metrics.values()))
        for process, found in zip(self.metrics, samples, strict=True):
            for name, clock in ((CPU, cpu_s), (DEVICE_BUSY, busy_s)):
                # Of a gateway with several workers each may have its own.
                if values := [sample.value for sample in found if sample.name == name]:
                    clock[process] = sum(values)
        return Clocks((started_s + time.perf_counter()) / 2, cpu_s, busy_s)


async def scrape(address: str, *names: str) -> list[Sample]:
    """Samples that a process has under these names. Raises PeerLost where no process serves /metrics."""

    def read() -> str:
        query = urlencode([("name[]", name) for name in names])
        with urlopen(f"http://{address}/metrics?{query}", timeout=SCRAPE_TIMEOUT_S) as answer:
            return str(answer.read(), encoding="utf-8")

    try:
        text = await asyncio.to_thread(read)
    except (OSError, HTTPException) as error:
        raise PeerLost(f"Nothing serves metrics on {address}: {error}.", address=address) from None
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return [sample for sample in samples if sample.name in names]


def read_answer(number: int, asked_s: float, messages: Sequence[tuple[float, bytes]]) -> LoadAnswer:
    """Answer that the messages of one request make."""
    answer = LoadAnswer(number, asked_s, [], [])
    for at_s, message in messages:
        event = event_from(pb.GenerateResponse.FromString(message))
        if isinstance(event, Round):
            facts = event.facts
            answer.token_ids.extend(token.token_id for token in event.tokens)
            counts = facts.draft_count, facts.evaluated_count, facts.accepted_count
            answer.bursts.append(Burst(at_s, len(event.tokens), *counts, facts.branches))
    return answer
