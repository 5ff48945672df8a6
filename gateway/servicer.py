"""GenerationService: translates between protobuf and the gateway's plain classes, and bounds how much runs at once.

Nothing is decided here but that a gateway with enough to do says so at once, and that a client which does not read is
not waited for without end.
"""

from collections.abc import Callable
from contextlib import aclosing

import grpc

from gateway.backend import Backend
from gateway.client_writer import ClientWriter
from gateway.generation import CompletionEvent, RoundEvent, generate
from gateway.requests import GenerationAsk
from gateway.rounds import FallbackReason, TokenOrigin
from outrider import wire
from outrider.errors import Overloaded
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1.generation_service_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server

ORIGINS = {
    TokenOrigin.PLAIN: pb.TOKEN_ORIGIN_PLAIN,
    TokenOrigin.ACCEPTED: pb.TOKEN_ORIGIN_ACCEPTED,
    TokenOrigin.CORRECTION: pb.TOKEN_ORIGIN_CORRECTION,
    TokenOrigin.BONUS: pb.TOKEN_ORIGIN_BONUS,
}
FALLBACKS = {
    None: pb.FALLBACK_REASON_UNSPECIFIED,
    FallbackReason.DRAFT_ABSENT: pb.FALLBACK_REASON_DRAFT_ABSENT,
    FallbackReason.DRAFT_LOST: pb.FALLBACK_REASON_DRAFT_LOST,
    FallbackReason.DRAFT_LATE: pb.FALLBACK_REASON_DRAFT_LATE,
    FallbackReason.DRAFT_CONTEXT: pb.FALLBACK_REASON_DRAFT_CONTEXT,
    FallbackReason.DRAFT_REFUSED: pb.FALLBACK_REASON_DRAFT_REFUSED,
}


class GenerationServicer(GenerationServiceServicer):
    """Serves Generate over a backend, at most max_requests at a time, to clients that take each message in time."""

    def __init__(self, backend: Backend, max_requests: int, client_stall_s: float) -> None:
        self._backend = backend
        self._max_requests = max_requests
        self._client_stall_s = client_stall_s
        self._active = 0

    async def Generate(  # type: ignore[override]  # noqa: N802 - the name is the protocol's
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
    ) -> None:
        """Writes a message for every round and the completion.

        It writes instead of yielding, so that a client that leaves interrupts this very frame, and everything below it
        is closed before the call is over. A generator would be left to the garbage collector.
        """
        if self._active >= self._max_requests:
            raise Overloaded(f"{self._active} requests are running, as many as this gateway takes at a time")
        self._active += 1
        try:
            async with (
                aclosing(generate(_ask(request), self._backend, context.time_remaining())) as events,
                ClientWriter(context, self._client_stall_s) as writer,
            ):
                async for event in events:
                    await writer.write(_round(event) if isinstance(event, RoundEvent) else _completion(event))
                await writer.flush()
        finally:
            self._active -= 1


def generation_service(
    backend: Backend, max_requests: int, client_stall_s: float
) -> dict[str, Callable[[grpc.aio.Server], None]]:
    """The service for `outrider.rpc.serve`: its full name, and what adds it to a server."""
    servicer = GenerationServicer(backend, max_requests, client_stall_s)
    name = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
    return {name: lambda server: add_GenerationServiceServicer_to_server(servicer, server)}


def _ask(request: pb.GenerateRequest) -> GenerationAsk:
    """What the client wrote; raises InvalidRequest for sampling parameters, Unsupported for the rule."""
    speculation = request.speculation
    prompt = request.WhichOneof("prompt")
    return GenerationAsk(
        text=request.text if prompt == "text" else None,
        token_ids=tuple(request.token_ids.token_ids) if prompt == "token_ids" else None,
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        sampling=wire.sampling_from(request.sampling),
        seed=request.seed if request.HasField("seed") else None,
        stops=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        speculation_enabled=speculation.enabled if speculation.HasField("enabled") else True,
        draft_count=speculation.draft_count if speculation.HasField("draft_count") else None,
        rule=wire.rule_from(speculation.rule, "speculation.rule"),
        drafter=speculation.drafter,
        logprob_count=request.logprob_count if request.HasField("logprob_count") else None,
    )


def _round(event: RoundEvent) -> pb.GenerateResponse:
    committed = event.committed
    tokens = [
        pb.GeneratedToken(token_id=token.token_id, origin=ORIGINS[token.origin], text=token.text)
        for token in event.tokens
    ]
    facts = pb.RoundFacts(
        base_len=committed.base_len,
        draft_count=committed.draft_count,
        accepted_count=committed.accepted_count,
        evaluated_count=committed.evaluated_count,
        fallback_reason=FALLBACKS[committed.fallback_reason],
        draft_compute_us=committed.draft_compute_us,
        verify_compute_us=committed.verify_compute_us,
        round_us=committed.round_us,
        draft_queue_us=committed.draft_way.queue_us,
        verify_queue_us=committed.verify_way.queue_us,
        draft_wait_us=committed.draft_way.wait_us,
        verify_wait_us=committed.verify_way.wait_us,
        draft_bytes=committed.draft_way.num_bytes,
        verify_bytes=committed.verify_way.num_bytes,
        target_reopens=committed.target_reopens,
        new_numerics_id=event.new_numerics_id,
    )
    text_delta = "".join(token.text for token in event.tokens)
    return pb.GenerateResponse(round=pb.Round(tokens=tokens, text_delta=text_delta, facts=facts))


def _completion(event: CompletionEvent) -> pb.GenerateResponse:
    figures = event.figures
    completion = pb.Completion(
        finish_reason=wire.finish_reason_message(event.finish_reason),
        usage=pb.Usage(prompt_tokens=event.prompt_tokens, completion_tokens=event.completion_tokens),
        seed=event.seed,
        speculation=pb.SpeculationFigures(
            rounds=figures.rounds,
            draft_tokens=figures.draft_tokens,
            accepted_tokens=figures.accepted_tokens,
            evaluated_tokens=figures.evaluated_tokens,
            acceptance_rate=figures.acceptance_rate,
            draft_acceptance_rate=figures.draft_acceptance_rate,
            mean_acceptance_length=figures.mean_acceptance_length,
            fallback_rounds=figures.fallback_rounds,
        ),
        model_hash=event.model_hash,
        numerics_id=event.numerics_ids[-1],
        numerics_ids=event.numerics_ids,
        survival=pb.SurvivalFigures(target_reopens=event.target_reopens, drift_repairs=event.drift_repairs),
        text_delta=event.text_delta,
        timings=pb.Timings(first_token_us=event.first_token_us, total_us=event.total_us),
    )
    return pb.GenerateResponse(completion=completion)
