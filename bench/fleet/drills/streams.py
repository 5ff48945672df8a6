"""Streams that keep a gateway busy whatever happens to its services, and what each answer was and when it came.

A stream asks its next request when its last one has ended, and its first one is shorter, so that the streams are not in
step. A request has a number, which decides its prompt and its seed; so it has one right answer.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, pairwise

import grpc

from bench.fleet.__main__ import FleetOptions, prompt_of
from outrider.cli.bench.load.driver import METHOD, GenerateCall
from outrider.client import Result, Round, Speculation
from outrider.client.events import event_from
from outrider.client.requests import generate_request
from outrider.rpc.channels import open_channel
from outrider.rpc.errors import error_from
from outrider.v1 import generation_service_pb2 as pb

TEMPERATURE = 0.8
CALL_S = 120.0  # after which a request has failed
PROMPTS = FleetOptions()


@dataclass(frozen=True, slots=True)
class SeenRound:
    """A round as a client saw it, and when."""

    at_s: float
    tokens: int
    drafted: int
    reopens: int
    """How often the session was opened again on a target in this round."""
    fallback: str
    """Reason why there were no guesses, though there should have been some."""


@dataclass(slots=True)
class DrillAnswer:
    """The answer to a request."""

    number: int
    asked_s: float
    rounds: list[SeenRound] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    model_hash: str = ""
    """Weights that it ended with."""
    error: str = ""
    """What the gateway said instead of an end."""

    def gaps(self, from_s: float, until_s: float) -> list[float]:
        """Seconds between two rounds, of which the second came within a time."""
        return [two.at_s - one.at_s for one, two in pairwise(self.rounds) if from_s < two.at_s <= until_s]

    def pauses(self, from_s: float) -> list[float]:
        """Seconds before each round, from a moment on, in which the session was opened again."""
        times = [self.asked_s, *(each.at_s for each in self.rounds)]
        waits = [later_s - earlier_s for earlier_s, later_s in pairwise(times)]
        return [wait for wait, each in zip(waits, self.rounds, strict=True) if each.reopens and each.at_s > from_s]

    def runs_at(self, at_s: float) -> bool:
        """Whether it had begun and had not ended."""
        return bool(self.rounds) and self.rounds[0].at_s < at_s < self.rounds[-1].at_s


@dataclass(frozen=True, slots=True)
class AskedLoad:
    """What all streams ask for."""

    streams: int
    tokens: int
    speculation: Speculation


async def ask(call: GenerateCall, number: int, tokens: int, speculation: Speculation, salt: str) -> DrillAnswer:
    """Asks one request and reads it to its end, good or bad. The salt keeps its prompt apart in the caches."""
    request = generate_request(
        prompt_of(number, PROMPTS),
        {
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": TEMPERATURE,
            "seed": number,
            "speculation": speculation,
            "cache_salt": salt,
        },
    )
    answer, messages = DrillAnswer(number, time.perf_counter()), list[tuple[float, bytes]]()
    reading = call(request, timeout=CALL_S)
    try:
        while isinstance(message := await reading.read(), bytes):
            messages.append((time.perf_counter(), message))
    except grpc.aio.AioRpcError as error:
        answer.error = error_from(error).message
    for at_s, message in messages:
        event = event_from(pb.GenerateResponse.FromString(message))
        if isinstance(event, Round):
            facts, ids = event.facts, [token.token_id for token in event.tokens]
            answer.token_ids += ids
            answer.rounds.append(
                SeenRound(at_s, len(ids), facts.draft_count, facts.target_reopens, facts.fallback_reason)
            )
        elif isinstance(event, Result):
            answer.model_hash = event.model_hash
    if not answer.error and len(answer.token_ids) != tokens:
        answer.error = f"It ended after {len(answer.token_ids)} of {tokens} tokens."
    return answer


def generating(channel: grpc.aio.Channel) -> GenerateCall:
    """The call for answers, whose messages stay bytes: to read them while others wait would be part of their times."""
    return channel.unary_stream(METHOD, request_serializer=pb.GenerateRequest.SerializeToString)


async def keep_busy(address: str, load: AskedLoad, salt: str, is_over: asyncio.Event) -> list[DrillAnswer]:
    """All answers of streams that ask until it is over; one whose request fails asks no more."""
    numbers, answers = count(), list[DrillAnswer]()
    async with open_channel(address) as channel:
        call = generating(channel)

        async def stream(place: int) -> None:
            tokens = max(1, load.tokens * (place + 1) // load.streams)
            while not is_over.is_set():
                answers.append(await ask(call, next(numbers), tokens, load.speculation, salt))
                if answers[-1].error:
                    return
                tokens = load.tokens

        async with asyncio.TaskGroup() as group:
            for place in range(load.streams):
                group.create_task(stream(place))
    return answers


async def plain_answers(address: str, load: AskedLoad, num_requests: int) -> dict[int, list[int]]:
    """The tokens of the first requests in plain decoding, by their numbers, from a gateway to which nothing happens."""
    found: dict[int, list[int]] = {}
    async with open_channel(address) as channel:
        call = generating(channel)

        async def stream(numbers: Iterator[int]) -> None:
            for number in numbers:
                found[number] = (await ask(call, number, load.tokens, Speculation(enabled=False), "plain")).token_ids

        numbers = iter(range(num_requests))
        async with asyncio.TaskGroup() as group:
            for _ in range(load.streams):
                group.create_task(stream(numbers))
    return found
