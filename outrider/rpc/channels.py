"""Channels and servers, all with the same options, and sockets that listen where they should.

A peer that is frozen or cut off is noticed by transport pings within seconds; how long an answer may take is for the
caller to say, because a process that hangs still answers pings.
"""

import asyncio
import errno
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.errors import InvalidRequest, OutriderError
from outrider.rpc.crowd import Crowd, max_connections
from outrider.rpc.guard import Accounts, Guard
from outrider.rpc.tls import TlsFiles
from outrider.rpc.wire import MAX_MESSAGE_BYTES, OPTIONS, Options, channel_options, check_address

# What the name means, whatever else a machine calls so.
LOCALHOST = ((socket.AF_INET, ("127.0.0.1",)), (socket.AF_INET6, ("::1",)))
PORT_TRIES = 8
DRAIN_S = 30.0
HEALTH_LOOK_S = 0.25
# Calls of a connection that run at once, far more than a gateway lets in; others wait in the client.
MAX_STREAMS = 1024
# For how long a connection may be silent before it says that it speaks HTTP/2, and TLS where that is wanted.
GREETING_MS = 10_000

log = structlog.get_logger()

Services = Mapping[str, Callable[[grpc.aio.Server], None]]
"""Full names of services, and what adds each to a server."""


class AddressTaken(OutriderError):
    """The operator must choose another address: this one is taken, or not of this machine."""

    status = "FAILED_PRECONDITION"
    reason = "ADDRESS_TAKEN"
    exit_code = 69


def _on_each(listen: str, bind: Callable[[int, str, int], socket.socket]) -> list[socket.socket]:
    """A socket for each address that HOST:PORT means, all of one port, as gRPC takes it: `localhost` is that of both
    families. `bind` makes one of a family, a host and a port. Raises AddressTaken and InvalidRequest.
    """
    name, _, port = check_address("listen", listen, min_port=0).rpartition(":")
    host = name.strip("[]")
    found: list[socket.socket] = []
    # A free port of one family may be taken in the other.
    for tries_left in reversed(range(1 if int(port) else PORT_TRIES)):
        try:
            places = LOCALHOST if host == "localhost" else socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[:1]
            for family, *_, place in places:
                try:
                    found.append(bind(family, str(place[0]), found[0].getsockname()[1] if found else int(port)))
                except OSError as error:
                    # A machine may have no IPv6.
                    if not found or error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                        raise
        except OSError:
            while found:
                found.pop().close()
            if not tries_left:
                message = f"Cannot listen on {listen}: it is taken, or not an address of this machine."
                raise AddressTaken(message, listen=listen) from None
        else:
            break
    return found


def listeners(listen: str, *, backlog: int, shares_port: bool = False) -> list[socket.socket]:
    """Sockets that listen on HOST:PORT, where port 0 takes a free one. `[::]` is all addresses of both families, and
    `localhost` that of each. Raises AddressTaken and InvalidRequest.
    """

    def bind(family: int, host: str, port: int) -> socket.socket:
        is_any = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(
            (host, port), family=family, backlog=backlog, reuse_port=shares_port, dualstack_ipv6=is_any
        )

    return _on_each(listen, bind)


def hold(listen: str) -> tuple[str, ExitStack]:
    """Reserves HOST:PORT for servers that share it, where port 0 takes a free one; returns the address, and what holds
    it until it is closed.

    Until then no other process can listen there, but for processes of the same user that share it too. No connections
    are taken. Raises AddressTaken and InvalidRequest.
    """

    def bind(family: int, host: str, port: int) -> socket.socket:
        held = socket.socket(family)
        try:
            # Connections that ended a moment ago are no owners.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((host, port))
            # Who has bound it as loosely as this socket is found by listening alone.
            socket.create_server(held.getsockname()[:2], family=family).close()
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            # Not before: a process that shares the port would not be in the way.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        except OSError:
            held.close()
            raise
        return held

    holding = ExitStack()
    sockets = _on_each(listen, bind)
    for each in sockets:
        holding.enter_context(each)
    return f"{listen.rpartition(':')[0]}:{sockets[0].getsockname()[1]}", holding


# Bytes of a stream that may be on their way to a reader. With gRPC's own, which grow, a service that is faster than its
# gateway has hundreds of small frames there, and each session waits for all of them.
UNREAD_OPTIONS: Options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16 << 10))


def server_options(*, shares_port: bool = False) -> Options:
    """Options of every server. Unless it shares its port, which somebody holds, a second service there fails."""
    return (
        *OPTIONS,
        ("grpc.so_reuseport", int(shares_port)),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Beyond it connections are refused; those that ask for nothing have made room before.
        ("grpc.max_allowed_incoming_connections", max_connections()),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.server_handshake_timeout_ms", GREETING_MS),
    )


