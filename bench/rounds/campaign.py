"""Measures everything of a plan in one run, interleaved: no instrument and no setting has a quiet minute of its own.

A cycle belongs to one prompt: some samples of every instrument, some pings, then the same request in all settings,
in another order each time. Tokens are compared at once, because a figure about other tokens would be about nothing.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict

import grpc.aio

from bench.common import TokensDiffer, spec_of
from bench.rounds.instruments import Instruments
from bench.rounds.samples import (
    AUTO,
    BARE,
    DRAFT,
    PING,
    PLAIN,
    TARGET,
    Measurements,
    RequestSample,
    RoundSample,
    RoundsPlan,
    TimedAnswer,
    TimeSample,
    fixed,
)
from bench.streams import BareDraftStream, BareTargetStream
from gateway.text.tokenizer import Tokenizer
from outrider.cli.running import note
from outrider.client import AsyncClient, Round, Speculation
from outrider.parameters import SessionSpec


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
        self._settings = {PLAIN: Speculation(enabled=False), AUTO: Speculation()}
        self._settings |= {fixed(count): Speculation(draft_count=count) for count in plan.draft_counts}

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
        measurements.times += await self._ping(spec_of(prompt, number, 0.0, self._plan.tokens))
        for temperature in self._plan.temperatures:
            spec = spec_of(prompt, number, temperature, self._plan.tokens)
            for setting in rotated(self._plan.settings, turn + number):
                if setting == BARE:
                    answer = self._instruments.loops[TARGET].plain(spec)
                else:
                    answer = await request(self._gateway, spec, self._settings[setting])
                sample = RequestSample(setting, turn, number, temperature, *answer)
                self._compare(sample)
                measurements.requests.append(sample)

    async def _ping(self, spec: SessionSpec) -> list[TimeSample]:
        """Pings on a session of each service, by turns."""
        target, draft = BareTargetStream(self._target, spec), BareDraftStream(self._draft, spec)
        await target.open()
        await draft.open()
        streams = {TARGET: target, DRAFT: draft}
        samples = [
            TimeSample(PING, role, await stream.ping_ms())
            for _ in range(self._plan.pings)
            for role, stream in streams.items()
        ]
        for stream in streams.values():
            await stream.end()
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


async def request(client: AsyncClient, spec: SessionSpec, speculation: Speculation) -> TimedAnswer:
    """Runs one request for exactly this session through the gateway. Raises the OutriderError that it answered."""
    started, first_token_s, seconds = time.perf_counter(), 0.0, 0.0
    token_ids: list[int] = []
    rounds: list[RoundSample] = []
    stream = client.generate(
        spec.token_ids,
        max_tokens=spec.max_len - spec.prompt_len,
        seed=spec.seed,
        temperature=spec.sampling.temperature,
        ignore_eos=spec.sampling.ignore_eos,
        speculation=speculation,
    )
    async with stream:
        async for event in stream:
            seconds = time.perf_counter() - started
            if isinstance(event, Round):
                first_token_s = first_token_s or seconds
                token_ids += [token.token_id for token in event.tokens]
                rounds.append(RoundSample(num_tokens=len(event.tokens), **asdict(event.facts)))
    return tuple(token_ids), seconds, first_token_s, tuple(rounds)


def rotated(names: list[str], turn: int) -> list[str]:
    """The settings in another order each turn, so that none always follows the same one."""
    start = turn % len(names)
    # Stepping backwards through them every other turn changes the neighbours too.
    turned = names[start:] + names[:start]
    return turned[::-1] if turn % 2 else turned
