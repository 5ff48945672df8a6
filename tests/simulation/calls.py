"""One call in memory, from its begin to its status: what a caller and a handler see is what grpc.aio shows them.

Statuses as AioRpcError, EOF, InvalidStateError for a write into a call that has ended, a cancelled handler task, an end
of the requests that looks alike for a half-close and a cancellation; real serialisation. What may happen to a message
on its way is decided elsewhere; see simulation.weather.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import grpc
from simulation.loop import HOST, VirtualLoop, context_of
from simulation.pipes import Delivery, Pipe

LOST = (grpc.StatusCode.UNAVAILABLE, "Socket closed", ())
CANCELLED = (grpc.StatusCode.CANCELLED, "Locally cancelled by application!", ())
EXPIRED = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ())
OK = (grpc.StatusCode.OK, "", ())

Status = tuple[grpc.StatusCode, str, Sequence[tuple[str, str | bytes]]]


class Ways(Protocol):
    """What happens to messages between a client and a server."""

    def latency_s(self, address: str) -> float:
        """How long a connection, a status or a cancellation takes."""
        ...

    def notice_s(self, address: str) -> float:
        """How long a server takes to notice that a connection is gone, which may be until its pings fail."""
        ...

    def deliveries(self, call: "Call", data: bytes, *, is_up: bool) -> Iterable[Delivery]:
        """What arrives of a message; may also break the call, or anything else."""
        ...


class Host(Protocol):
    """The server of a call."""

    host: str
    handlers: Mapping[str, Any]

    def begin(self, call: "ServerCall") -> None:
        """A client has begun a call."""
        ...


class Connection(Protocol):
    """The channel of a call."""

    loop: VirtualLoop
    ways: Ways
    address: str
    calls: "dict[Call, None]"

    def reach(self) -> Host | None:
        """The server, None when there is no listener."""
        ...


class Call:
    """One call from its begin to its status; owns both ends."""

    def __init__(
        self, channel: Connection, method: str, serialize: Any, deserialize: Any, timeout: float | None
    ) -> None:
        self.loop, self.ways, self.address, self.method = channel.loop, channel.ways, channel.address, method
        self.black_holes: set[bool] = set()
        """Directions in which everything gets lost: True for up."""
        self._channel, self._serialize, self._deserialize = channel, serialize, deserialize
        self.expires_s = None if timeout is None else self.loop.time() + timeout
        self.status: Status | None = None
        self.server_call: ServerCall | None = None
        self._inbox: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._connected = asyncio.Event()
        self._half_closed = False
        self._own_host = HOST.get()
        self.down = Pipe(self.loop, self._own_host, self._arrive)
        self._up: Pipe | None = None
        channel.calls[self] = None
        self.loop.call_later(self.ways.latency_s(self.address), self._connect)
        if timeout is not None:
            self.loop.call_later(max(0.0, timeout), self.end, EXPIRED)

    def done(self) -> bool:
        """Whether the call has its status."""
        return self.status is not None

    def cancelled(self) -> bool:
        """Whether it ended by `cancel`."""
        return self.status is CANCELLED

    def cancel(self) -> bool:
        """Ends the call here and informs the server."""
        if self.done():
            return False
        self.end(CANCELLED)
        return True

    async def write(self, message: Any) -> None:
        """Sends a message; waits for the connection only."""
        try:
            self._check_writable()
            await self._connected.wait()
            if self.status is not None:
                await self._raise_for_status()
                self._check_writable()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._up is None:
            raise AssertionError("a connected call has a way up")
        self.send(self._up, self._serialize(message), is_up=True)

    async def done_writing(self) -> None:
        """Informs the server that no more messages come."""
        if not self.done() and not self._half_closed:
            self._half_closed = True
            await self._connected.wait()
            if self._up is not None:
                self._up.put(self.ways.latency_s(self.address), None)

    async def read(self) -> Any:
        """The next message; EOF at a good end, else the call's error."""
        try:
            while not self._inbox and self.status is None:
                self._changed.clear()
                await self._changed.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._inbox:
            return self._deserialize(self._inbox.popleft())
        await self._raise_for_status()
        return grpc.aio.EOF

    async def code(self) -> grpc.StatusCode:
        """The status code, as soon as there is one."""
        while self.status is None:
            self._changed.clear()
            await self._changed.wait()
        return self.status[0]

    def send(self, pipe: Pipe, data: bytes, *, is_up: bool) -> None:
        """Sends bytes one way, through the weather."""
        for delivery in list(self.ways.deliveries(self, data, is_up=is_up)):
            pipe.put(delivery.delay_s, delivery.data, in_order=delivery.in_order)

    def end(self, status: Status) -> None:
        """The call ends on the client's side; a status that does not come from the server drops what is unread."""
        if self.done():
            return
        self.status = status
        self._channel.calls.pop(self, None)
        if status in {LOST, CANCELLED, EXPIRED}:
            self._inbox.clear()
            if self.server_call is not None:
                ways = self.ways
                delay_s = ways.notice_s(self.address) if status is LOST else ways.latency_s(self.address)
                self.loop.call_later(delay_s, self.server_call.leave, context=context_of(self.server_call.server.host))
        self._connected.set()
        self._changed.set()

    def lose(self, delay_s: float = 0.0) -> None:
        """The connection breaks under the call."""
        self.loop.call_later(delay_s, self.end, LOST, context=context_of(self._own_host))

    def _connect(self) -> None:
        """The server hears of the call, and from then on messages can be sent."""
        if self.done():
            return
        server = self._channel.reach()
        if server is None:
            self.end((grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses", ()))
            return
        self.server_call = ServerCall(self, server)
        self._up = Pipe(self.loop, server.host, self.server_call.arrive)
        server.begin(self.server_call)
        self._connected.set()

    def _arrive(self, item: bytes | Status) -> None:
        if self.done():
            return
        if isinstance(item, bytes):
            self._inbox.append(item)
            self._changed.set()
        else:
            self.end(item)

    def _check_writable(self) -> None:
        if self.done() or self._half_closed:
            raise asyncio.InvalidStateError("RPC already finished.")

    async def _raise_for_status(self) -> None:
        if self.status is None or self.status is OK or self.status[0] is grpc.StatusCode.OK:
            return
        if self.status is CANCELLED:
            raise asyncio.CancelledError
        code, details, trailing = self.status
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata.from_tuple(tuple(trailing)), details)


class ServerCall:
    """The server's end of a call: the handler's context and its requests."""

    def __init__(self, call: Call, server: Host) -> None:
        self.call = call
        self.server = server
        self.task: asyncio.Task[None] | None = None
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._client_gone = False
        self._status: Status | None = None

    def arrive(self, item: bytes | None) -> None:
        """A message, or None for the end of them."""
        self._requests.put_nowait(item)

    async def requests(self, deserialize: Callable[[bytes], Any]) -> AsyncIterator[Any]:
        """Messages up to a half-close or a cancellation."""
        while not self._client_gone and (data := await self._requests.get()) is not None:
            if self._client_gone:
                return
            yield deserialize(data)

    async def read(self) -> Any:
        """The next message as it came; EOF after a half-close or a cancellation."""
        data = await self._requests.get()
        return grpc.aio.EOF if data is None else data

    def peer(self) -> str:
        """No address: no client is connected."""
        return ""

    async def send_initial_metadata(self, metadata: tuple[()]) -> None:
        """There is none that anybody would look at; raises when the call has ended."""
        if self.done():
            raise grpc.aio.UsageError("RPC already finished.")

    async def write(self, message: Any) -> None:
        """Sends a message; raises when the call has ended."""
        if self.done():
            raise grpc.aio.UsageError("RPC already finished.")
        handler = self.server.handlers[self.call.method]
        self.call.send(self.call.down, handler.response_serializer(message), is_up=False)

    async def abort_with_status(self, status: Any) -> None:
        """Ends the call with a status, and the handler with AbortError."""
        self.end((status.code, status.details, tuple(status.trailing_metadata or ())))
        raise grpc.aio.AbortError("Locally aborted.")

    def cancelled(self) -> bool:
        """Whether the client has left."""
        return self._client_gone

    def done(self) -> bool:
        """Whether the status was sent or no client is there to take it."""
        return self._status is not None or self._client_gone

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline."""
        expires_s = self.call.expires_s
        return None if expires_s is None else max(0.0, expires_s - self.call.loop.time())

    def invocation_metadata(self) -> tuple[()]:
        """Metadata of the call, which has none."""
        return ()

    def auth_context(self) -> dict[str, list[bytes]]:
        """Clients show no certificates."""
        return {}

    def end(self, status: Status) -> None:
        """Sends the status after the messages."""
        if self._status is None and not self._client_gone and False not in self.call.black_holes:
            self.call.down.put(self.call.ways.latency_s(self.call.address), status)
        self._status = self._status or status

    def leave(self) -> None:
        """The server hears that the client has left: the requests end, and the handler is cancelled."""
        if not self._client_gone:
            self._client_gone = True
            self._requests.put_nowait(None)
            if self.task is not None and not self.task.done():
                self.task.cancel()
