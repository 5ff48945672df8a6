"""gRPC without sockets: servers, channels and the network between them, all in one virtual loop.

Handlers are those of the generated code within the guard of every real server. Knows no services; see simulation.calls.
"""

import asyncio
import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import structlog
from simulation.calls import LOST, OK, Call, ServerCall, Ways
from simulation.loop import VirtualLoop, context_of

from outrider.rpc.crowd import Crowd
from outrider.rpc.guard import Accounts, Guard

log = structlog.get_logger()


@dataclass(eq=False)
class Server:
    """What generated code adds handlers to, within the guard of every real server."""

    loop: VirtualLoop
    host: str
    handlers: dict[str, Any] = field(default_factory=dict)
    calls: dict[ServerCall, None] = field(default_factory=dict)
    accepts: bool = True
    wrap: Callable[[ServerCall, Any], Any] = lambda call, coroutine: coroutine
    """Stands around every handler's coroutine."""

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Registered handlers are the same, by name."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Adds the methods of a service."""
        self.handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    async def guarded(self) -> "Server":
        """Puts the guard before every handler; called once, when all are added."""
        guard = Guard((), Crowd(), Accounts())
        for method, handler in list(self.handlers.items()):

            async def continuation(details: object, handler: Any = handler) -> Any:
                return handler

            details = SimpleNamespace(method=method, invocation_metadata=())
            self.handlers[method] = await guard.intercept_service(continuation, details)
        return self

    def begin(self, call: ServerCall) -> None:
        """A client has begun a call."""
        self.calls[call] = None
        context = context_of(self.host)
        call.task = self.loop.create_task(self._serve(call), context=context)
        # A task that is cancelled before its first step runs none of its own code.
        call.task.add_done_callback(lambda task: self.calls.pop(call, None), context=context)

    async def _serve(self, call: ServerCall) -> None:
        try:
            await self.wrap(call, self._handle(call, self.handlers[call.call.method]))
            call.end(OK)
        except grpc.aio.AbortError:
            pass  # The status is on its way.
        except asyncio.CancelledError:
            call.end((grpc.StatusCode.CANCELLED, "Cancelled on the server", ()))
        except Exception:
            log.exception("a handler raised past the guard", method=call.call.method)
            call.end((grpc.StatusCode.UNKNOWN, "Unexpected", ()))

    async def _handle(self, call: ServerCall, handler: Any) -> None:
        # The guard reads the one message of a call by itself.
        requests = call.requests(handler.request_deserializer or bytes)
        if handler.stream_unary:
            await call.write(await handler.stream_unary(requests, call))
            return
        answers = handler.stream_stream(requests, call)
        if inspect.isawaitable(answers):
            await answers
            return
        async for answer in answers:
            await call.write(answer)


class Network:
    """Which servers can be reached where."""

    def __init__(self, loop: VirtualLoop, ways: Ways) -> None:
        self.loop = loop
        self.ways = ways
        self.channels: list[Channel] = []
        self._servers: dict[str, Server] = {}

    def listen(self, address: str, server: Server) -> None:
        """A server answers at an address."""
        self._servers[address] = server

    def forget(self, address: str) -> None:
        """Ends the server at an address."""
        del self._servers[address]

    def reach(self, address: str) -> Server | None:
        """The server at an address, None when there is no listener."""
        server = self._servers.get(address)
        return server if server is not None and server.accepts else None

    def cut(self, address: str) -> None:
        """All connections to an address break."""
        for channel in self._channels_to(address):
            channel.break_connection()

    def go_away(self, address: str) -> None:
        """A server says that it takes no new calls; those under way go on."""
        for channel in self._channels_to(address):
            channel.set_ready(is_ready=False)

    def _channels_to(self, address: str) -> "list[Channel]":
        return [channel for channel in self.channels if channel.address == address]


class Channel:
    """What generated stubs and the gateway use of grpc.aio.Channel."""

    def __init__(self, network: Network, address: str) -> None:
        self.network = network
        self.loop, self.ways = network.loop, network.ways
        self.address = address
        self.calls: dict[Call, None] = {}  # in their order, which a set has not
        self._is_ready = False
        self._state_changed = asyncio.Event()
        network.channels.append(self)

    def stream_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, **options: Any
    ) -> Callable[..., Call]:
        """What begins calls of a method."""

        def begin(timeout: float | None = None, metadata: object = None) -> Call:
            return Call(self, method, request_serializer, response_deserializer, timeout)

        return begin

    def unary_unary(
        self, method: str, request_serializer: Any, response_deserializer: Any, **options: Any
    ) -> Callable[..., "UnaryCall"]:
        """What makes calls of a method."""

        def begin(request: Any, timeout: float | None = None, metadata: object = None) -> UnaryCall:
            return UnaryCall(Call(self, method, request_serializer, response_deserializer, timeout), request)

        return begin

    def unary_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, **options: Any
    ) -> Callable[..., Call]:
        """What begins calls of a method with their one request; read with `read`."""

        def begin(request: Any, timeout: float | None = None) -> Call:
            call = Call(self, method, request_serializer, response_deserializer, timeout)
            call.loop.create_task(_send_only(call, request))
            return call

        return begin

    def reach(self) -> Server | None:
        """Connects; None when there is no listener."""
        server = self.network.reach(self.address)
        self.set_ready(is_ready=server is not None)
        return server

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """READY from the first connection until it breaks."""
        return grpc.ChannelConnectivity.READY if self._is_ready else grpc.ChannelConnectivity.IDLE

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Returns when the state is another one."""
        while self.get_state() is last_observed_state:
            self._state_changed.clear()
            await self._state_changed.wait()

    def set_ready(self, *, is_ready: bool) -> None:
        """Notes whether there is a connection."""
        if is_ready is not self._is_ready:
            self._is_ready = is_ready
            self._state_changed.set()

    def break_connection(self) -> None:
        """The connection is gone."""
        self.loop.call_later(
            self.ways.latency_s(self.address), partial(self._break, list(self.calls)), context=context_of("")
        )

    async def close(self, grace: float | None = None) -> None:
        """Ends all calls."""
        for call in list(self.calls):
            call.cancel()

    def _break(self, calls: Sequence[Call]) -> None:
        self.set_ready(is_ready=False)
        for call in calls:
            call.end(LOST)


class UnaryCall:
    """A call with one message each way; awaited once."""

    def __init__(self, call: Call, request: Any) -> None:
        self._call = call
        self._task = call.loop.create_task(self._exchange(request))

    def __await__(self) -> Generator[Any, None, Any]:
        """The answer; raises AioRpcError."""
        try:
            answer = yield from self._task.__await__()
        except asyncio.CancelledError:
            self._call.cancel()
            raise
        if isinstance(answer, grpc.aio.AioRpcError):
            raise answer
        return answer

    async def _exchange(self, request: Any) -> Any:
        """The answer or the error, which is raised where the call is awaited, if it is."""
        try:
            with suppress(asyncio.InvalidStateError):  # The call has ended, and the read says why.
                await self._call.write(request)
            answer = await self._call.read()
            await self._call.code()
        except grpc.aio.AioRpcError as error:
            return error
        return answer


async def _send_only(call: Call, request: Any) -> None:
    try:
        await call.write(request)
        await call.done_writing()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass  # The reader of the call learns why.
