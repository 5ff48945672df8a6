"""Connections to a server of gRPC are fewer than descriptors, and one that asks for nothing makes room for others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs
from support.basics import eventually

from outrider.errors import InvalidKey
from outrider.rpc import channels, crowd
from outrider.rpc.crowd import Crowd, peer_of
from outrider.v1 import model_service_pb2 as pb
from outrider.v1.model_service_pb2_grpc import (
    ModelServiceServicer,
    ModelServiceStub,
    add_ModelServiceServicer_to_server,
)

FEW = 24
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


class Servicer(ModelServiceServicer):
    """Answers who has the word, and holds one call until it may go on."""

    def __init__(self) -> None:
        self.goes_on, self.waiting, self.asked = asyncio.Event(), 0, 0

    async def GetModelInfo(self, request: object, context: object) -> pb.GetModelInfoResponse:  # noqa: N802
        """Waits until it is released."""
        self.waiting += 1
        await self.goes_on.wait()
        return pb.GetModelInfoResponse()

    async def Rollback(self, request: pb.RollbackRequest, context: object) -> pb.RollbackResponse:  # noqa: N802
        """Raises InvalidKey without the word."""
        self.asked += 1
        if not request.fence.session_id:
            raise InvalidKey("no")
        return pb.RollbackResponse()


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[str, Servicer]]:
    """The servicer on a free port."""
    servicer = Servicer()
    add = {"outrider.v1.ModelService": lambda server: add_ModelServiceServicer_to_server(servicer, server)}
    running = await channels.serve("127.0.0.1:0", add)
    try:
        yield running.address, servicer
    finally:
        await running.stop(0)


async def is_served(address: str) -> bool:
    """Whether a new connection is."""
    async with channels.open_channel(address) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
        except grpc.aio.AioRpcError as error:
            assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)  # noqa: PT017
            return False
        return True


@pytest.mark.parametrize("begun", [b"", GREETING])
async def test_who_asks_for_nothing_makes_room(monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    """However many there are; calls that run go on, and the log has one line about it."""
    monkeypatch.setattr(crowd, "MOST", FEW)
    monkeypatch.setattr(crowd, "CALM_S", 0.05)
    with capture_logs() as logged:
        async with AsyncExitStack() as life:
            address, servicer = await life.enter_async_context(serving())
            host, _, port = address.rpartition(":")
            channel = await life.enter_async_context(channels.open_channel(address))
            call = ModelServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest())
            await eventually(lambda: servicer.waiting == 1)
            for _ in range(3):
                for _ in range(2 * FEW):
                    _, writer = await asyncio.open_connection(host, int(port))
                    # A writer without references closes its connection.
                    life.callback(writer.close)
                    writer.write(begun)
                await eventually(lambda: is_served(address))
            servicer.goes_on.set()
            await call
    lines = [each for each in logged if each["event"] == "connections without a request made room for others"]
    assert [(line["port"], line["most"]) for line in lines] == [(int(port), FEW)]


async def test_calls_without_a_key_are_answered_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few, however many a connection has sent; after many it is ended. With a key it is no burden."""
    monkeypatch.setattr(crowd, "REFUSED_BURST", 4)
    monkeypatch.setattr(crowd, "REFUSED_PER_S", 0.01)
    monkeypatch.setattr(crowd, "MAX_REFUSED", 40)
    monkeypatch.setattr(crowd, "CALM_S", 0.05)
    async with serving() as (address, servicer), channels.open_channel(address) as channel:
        stub = ModelServiceStub(channel)
        wrong = [stub.Rollback(pb.RollbackRequest()) for _ in range(39)]
        await eventually(lambda: servicer.asked == 39)
        await eventually(lambda: sum(call.done() for call in wrong) == 4)
        right = pb.RollbackRequest()
        right.fence.session_id = b"x" * 16
        await stub.Rollback(right)
        more = [stub.Rollback(pb.RollbackRequest()) for _ in range(40)]
        assert {await call.code() for call in (*wrong, *more)} == {
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.UNAVAILABLE,
        }

        async def is_answered() -> bool:
            # A call may still go into the connection that has just been ended.
            return await stub.Rollback(right).code() is grpc.StatusCode.OK

        await eventually(is_answered)


@pytest.mark.parametrize(
    ("name", "peer"),
    [
        ("ipv4:127.0.0.1:50", ("127.0.0.1", 50)),
        ("ipv6:%5B::1%5D:50", ("::1", 50)),
        ("ipv6:[::ffff:10.0.0.1]:50", ("10.0.0.1", 50)),
        ("unix:/tmp/x", None),
        ("unknown", None),
        ("", None),
    ],
)
def test_a_client_has_the_address_that_its_socket_has(name: str, peer: tuple[str, int] | None) -> None:
    """As gRPC writes it, or none."""
    assert peer_of(name) == peer


def test_whose_calls_run_is_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many come and go meanwhile, of which no more are remembered than are needed."""
    monkeypatch.setattr(crowd, "MAX_PEERS", 4)
    known = Crowd()
    running = known.begin("ipv4:127.0.0.1:1")
    for port in range(2, 100):
        known.end(known.begin(f"ipv4:127.0.0.1:{port}"), was_let_in=True)
    assert known.begin("ipv4:127.0.0.1:1") is running
    assert len(known._known) == 4
