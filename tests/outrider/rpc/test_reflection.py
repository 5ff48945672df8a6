"""Reflection: what a server shows of its services, and when."""

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.rpc import channels
from outrider.v1.model_service_pb2_grpc import ModelServiceServicer, add_ModelServiceServicer_to_server


async def reflected(*, reflects: bool) -> set[str]:
    """The services that a server describes."""
    services = {"outrider.v1.ModelService": lambda s: add_ModelServiceServicer_to_server(ModelServiceServicer(), s)}
    running = await channels.serve("127.0.0.1:0", services, reflects=reflects)
    try:
        async with channels.open_channel(running.address) as channel:
            # The call reads the requests itself, because a write into a call that was refused says nothing of why.
            requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests)
            return {service.name async for answer in call for service in answer.list_services_response.service}
    finally:
        await running.stop(0)


async def test_services_are_described_on_request() -> None:
    """So that grpcurl needs no files."""
    assert {"outrider.v1.ModelService", "grpc.health.v1.Health"} <= await reflected(reflects=True)


async def test_without_the_request_nothing_is_described() -> None:
    """A server without the option does not show the insides."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await reflected(reflects=False)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
