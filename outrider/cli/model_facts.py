"""What a service says about its model. Knows no gateway and no terminal."""

from dataclasses import dataclass

import grpc

from outrider.client.calls import failure
from outrider.rpc.channels import open_channel
from outrider.v1 import model_service_pb2
from outrider.v1.model_service_pb2_grpc import ModelServiceStub

INFO_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a service says about its model."""

    role: str
    model: str
    parameters: int
    dtype: str
    device: str
    threads: int
    numerics_id: str
    context_len: int
    blocks: int
    block_size: int
    address: str
    free_blocks: int = 0
    sessions: int = 0


async def model_facts(address: str) -> ModelFacts:
    """Asks a service about its model. Raises OutriderError, PeerLost when nobody answers."""
    async with open_channel(address) as channel:
        try:
            info = await ModelServiceStub(channel).GetModelInfo(
                model_service_pb2.GetModelInfoRequest(), timeout=INFO_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise failure(error, address, None) from None
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
        free_blocks=info.free_block_count,
        sessions=info.session_count,
    )
