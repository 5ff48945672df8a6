"""The gRPC half of the command: plain values in and out, protobuf only in between. Knows no terminal."""

from collections.abc import AsyncGenerator

import grpc

from outrider.cli.events import AUTO, Ask, ModelFacts, Origin, Result, Round, Speculation, Token
from outrider.errors import OutriderError, PeerLost, PromptTooLong
from outrider.rpc import MAX_MESSAGE_BYTES, error_from, open_channel, said_by_peer
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import model_service_pb2, types_pb2
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub
from outrider.v1.model_service_pb2_grpc import ModelServiceStub

INFO_TIMEOUT_S = 10.0
ORIGINS = {
    pb.TOKEN_ORIGIN_ACCEPTED: Origin.ACCEPTED,
    pb.TOKEN_ORIGIN_CORRECTION: Origin.CORRECTION,
    pb.TOKEN_ORIGIN_BONUS: Origin.BONUS,
}


async def generate(address: str, ask: Ask) -> AsyncGenerator[Round | Result]:
    """Calls the gateway and yields its events; the last is the Result. Closing the iterator cancels the call.

    Raises the OutriderError that the gateway answered, PeerLost when nobody answers.
    """
    async with open_channel(address) as channel:
        call = GenerationServiceStub(channel).Generate(request_from(ask))
        try:
            async for response in call:
                yield _round(response.round) if response.HasField("round") else _result(response.completion)
        except grpc.aio.AioRpcError as error:
            raise _translated(error, address) from None
        finally:
            call.cancel()


async def model_facts(address: str) -> ModelFacts:
    """Asks a service about its model. Raises OutriderError, PeerLost when nobody answers."""
    async with open_channel(address) as channel:
        try:
            info = await ModelServiceStub(channel).GetModelInfo(
                model_service_pb2.GetModelInfoRequest(), timeout=INFO_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise _translated(error, address) from None
    return ModelFacts(
        role=model_service_pb2.ServiceRole.Name(info.role).removeprefix("SERVICE_ROLE_").lower(),
        model=info.model_name,
        parameters=info.parameter_count,
        dtype=info.weight_dtype,
        device=info.device,
        threads=info.thread_count,
        numerics_id=info.numerics_id,
        context_len=info.context_len,
        blocks=info.block_count,
        block_size=info.block_size,
        address=address,
    )


def request_from(ask: Ask) -> pb.GenerateRequest:
    """The message, with only those fields set that the user named: defaults belong to the gateway."""
    sampling = types_pb2.SamplingParameters(
        temperature=ask.temperature,
        top_k=ask.top_k,
        top_p=ask.top_p,
        min_p=ask.min_p,
        repetition_penalty=ask.repetition_penalty,
    )
    speculation = pb.SpeculationSettings(
        enabled=ask.speculation, draft_count=None if ask.draft_count == AUTO else ask.draft_count
    )
    return pb.GenerateRequest(
        text=ask.prompt,
        max_tokens=ask.max_tokens,
        sampling=sampling,
        seed=ask.seed,
        stop=ask.stop,
        speculation=speculation,
    )


def check_size(ask: Ask) -> None:
    """Raises PromptTooLong about a request that no gateway would receive, so that nothing is started for it."""
    size = request_from(ask).ByteSize()
    if size > MAX_MESSAGE_BYTES:
        raise PromptTooLong(
            f"prompt and options take {size} bytes, but a request has at most {MAX_MESSAGE_BYTES} bytes",
            bytes=size,
            limit=MAX_MESSAGE_BYTES,
        )


def _translated(error: grpc.aio.AioRpcError, address: str) -> OutriderError:
    """The error that the service raised; the loss of this very connection gets a sentence that helps.

    A gateway may say PeerLost as well, about a service behind it: that one travels as it is.
    """
    raised = error_from(error)
    if isinstance(raised, PeerLost) and not said_by_peer(error):
        return PeerLost(f"Nothing answers on {address} (any more); `outrider up` starts a stack.", address=address)
    return raised


def _round(message: pb.Round) -> Round:
    tokens = tuple(
        Token(token.token_id, ORIGINS.get(token.origin, Origin.PLAIN), token.text) for token in message.tokens
    )
    return Round(tokens, message.text_delta)


def _result(message: pb.Completion) -> Result:
    return Result(
        rest=message.text_delta,
        finish_reason=types_pb2.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_").lower(),
        seed=message.seed,
        prompt_tokens=message.usage.prompt_tokens,
        completion_tokens=message.usage.completion_tokens,
        speculation=_speculation(message.speculation),
        first_token_us=message.timings.first_token_us,
        total_us=message.timings.total_us,
        model_hash=message.model_hash,
        numerics_ids=tuple(message.numerics_ids) or (message.numerics_id,),
        target_reopens=message.survival.target_reopens,
        drift_repairs=message.survival.drift_repairs,
    )


def _speculation(message: pb.SpeculationFigures) -> Speculation:
    return Speculation(
        rounds=message.rounds,
        draft_tokens=message.draft_tokens,
        accepted_tokens=message.accepted_tokens,
        acceptance_rate=message.acceptance_rate,
        draft_acceptance_rate=message.draft_acceptance_rate,
        mean_acceptance_length=message.mean_acceptance_length,
        fallback_rounds=message.fallback_rounds,
    )