def open_channel(address: str, tls: TlsFiles | None = None, further: Options = ()) -> grpc.aio.Channel:
    """A channel to a service; the connection is made by the first call."""
    # Of two options of one name gRPC takes the first.
    options = (*further, *channel_options())
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)


def open_blocking_channel(address: str, tls: TlsFiles | None = None, options: Options = ()) -> grpc.Channel:
    """A channel to a checked address for callers that block."""
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.channel_credentials(), options=options)


def open_link_channel(
    address: str, tls: TlsFiles | None = None, max_bytes: int = MAX_MESSAGE_BYTES, name: str = ""
) -> grpc.aio.Channel:
    """A channel for a link: its service sends little that has not been read, and puts the rest into larger frames.

    A message of more than max_bytes ends its call. `name` is what the service's certificate must say, where that is not
    the host of the address.
    """
    named: Options = (("grpc.ssl_target_name_override", name),) if name and tls is not None else ()
    return open_channel(address, tls, (*named, *UNREAD_OPTIONS, ("grpc.max_receive_message_length", max_bytes)))


class HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]
    """Health service of the library, with the method that it leaves out: its callers would read of a fault of ours."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.names = names

    async def List(  # noqa: N802 - the name is the protocol's
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthListResponse:
        """The status of every service by its name; under the empty one that of the server."""
        asked = {name: health_pb2.HealthCheckRequest(service=name) for name in self.names}
        return health_pb2.HealthListResponse(
            statuses={name: await self.Check(each, context) for name, each in asked.items()}
        )


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers on `address`; its health service says SERVING until `stop`."""

    address: str
    server: grpc.aio.Server
    health: HealthServicer
    watching: "asyncio.Task[None]"

    async def say_not_serving(self) -> None:
        """Health says NOT_SERVING under every name, from now on; calls are taken as before."""
        await self.health.enter_graceful_shutdown()

    async def follow(self, is_well: Callable[[], bool]) -> None:
        """Keeps health at SERVING while the process is well, and logs changes; for ever."""
        was_well, statuses = None, health_pb2.HealthCheckResponse
        while True:
            if (now_well := is_well()) != was_well:
                if was_well is not None or not now_well:
                    log.warning("readiness changed", ready=now_well)
                for name in self.health.names:
                    await self.health.set(name, statuses.SERVING if now_well else statuses.NOT_SERVING)
            was_well = now_well
            await asyncio.sleep(HEALTH_LOOK_S)

    async def stop(self, grace_s: float = DRAIN_S) -> None:
        """Says NOT_SERVING, takes no new calls, and cancels those that are not done after `grace_s`."""
        await self.say_not_serving()
        await self.server.stop(grace_s)
        self.watching.cancel()
        await asyncio.wait({self.watching})


def service(file: FileDescriptor, name: str, add: Callable[[grpc.aio.Server], None]) -> Services:
    """One service for `serve` to serve, by its name in a protocol file."""
    return {file.services_by_name[name].full_name: add}


async def serve(
    listen: str,
    services: Services,
    *,
    reflects: bool = False,
    shares_port: bool = False,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    tls: TlsFiles | None = None,
    clients: Collection[str] = (),
    accounts: Accounts | None = None,
) -> RunningServer:
    """Starts a server of the given services with health, and with reflection if it `reflects`.

    `listen` is HOST:PORT, and port 0 takes a free one; of servers that share a port each connection has one. What
    interceptors and handlers raise becomes a status. With `tls` it takes no others; `clients` are the names of those
    who may ask for more than health, where not all may; `accounts` know whose messages are, and what they may take.
    Raises AddressTaken and InvalidRequest.
    """
    options, crowd = server_options(shares_port=shares_port), Crowd()
    wall = Guard(clients, crowd, accounts or Accounts())
    server = grpc.aio.server(interceptors=[wall, *interceptors], options=options)
    for add in services.values():
        add(server)
    names = ("", *services)
    health_servicer = HealthServicer(names)
    for name in names:
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    if reflects:
        reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    host = check_address("listen", listen, min_port=0).rpartition(":")[0]
    try:
        port = server.add_secure_port(listen, tls.server_credentials()) if tls else server.add_insecure_port(listen)
    except RuntimeError:
        port = 0
    if port == 0 and tls is not None and not shares_port:
        # gRPC does not say which it is; this raises AddressTaken.
        hold(listen)[1].close()
        raise InvalidRequest("tls.cert", tls.tls.cert, "a certificate that gRPC takes, with a key that it takes")
    if port == 0:
        raise AddressTaken(f"Cannot listen on {listen}: it is taken, or not an address of this machine.", listen=listen)
    await server.start()
    watching = asyncio.create_task(crowd.watch(port), name="connections")
    return RunningServer(f"{host}:{port}", server, health_servicer, watching)
