"""The calls that the commands make: plain values in and out, protobuf only in between. Knows no terminal."""

from collections.abc import AsyncGenerator

import grpc

from outrider.cli.asking import Ask
from outrider.cli.events import ModelFacts, Result, Round
from outrider.cli.messages import event_from, request_from
from outrider.errors import InvalidRequest, OutriderError, PeerLost, PromptTooLong
from outrider.rpc import MAX_MESSAGE_BYTES, error_from, open_channel, said_by_peer
from outrider.v1 import model_service_pb2
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub
from outrider.v1.model_service_pb2_grpc import ModelServiceStub

INFO_TIMEOUT_S = 10.0


async def generate(address: str, ask: Ask) -> AsyncGenerator[Round | Result]:
    """Calls the gateway and yields its events; each sample's last is its Result. Closing the iterator cancels the call.

    Raises the OutriderError that the gateway answered, PeerLost when nobody answers, InvalidRequest when it is no
    gateway that does.
    """
    async with open_channel(address) as channel:
        call = GenerationServiceStub(channel).Generate(request_from(ask))
        try:
            async for response in call:
                yield event_from(response)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                # Often it is that of a model service, which `outrider up` shows too.
                raise InvalidRequest("--address", address, "that of a gateway") from None
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


def check_ask(ask: Ask) -> None:
    """Raises InvalidRequest about what cannot be read and PromptTooLong about what no gateway would receive.

    So nothing is started for such a request.
    """
    if ask.report.echo and ask.report.logprobs is None:
        raise InvalidRequest("--echo", True, "given with --logprobs")
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
