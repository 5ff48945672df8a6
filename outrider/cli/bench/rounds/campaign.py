"""Measures everything of a plan in one run, interleaved: no instrument and no setting has a quiet minute of its own.

A cycle belongs to one prompt: some samples of every instrument, some pings, then the same request in all settings,
in another order each time. Tokens are compared at once, because a figure about other tokens would be about nothing.
"""

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from gateway.text.tokenizer import Tokenizer
from outrider.cli.bench.common import TokensDiffer, rotated, settings_of, spec_of, timed
from outrider.cli.bench.rounds.instruments import Instruments
from outrider.cli.bench.rounds.samples import (
    BARE,
    DRAFT,
    PING,
    TARGET,
    Measurements,
    RequestSample,
    RoundSample,
    RoundsPlan,
    TimedAnswer,
    TimeSample,
)
from outrider.cli.running import note
from outrider.client import AsyncClient, Speculation
from outrider.errors import ProtocolViolation
from outrider.parameters import SessionSpec
from outrider.rpc.errors import error_from
from outrider.rpc.messages.session import open_message
from outrider.v1 import draft_service_pb2 as draft_pb
from outrider.v1 import target_service_pb2 as target_pb
from outrider.v1 import types_pb2 as pb
from outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from outrider.v1.target_service_pb2_grpc import TargetServiceStub

PINGS = 20  # on each link in a cycle


class Campaign:
    """One run over a stack that serves."""

    def __init__(
        self,
        plan: RoundsPlan,
        instruments: Instruments,
        gateway: AsyncClient,
        target: grpc.aio.Channel,
        draft: grpc.aio.Channel,
    ) -> None:
        self._plan, self._instruments = plan, instruments
        self._gateway, self._target, self._draft = gateway, target, draft
        self._expected: dict[tuple[int, float], tuple[int, ...]] = {}
        self._settings = settings_of((0, *plan.draft_counts, None))

    async def run(self) -> Measurements:
        """Takes all turns, after one that warms up and is dropped. Raises TokensDiffer and what services answer."""
        tokenizer = Tokenizer(self._plan.stack.target)
        prompts = [await tokenizer.encode(prompt) for prompt in self._plan.prompts]
        measurements, turns = Measurements(), self._plan.turns
        for turn in range(turns + 1):
            note(f"Turn {turn} of {turns}{'' if turn else ', to warm up'}.")
            for number, prompt in enumerate(prompts):
                await self._cycle(measurements, turn, number, prompt)
            if turn == 0:
                measurements = Measurements()
        return measurements

    async def _cycle(self, measurements: Measurements, turn: int, number: int, prompt: Sequence[int]) -> None:
        self._instruments.sample(measurements)
        spec = spec_of(prompt, number, 0.0, self._plan.tokens)
        async with pings(self._target, TARGET, spec) as ping_target, pings(self._draft, DRAFT, spec) as ping_draft:
            for _ in range(PINGS):
                measurements.times.append(TimeSample(PING, TARGET, await ping_target()))
                measurements.times.append(TimeSample(PING, DRAFT, await ping_draft()))
        for temperature in self._plan.temperatures:
            spec = spec_of(prompt, number, temperature, self._plan.tokens)
            for setting in rotated(self._plan.settings, turn + number):
                if setting == BARE:
                    answer = self._instruments.loops[TARGET].plain(spec)
                else:
                    answer = await self._request(spec, self._settings[setting])
                sample = RequestSample(setting, turn, number, temperature, *answer)
                measurements.requests.append(sample)
                expected = self._expected.setdefault((number, temperature), sample.token_ids)
                if sample.token_ids != expected or len(expected) != self._plan.tokens:
                    place = f"{self._plan.prompts[number]!r} at temperature {temperature:g} in turn {turn}"
                    said = f"{list(sample.token_ids)} instead of {list(expected)}"
                    raise TokensDiffer(f"{setting} said {said}, or not {self._plan.tokens} tokens, for {place}")

    async def _request(self, spec: SessionSpec, speculation: Speculation) -> TimedAnswer:
        """Runs a request for exactly this session through the gateway."""
        rounds, first_token_s, seconds = await timed(
            self._gateway,
            spec.token_ids,
            max_tokens=spec.max_len - spec.prompt_len,
            seed=spec.seed,
            temperature=spec.sampling.temperature,
            ignore_eos=spec.sampling.ignore_eos,
            speculation=speculation,
        )
        token_ids = tuple(token.token_id for each in rounds for token in each.tokens)
        samples = tuple(RoundSample(num_tokens=len(each.tokens), **asdict(each.facts)) for each in rounds)
        return token_ids, seconds, first_token_s, samples


@asynccontextmanager
async def pings(
    channel: grpc.aio.Channel, role: str, spec: SessionSpec
) -> AsyncIterator[Callable[[], Awaitable[float]]]:
    """Opens a session of a service on a link without a gateway, and yields what pings it: milliseconds to a pong."""
    call: Any
    frame: Any
    request: Any
    session = open_message(spec, spec.token_ids)
    fence = pb.Fence(session_id=os.urandom(16), epoch=1, base_len=spec.prompt_len)

    async def ask(expected: str, **content: Message) -> float:
        started_ns = time.perf_counter_ns()
        try:
            await call.write(frame(requests=[request(fence=fence, **content)]))
            response: Any = await call.read()
        except grpc.aio.AioRpcError as error:
            raise error_from(error) from None
        passed_ms = (time.perf_counter_ns() - started_ns) / 1e6
        answers = [] if response is grpc.aio.EOF else response.responses
        if [answer.WhichOneof("answer") for answer in answers] != [expected]:
            raise ProtocolViolation(f"a link was to answer with a {expected}, but said {response}")
        return passed_ms

    if role == TARGET:
        call, request = TargetServiceStub(channel).Link(), target_pb.VerifyRequest
        frame = target_pb.TargetServiceLinkRequest
        await ask("verdict", open=target_pb.TargetOpen(session=session, step=target_pb.TargetStep()))
        # The first token, which came with the answer.
        fence.base_len += 1
    else:
        call, request = DraftServiceStub(channel).Link(), draft_pb.ProposeRequest
        frame = draft_pb.DraftServiceLinkRequest
        await ask("proposal", open=draft_pb.DraftOpen(session=session))
    yield lambda: ask("pong", ping=pb.Ping())
    await call.write(frame(requests=[request(fence=fence, close=pb.CloseSession())]))
    await call.done_writing()
    while await call.read() is not grpc.aio.EOF:
        # An answer that was under way has no reader any more.
        continue
