"""Tests of outrider.rpc.channels: what goes wrong in a handler arrives as itself, and nothing else of it does."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from outrider.errors import CacheFull, InvalidRequest, OutriderError, PeerLost, ProtocolViolation, Unsupported
from outrider.rpc import channels, errors
from outrider.v1 import model_service_pb2 as pb
from outrider.v1 import target_service_pb2 as target_pb
from outrider.v1.model_service_pb2_grpc import (
    ModelServiceServicer,
    ModelServiceStub,
    add_ModelServiceServicer_to_server,
)
from outrider.v1.target_service_pb2_grpc import (
    TargetServiceServicer,
    TargetServiceStub,
    add_TargetServiceServicer_to_server,
)

METHOD = "/outrider.v1.ModelService/GetModelInfo"
STREAM = "/outrider.v1.TargetService/Link"
Handle = Callable[[], Awaitable[None]]


class Servicer(ModelServiceServicer):
    """Does what a test says, then answers."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    async def GetModelInfo(self, request: object, context: object) -> pb.GetModelInfoResponse:  # noqa: N802
        """Answers one message with one."""
        await self.handle()
        return pb.GetModelInfoResponse(model_name="m")


class Streamer(TargetServiceServicer):
    """Answers every request, and does what a test says after the first."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    async def Link(self, request_iterator: AsyncIterator[object], context: grpc.aio.ServicerContext) -> None:  # noqa: N802
        """Answers every message of a stream."""
        async for _ in request_iterator:
            await context.write(target_pb.TargetServiceLinkResponse(numerics_id="n" * 1024))
            await self.handle()


class Harness:
    """A server whose handlers do what `handle` does, and a channel to it."""

    def __init__(self) -> None:
        self.handle: Handle = self.nothing

    async def nothing(self) -> None:
        """What handlers do when nothing is to go wrong."""

    async def start(self, listen: str = "127.0.0.1:0") -> channels.RunningServer:
        """Serves on an address; the test stops it."""

        async def handle() -> None:
            await self.handle()

        return await channels.serve(
            listen,
            {
                "outrider.v1.ModelService": lambda s: add_ModelServiceServicer_to_server(Servicer(handle), s),
                "outrider.v1.TargetService": lambda s: add_TargetServiceServicer_to_server(Streamer(handle), s),
            },
        )

    def fail(self, error: Exception) -> None:
        """Lets handlers raise."""

        async def raise_it() -> None:
            raise error

        self.handle = raise_it


@pytest.fixture
def harness() -> Harness:
    return Harness()


@pytest.fixture
async def server(harness: Harness) -> AsyncIterator[channels.RunningServer]:
    running = await harness.start()
    yield running
    await running.stop(0)


@pytest.fixture
async def channel(server: channels.RunningServer) -> AsyncIterator[grpc.aio.Channel]:
    async with channels.open_channel(server.address) as opened:
        yield opened


async def unary_error(channel: grpc.aio.Channel) -> grpc.aio.AioRpcError:
    """The error of a unary call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ModelServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
    return caught.value


async def stream_error(channel: grpc.aio.Channel) -> grpc.aio.AioRpcError:
    """The error of a stream, after an answer that came through."""
    call = TargetServiceStub(channel).Link(timeout=10)
    await call.write(target_pb.TargetServiceLinkRequest())
    assert isinstance(await call.read(), target_pb.TargetServiceLinkResponse)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value


@pytest.mark.parametrize("read_error", [unary_error, stream_error])
@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("fence.epoch", -1, "at least 1"),
        CacheFull("no block: 0 of 4 free", free=0),
        Unsupported("später"),
    ],
)
async def test_errors_arrive_as_they_were_raised(
    harness: Harness, channel: grpc.aio.Channel, error: OutriderError, read_error: Callable[..., Awaitable[Exception]]
) -> None:
    """Class, text and metadata survive, in unary calls and in streams."""
    harness.fail(error)
    arrived = errors.error_from(await read_error(channel))
    assert type(arrived) is type(error)
    assert (arrived.message, str(arrived), arrived.metadata) == (error.message, error.message, error.metadata)


