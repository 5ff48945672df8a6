"""What goes wrong at a door over gRPC leaves the process as any other fault does: without a word of Python."""

from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs
from support.keys import bearer, write_keys

from gateway.grpc.keys import KeyInterceptor
from gateway.keys.door import Door
from gateway.keys.tenant import Tenant
from outrider.rpc.channels import open_channel, serve


class BrokenDoor(Door):
    """Fails in an unexpected way."""

    def enter(self, *_given: object) -> Tenant:
        raise RecursionError("maximum recursion depth exceeded")


async def test_what_nobody_expected_at_the_door_is_logged_and_not_sent(tmp_path: Path) -> None:
    """It ends the call with INTERNAL; who asks for health passes no door."""
    door = BrokenDoor(write_keys(tmp_path / "keys.toml", alice={}))
    server = await serve("127.0.0.1:0", {}, interceptors=[KeyInterceptor(door)])
    try:
        async with open_channel(server.address) as channel:
            call = channel.unary_unary("/outrider.v1.GenerationService/Generate")
            with capture_logs() as lines, pytest.raises(grpc.aio.AioRpcError) as ended:
                await call(b"", metadata=tuple(bearer("alice").items()), timeout=60)
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    finally:
        await server.stop(0)
    assert (ended.value.code(), ended.value.details()) == (grpc.StatusCode.INTERNAL, "internal error")
    assert [line["event"] for line in lines] == ["unexpected error in a handler"]
    assert health.status == health_pb2.HealthCheckResponse.SERVING
