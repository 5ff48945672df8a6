"""Transport pings keep watch over idle connections; no server of ours takes them for an attack."""

from pathlib import Path

import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.basics import eventually
from support.network import ChaosProxy

from outrider.rpc import channels, wire

PING_BYTES = 17  # an HTTP/2 frame of 8 bytes
NUM_PINGS = 5  # the third that comes too soon, and so the fourth of all, ends a connection
HASTE = 50
INTERVALS = {"channel": "grpc.keepalive_time_ms", "server": "grpc.http2.min_ping_interval_without_data_ms"}


def hasty(options: wire.Options, interval: str) -> wire.Options:
    """Our options with the interval between pings shortened; gRPC itself sends none within a second."""
    return [(name, value // HASTE if name == interval else value) for name, value in options]


@pytest.mark.slow
async def test_an_idle_stream_is_not_cut_for_its_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call on which nothing is said for many keepalive intervals stays up."""
    server_options = hasty(channels.server_options(), INTERVALS["server"])
    channel_options = hasty(wire.channel_options(), INTERVALS["channel"])
    monkeypatch.setattr(channels, "server_options", lambda shares_port: server_options)
    monkeypatch.setattr(channels, "channel_options", lambda: channel_options)
    server = await channels.serve("127.0.0.1:0", {})
    try:
        async with ChaosProxy(server.address) as proxy, channels.open_channel(proxy.address) as channel:
            call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
            enough = proxy.request_bytes + NUM_PINGS * PING_BYTES
            await eventually(lambda: call.done() or proxy.request_bytes >= enough)
            assert not call.done()
            call.cancel()
    finally:
        await server.stop(0)


@pytest.mark.parametrize("options", [wire.channel_options(), channels.server_options()], ids=["channel", "server"])
def test_grpc_knows_every_option(options: wire.Options) -> None:
    """gRPC ignores options that it does not know without a word, so each has to be found in its library."""
    library = Path(cygrpc.__file__).read_bytes()
    assert [name for name, _ in options if f"{name}\0".encode() not in library] == []