async def test_details_follow_the_error_model(harness: Harness, channel: grpc.aio.Channel) -> None:
    """One ErrorInfo with reason and domain, and RetryInfo where waiting helps."""
    harness.fail(CacheFull("full", free=0))
    error = await unary_error(channel)
    rich: status_pb2.Status = rpc_status.from_call(error)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert rich.details[0].Unpack(info)
    assert rich.details[1].Unpack(retry)
    assert (error.code(), info.reason, info.domain) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "KV_CACHE_FULL",
        "outrider.v1",
    )
    assert dict(info.metadata) == {"free": "0"}
    assert retry.retry_delay.seconds > 0
    harness.fail(InvalidRequest("a", 1, "b"))
    assert len(rpc_status.from_call(await unary_error(channel)).details) == 1


@pytest.mark.parametrize("read_error", [unary_error, stream_error])
async def test_no_python_text_leaves(
    harness: Harness, channel: grpc.aio.Channel, read_error: Callable[..., Awaitable[grpc.aio.AioRpcError]]
) -> None:
    """An unexpected exception is INTERNAL, without its text."""
    harness.fail(ValueError("the secret prompt"))
    error = await read_error(channel)
    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "internal error")
    assert "secret" not in str(error.trailing_metadata())
    assert type(errors.error_from(error)) is OutriderError


async def test_unexpected_errors_are_logged_once(
    harness: Harness, channel: grpc.aio.Channel, capsys: pytest.CaptureFixture[str]
) -> None:
    """With their traceback, for the operator."""
    harness.fail(ValueError("the secret prompt"))
    await unary_error(channel)
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count("unexpected error in a handler") == 1


async def test_malformed_messages_are_the_callers_fault(channel: grpc.aio.Channel) -> None:
    """Bytes that are no message are INVALID_ARGUMENT in unary calls and in streams, and name their size only."""
    bad = b"\xff\xff\xff\xff"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(METHOD)(bad, timeout=10)
    call = channel.stream_stream(STREAM)(timeout=10)
    await call.write(bad)
    with pytest.raises(grpc.aio.AioRpcError) as caught_in_stream:
        await call.read()
    for error in (caught.value, caught_in_stream.value):
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert errors.error_from(error).metadata["value"] == "'4 bytes'"
        assert "Error" not in (error.details() or "")


async def test_one_failing_call_leaves_others_alone(harness: Harness, channel: grpc.aio.Channel) -> None:
    """The server goes on."""
    harness.fail(ValueError("x"))
    await unary_error(channel)
    harness.handle = harness.nothing
    assert (await ModelServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest())).model_name == "m"


async def test_a_client_that_leaves_is_no_error(
    harness: Harness, channel: grpc.aio.Channel, capsys: pytest.CaptureFixture[str]
) -> None:
    """A handler that is cancelled in the middle logs nothing."""
    entered, left = asyncio.Event(), asyncio.Event()

    async def linger() -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    harness.handle = linger
    call = TargetServiceStub(channel).Link()
    await call.write(target_pb.TargetServiceLinkRequest())
    await asyncio.wait_for(entered.wait(), 120)
    call.cancel()
    await asyncio.wait_for(left.wait(), 120)
    captured = capsys.readouterr()
    assert "unexpected" not in captured.out + captured.err


@pytest.mark.parametrize(
    ("opened", "least", "most"), [(channels.open_link_channel, 4, 40), (channels.open_channel, 60, 200)]
)
async def test_a_service_sends_little_that_is_not_read_on_a_link(
    server: channels.RunningServer,
    harness: Harness,
    opened: Callable[[str], grpc.aio.Channel],
    least: int,
    most: int,
) -> None:
    """About 16 frames of 1 KiB; on other channels as many as gRPC likes."""
    num_written, num_frames = 0, 200

    async def count() -> None:
        nonlocal num_written
        num_written += 1

    harness.handle = count
    async with opened(server.address) as channel:
        call = TargetServiceStub(channel).Link()
        for _ in range(num_frames):
            await call.write(target_pb.TargetServiceLinkRequest())
        before, num_same = -1, 0
        # The server answers these between two writes, so it waits with a write when so many of them see no other.
        while num_same < 50:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            before, num_same = num_written, num_same + 1 if num_written == before else 0
        assert least <= num_written <= most
        for _ in range(num_frames):
            assert (await call.read()).numerics_id
        assert num_written >= num_frames - 1


async def test_nobody_there_is_a_lost_peer(server: channels.RunningServer) -> None:
    """A connection that is refused says so as PeerLost."""
    await server.stop(0)
    async with channels.open_channel(server.address) as channel:
        assert isinstance(errors.error_from(await unary_error(channel)), PeerLost)


