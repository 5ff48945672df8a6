"""Requests through the gateway, as a client sees them. Knows nothing about models or services."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc.aio

from bench.samples import RequestSample, RoundSample
from outrider.parameters import SessionSpec
from outrider.rpc import error_from
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub


@dataclass(frozen=True, slots=True)
class Occasion:
    """Which request this is: the setting, and what it has in common with those that it is compared with."""

    setting: str
    turn: int
    prompt: int
    temperature: float

    def sample(
        self, token_ids: Sequence[int], seconds: float, first_token_s: float, rounds: Sequence[RoundSample] = ()
    ) -> RequestSample:
        """What was measured on this occasion."""
        occasion = self.setting, self.turn, self.prompt, self.temperature
        return RequestSample(*occasion, tuple(token_ids), seconds, first_token_s, tuple(rounds))


async def request(
    channel: grpc.aio.Channel, occasion: Occasion, spec: SessionSpec, settings: pb.SpeculationSettings
) -> RequestSample:
    """Runs one request to its end. Raises the OutriderError that the gateway answered."""
    message = request_message(spec, settings)
    started, first_token_s = time.perf_counter(), 0.0
    token_ids: list[int] = []
    rounds: list[RoundSample] = []
    try:
        async for response in GenerationServiceStub(channel).Generate(message):
            if response.HasField("completion"):
                break
            first_token_s = first_token_s or time.perf_counter() - started
            token_ids += [token.token_id for token in response.round.tokens]
            rounds.append(round_sample(response.round))
    except grpc.aio.AioRpcError as error:
        raise error_from(error) from None
    return occasion.sample(token_ids, time.perf_counter() - started, first_token_s, rounds)


def request_message(spec: SessionSpec, settings: pb.SpeculationSettings) -> pb.GenerateRequest:
    """A request for exactly this session; the speculation is all that settings differ in."""
    message = pb.GenerateRequest(max_tokens=spec.max_len - spec.prompt_len, seed=spec.seed, speculation=settings)
    message.token_ids.token_ids.extend(spec.token_ids)
    message.sampling.temperature = spec.sampling.temperature
    message.sampling.ignore_eos = spec.sampling.ignore_eos
    return message


def round_sample(message: pb.Round) -> RoundSample:
    """The facts of a round."""
    facts = message.facts
    return RoundSample(
        num_tokens=len(message.tokens),
        draft_count=facts.draft_count,
        accepted_count=facts.accepted_count,
        evaluated_count=facts.evaluated_count,
        fallback=facts.fallback_reason != pb.FALLBACK_REASON_UNSPECIFIED,
        round_us=facts.round_us,
        draft_queue_us=facts.draft_queue_us,
        draft_compute_us=facts.draft_compute_us,
        draft_wait_us=facts.draft_wait_us,
        verify_queue_us=facts.verify_queue_us,
        verify_compute_us=facts.verify_compute_us,
        verify_wait_us=facts.verify_wait_us,
        draft_bytes=facts.draft_bytes,
        verify_bytes=facts.verify_bytes,
    )
