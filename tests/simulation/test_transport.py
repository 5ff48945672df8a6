"""The in-memory transport shows callers and handlers what grpc.aio shows them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import grpc
import pytest
from simulation.calls import Call
from simulation.loop import VirtualLoop, context_of, run
from simulation.pipes import Delivery
from simulation.transport import Channel, Network, Server

from outrider.errors import InvalidRequest
from outrider.rpc.errors import error_from
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1 import target_service_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.model_service_pb2_grpc import ModelServiceServicer, ModelServiceStub
from outrider.v1.model_service_pb2_grpc import add_ModelServiceServicer_to_server as add_models
from outrider.v1.target_service_pb2_grpc import TargetServiceServicer, TargetServiceStub
from outrider.v1.target_service_pb2_grpc import add_TargetServiceServicer_to_server as add_targets


class FairWeather:
    """Everything arrives a millisecond later."""

    def latency_s(self, address: str) -> float:
        """Latency of a millisecond."""
        return 0.001

    notice_s = latency_s

    def deliveries(self, call: Call, data: bytes, *, is_up: bool) -> Iterable[Delivery]:
        """Delivers every message."""
        return [Delivery(0.001, data)]


class Echo(TargetServiceServicer, ModelServiceServicer):
    """Answers every message with its base_len, up to 9; refuses 10."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    async def Link(self, requests: AsyncIterator[pb.TargetServiceLinkRequest], context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """Notes how it ends."""
        try:
            async for frame in requests:
                [request] = frame.requests
                if request.fence.base_len == 10:
                    raise InvalidRequest("base_len", 10, "less")
                await context.write(pb.TargetServiceLinkResponse(session_count=request.fence.base_len))
            self.ends.append("returned")
        except asyncio.CancelledError:
            self.ends.append("cancelled")
            raise

    async def GetModelInfo(self, request: object, context: Any) -> model_pb.GetModelInfoResponse:  # noqa: N802
        """Never sends an answer."""
        await asyncio.Event().wait()
        raise AssertionError


def live(check: Callable[[Network, Channel, Echo], Awaitable[None]]) -> None:
    """Runs a check against a server that echoes."""
    loop = VirtualLoop(0)

    async def main() -> None:
        network, echo, server = Network(loop, FairWeather()), Echo(), Server(loop, "server")
        add_targets(echo, server)  # type: ignore[arg-type]
        add_models(echo, server)  # type: ignore[arg-type]
        network.listen("echo", await server.guarded())
        await loop.create_task(check(network, Channel(network, "echo"), echo), context=context_of("client"))
        await asyncio.sleep(1)

    run(main(), loop)
    assert not loop.faults


def request(base_len: int) -> pb.TargetServiceLinkRequest:
    """A frame of one message."""
    return pb.TargetServiceLinkRequest(requests=[pb.VerifyRequest(fence=types_pb2.Fence(base_len=base_len))])


def test_messages_arrive_in_order_and_a_half_close_ends_the_call_well() -> None:
    """Two messages, two answers, EOF, OK; a write after the end raises InvalidStateError."""

    async def check(network: Network, channel: Channel, echo: Echo) -> None:
        call: Any = TargetServiceStub(channel).Link()  # type: ignore[arg-type]
        for base_len in (1, 2):
            await call.write(request(base_len))
        assert [(await call.read()).session_count for _ in range(2)] == [1, 2]
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(request(3))
        assert echo.ends == ["returned"]

    live(check)


def test_an_error_of_the_handler_comes_as_its_status() -> None:
    """The guard of real servers translates it."""

    async def check(network: Network, channel: Channel, echo: Echo) -> None:
        call: Any = TargetServiceStub(channel).Link()  # type: ignore[arg-type]
        await call.write(request(10))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert isinstance(error_from(raised.value), InvalidRequest)

    live(check)


def test_cancelling_a_read_cancels_the_call_and_its_handler() -> None:
    """As in grpc.aio."""

    async def check(network: Network, channel: Channel, echo: Echo) -> None:
        call: Any = TargetServiceStub(channel).Link()  # type: ignore[arg-type]
        await call.write(request(1))
        await call.read()
        reading = asyncio.ensure_future(call.read())
        await asyncio.sleep(0.1)
        reading.cancel()
        await asyncio.sleep(0.1)
        assert call.cancelled()
        assert echo.ends == ["cancelled"]

    live(check)


def test_a_broken_connection_is_unavailable_and_changes_the_state() -> None:
    """Calls end, the channel is not ready, and the handler is cancelled."""

    async def check(network: Network, channel: Channel, echo: Echo) -> None:
        call: Any = TargetServiceStub(channel).Link()  # type: ignore[arg-type]
        await call.write(request(1))
        await call.read()
        network.cut("echo")
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.sleep(0.1)
        assert echo.ends == ["cancelled"]

    live(check)


def test_a_call_ends_at_its_deadline_and_one_to_nobody_at_once() -> None:
    """DEADLINE_EXCEEDED and UNAVAILABLE."""

    async def check(network: Network, channel: Channel, echo: Echo) -> None:
        for address, code in (("echo", grpc.StatusCode.DEADLINE_EXCEEDED), ("nowhere", grpc.StatusCode.UNAVAILABLE)):
            stub: Any = ModelServiceStub(Channel(network, address))  # type: ignore[arg-type]
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.GetModelInfo(model_pb.GetModelInfoRequest(), timeout=5.0)
            assert raised.value.code() is code

    live(check)
