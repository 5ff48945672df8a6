"""Measures everything of a plan in one run, interleaved: no instrument and no setting has a quiet minute of its own.

A cycle belongs to one prompt: some samples of every instrument, some pings, then the same request in all settings,
in another order each time. Tokens are compared at once, because a figure about other tokens would be about nothing.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc.aio

from bench.engine_loop import spec_of
from bench.gateway_client import Occasion, request
from bench.instruments import Instruments
from bench.plan import Plan
from bench.progress import steps
from bench.samples import AUTO, BARE, DRAFT, ONE_BY_ONE, PLAIN, TARGET, Measurements, PingSample, RequestSample, fixed
from bench.session_streams import DraftStream, TargetStream, one_by_one
from gateway.text.tokenizer import Tokenizer
from outrider.cli.local_stack import Addresses
from outrider.client import AsyncClient, Speculation
from outrider.errors import OutriderError
from outrider.parameters import SessionSpec
from outrider.rpc.channels import open_channel

# About as long as a service computes in a round of a small pair: a processor that has nothing to do sleeps in it.
PAUSE_S = 0.002


class TokensDiffer(OutriderError):
    """Settings disagreed about a request that must be the same in all of them: a bug, and every figure is worthless."""

    reason = "TOKENS_DIFFER"


@dataclass(frozen=True, slots=True)
class Channels:
    """Connections to the processes of the stack."""

    gateway: AsyncClient
    target: grpc.aio.Channel
    draft: grpc.aio.Channel


class Campaign:
    """One run over a stack that serves."""

    def __init__(self, plan: Plan, instruments: Instruments, channels: Channels) -> None:
        self._plan, self._instruments, self._channels = plan, instruments, channels
        self._expected: dict[tuple[int, float], tuple[int, ...]] = {}
        self._settings = {PLAIN: Speculation(enabled=False), AUTO: Speculation()}
        self._settings |= {fixed(count): Speculation(draft_count=count) for count in plan.draft_counts}

    async def run(self) -> Measurements:
        """Takes all turns, after one that warms up and is dropped. Raises TokensDiffer and what services answer."""
        tokenizer = Tokenizer(self._plan.stack.target)
        prompts = [await tokenizer.encode(prompt) for prompt in self._plan.prompts]
        measurements = Measurements()
        turns = self._plan.turns
        with steps((turns + 1) * len(prompts)) as progress:
            for turn in range(turns + 1):
                progress.say(f"Turn {turn} of {turns}{'' if turn else ', to warm up'}")
                for number, prompt in enumerate(prompts):
                    await self._cycle(measurements, turn, number, prompt)
                    progress.done()
                if turn == 0:
                    measurements.forget()
        return measurements

    async def _cycle(self, measurements: Measurements, turn: int, number: int, prompt: Sequence[int]) -> None:
        self._instruments.sample(measurements)
        measurements.pings += await self._ping(spec_of(prompt, number, 0.0, self._plan.tokens))
        for temperature in self._plan.temperatures:
            spec = spec_of(prompt, number, temperature, self._plan.tokens)
            for setting in rotated(self._plan.settings, turn + number):
                sample = await self._answer(Occasion(setting, turn, number, temperature), spec)
                self._compare(sample)
                measurements.requests.append(sample)

    async def _answer(self, occasion: Occasion, spec: SessionSpec) -> RequestSample:
        if occasion.setting == BARE:
            return _timed(occasion, self._instruments.loops[TARGET].plain(spec))
        if occasion.setting == ONE_BY_ONE:
            return _timed(occasion, await one_by_one(self._channels.target, spec))
        return await request(self._channels.gateway, occasion, spec, self._settings[occasion.setting])

    async def _ping(self, spec: SessionSpec) -> list[PingSample]:
        """Pings on a session of each service, by turns: close together, and after pauses like those of rounds."""
        target, draft = TargetStream(self._channels.target, spec), DraftStream(self._channels.draft, spec)
        await target.open()
        await draft.open()
        samples = []
        ways: dict[str, Callable[[], Awaitable[float]]] = {TARGET: target.ping_ms, DRAFT: draft.ping_ms}
        for _ in range(self._plan.pings):
            samples += [PingSample(role, await ping_ms()) for role, ping_ms in ways.items()]
        for _ in range(self._plan.pings):
            for role, ping_ms in ways.items():
                await asyncio.sleep(PAUSE_S)
                samples.append(PingSample(role, await ping_ms(), rested=True))
        await target.end()
        await draft.end()
        return samples

    def _compare(self, sample: RequestSample) -> None:
        expected = self._expected.setdefault((sample.prompt, sample.temperature), sample.token_ids)
        if sample.token_ids != expected or len(expected) != self._plan.tokens:
            prompt = self._plan.prompts[sample.prompt]
            raise TokensDiffer(
                f"{sample.setting} said other tokens than {self._plan.settings[0]} or not {self._plan.tokens} of them, "
                f"for {prompt!r} at temperature {sample.temperature:g} in turn {sample.turn}: "
                f"{list(sample.token_ids)} instead of {list(expected)}"
            )


@contextlib.asynccontextmanager
async def channels_to(addresses: Addresses) -> AsyncIterator[Channels]:
    """Connections that are closed at the end."""
    async with (
        AsyncClient(addresses.gateway) as gateway,
        open_channel(addresses.target) as target,
        open_channel(addresses.draft or "") as draft,
    ):
        yield Channels(gateway, target, draft)


def rotated(names: list[str], turn: int) -> list[str]:
    """The settings in another order each turn, so that none always follows the same one."""
    start = turn % len(names)
    # Stepping backwards through them every other turn changes the neighbours too.
    turned = names[start:] + names[:start]
    return turned[::-1] if turn % 2 else turned


def _timed(occasion: Occasion, answer: tuple[list[int], list[float]]) -> RequestSample:
    token_ids, times_s = answer
    return occasion.sample(token_ids, times_s[-1], times_s[0])