async def test_unknown_methods_are_violations(channel: grpc.aio.Channel) -> None:
    """A service that lacks a method speaks another protocol."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/outrider.v1.ModelService/Nothing")(b"", timeout=10)
    assert isinstance(errors.error_from(caught.value), ProtocolViolation)


async def test_an_address_has_one_owner(server: channels.RunningServer, harness: Harness) -> None:
    """A second server on a port fails, instead of sharing its calls; so does an address that is none."""
    with pytest.raises(channels.AddressTaken, match=server.address):
        await harness.start(server.address)
    with pytest.raises(channels.AddressTaken):
        await harness.start("not.an.address.invalid:1")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
async def test_a_held_port_is_for_those_who_share_it(host: str) -> None:
    """Several servers have it beside each other, and no other process, even while none of them is there."""
    address, held = channels.hold(f"{host}:0")
    name, _, port = address.rpartition(":")
    place, family = (name.strip("[]"), int(port)), socket.AF_INET
    with held:
        for _ in range(2):
            with pytest.raises(OSError, match="in use"):
                socket.create_server(place, family=family)
            with pytest.raises(channels.AddressTaken, match=port):
                channels.hold(address)
            servers = [await channels.serve(address, {}, shares_port=True) for _ in range(2)]
            assert {server.address for server in servers} == {address}
            with pytest.raises(channels.AddressTaken):
                await channels.serve(address, {})
            for server in servers:
                await server.stop(0)
    socket.create_server(place, family=family).close()


async def test_localhost_is_held_in_both_families() -> None:
    """So that no other server has the port in either, until it is let go."""
    address, held = channels.hold("localhost:0")
    port = int(address.rpartition(":")[2])
    places = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
    for family, host in places:
        with pytest.raises(OSError, match="Address already in use"):
            socket.create_server((host, port), family=family)
    held.close()
    for family, host in places:
        socket.create_server((host, port), family=family).close()


async def test_a_shared_port_cannot_be_held() -> None:
    """A server that shares it already would take a part of the connections."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as listener, pytest.raises(channels.AddressTaken):
        channels.hold(f"127.0.0.1:{listener.getsockname()[1]}")
    with pytest.raises(channels.AddressTaken):
        channels.hold("192.0.2.1:0")


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:", ":5", "127.0.0.1:65536", "127.0.0.1:http", ""])
async def test_an_address_is_a_host_and_a_port(harness: Harness, listen: str) -> None:
    """What gRPC would understand in some way of its own is refused."""
    with pytest.raises(InvalidRequest, match="HOST:PORT"):
        await harness.start(listen)


async def test_health_lists_all_services(server: channels.RunningServer, channel: grpc.aio.Channel) -> None:
    """Each with the status that a question for it alone gets."""
    stub, statuses = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckResponse
    names = {"", "outrider.v1.ModelService", "outrider.v1.TargetService"}
    for status in (statuses.SERVING, statuses.NOT_SERVING):
        listed = (await stub.List(health_pb2.HealthListRequest())).statuses
        assert {name: each.status for name, each in listed.items()} == dict.fromkeys(names, status)
        await server.say_not_serving()


async def test_a_new_channel_does_not_share_the_failure_of_another() -> None:
    """It reaches a service that has just come, while one that has tried in vain before waits for its next attempt."""
    first = await channels.serve("127.0.0.1:0", {})
    await first.stop(0)
    asked = health_pb2.HealthCheckRequest()
    async with channels.open_channel(first.address) as early:
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError):
                await health_pb2_grpc.HealthStub(early).Check(asked)
        second = await channels.serve(first.address, {})
        async with channels.open_channel(second.address) as late:
            answer = await health_pb2_grpc.HealthStub(late).Check(asked)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await second.stop(0)


async def test_health_tells_when_a_server_serves(harness: Harness) -> None:
    """SERVING from the start on, NOT_SERVING first of all when it stops, while calls under way still end."""
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def linger() -> None:
        entered.set()
        await go_on.wait()

    running = await harness.start()
    harness.handle = linger
    async with channels.open_channel(running.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="outrider.v1.TargetService")
        )
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        answer = asyncio.ensure_future(ModelServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest()))
        await asyncio.wait_for(entered.wait(), 120)
        stopping = asyncio.create_task(running.stop(10))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        go_on.set()
        assert (await answer).model_name == "m"
        await asyncio.wait_for(stopping, 120)
