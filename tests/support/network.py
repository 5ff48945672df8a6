"""A TCP proxy that spoils connections on demand, a small application in the real HTTP server, and who waits."""

import asyncio
import socket
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.rest.server import RunningRest, serve_rest
from gateway.rest.sse import EventStream
from outrider.rpc.guard import Throttle

# Of a client's channel. Without these its transport takes a megabyte in before anybody reads it; with them, what is
# said does not run ahead of who reads by more than some messages.
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1000))
READ_BYTES = 1 << 16
# Closing with a linger time of 0 sends a reset, as a connection through a rebooted router gets it.
NO_LINGER = struct.pack("ii", 1, 0)


def turns_taken(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each answer that has a pace had to wait, from now on, in this process."""
    turns: list[float] = []
    wait_s = Throttle.wait_s

    def noted(self: Throttle, now_s: float) -> float:
        turns.append(wait_s(self, now_s))
        return turns[-1]

    monkeypatch.setattr(Throttle, "wait_s", noted)
    return turns


@dataclass(eq=False)
class Way:
    """One direction of one connection: what came in, and what of it has not gone out yet."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    num_bytes: int = 0
    held: bytearray = field(default_factory=bytearray)
    has_ended: bool = False

    def reset(self) -> None:
        """Ends the connection of the writer with a TCP reset; what is held is lost."""
        connection = self.writer.get_extra_info("socket")
        if connection is not None and not self.writer.transport.is_closing():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.writer.transport.abort()


class ChaosProxy:
    """Listens on `address` for one service, which is looked up anew for every connection; None refuses them."""

    def __init__(self, upstream: str | None) -> None:
        self.upstream = upstream
        self.address = ""
        self._past_bytes = 0
        self._requests: list[Way] = []
        self._replies: list[Way] = []
        self._holds_replies = False
        self._slice_bytes = 0
        self._reply_bytes_left: int | None = None
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.reset_peer()
        await self._server.wait_closed()

    @property
    def request_bytes(self) -> int:
        """Bytes that came from clients so far."""
        return self._past_bytes + sum(way.num_bytes for way in self._requests)

    @property
    def held_bytes(self) -> int:
        """Bytes of replies that have left the service and are kept back."""
        return sum(len(way.held) for way in self._replies)

    def timeout(self) -> None:
        """Keeps replies back from now on, and the ends of connections too."""
        self._holds_replies = True

    def slicer(self, num_bytes: int) -> None:
        """Cuts what goes either way into pieces of so many bytes, each a segment of its own."""
        self._slice_bytes = num_bytes

    def limit_data(self, num_bytes: int) -> None:
        """Resets all connections when so many more bytes of replies have gone through, what was kept back first."""
        self._holds_replies, self._reply_bytes_left = False, num_bytes
        for way in self._replies:
            self._send(way)

    @property
    def has_hit_limit(self) -> bool:
        """Whether the reset of `limit_data` has happened."""
        return self._reply_bytes_left == 0

    def reset_peer(self) -> None:
        """Resets all connections; what is held is lost."""
        for way in (*self._requests, *self._replies):
            way.reset()

    def heal(self) -> None:
        """Ends all toxics; what was kept back arrives now."""
        self._holds_replies, self._slice_bytes, self._reply_bytes_left = False, 0, None
        for way in self._replies:
            self._send(way)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            host, _, port = (self.upstream or "").rpartition(":")
            upstream = await asyncio.open_connection(host, int(port or 0))
        except OSError:
            writer.transport.abort()
            return
        requests, replies = Way(reader, upstream[1]), Way(upstream[0], writer)
        self._requests.append(requests)
        self._replies.append(replies)
        try:
            await asyncio.gather(self._pump(requests), self._pump(replies))
        finally:
            self._requests.remove(requests)
            self._replies.remove(replies)
            self._past_bytes += requests.num_bytes

    async def _pump(self, way: Way) -> None:
        async for data in _chunks(way.reader):
            way.num_bytes += len(data)
            way.held += data
            self._send(way)
        way.has_ended = True
        self._send(way)

    def _send(self, way: Way) -> None:
        """Passes on what may go; no code waits for it to leave, because the messages of these tests are small."""
        is_reply = way in self._replies
        if (is_reply and self._holds_replies) or way.writer.transport.is_closing():
            return
        data = bytes(way.held)
        way.held.clear()
        if is_reply and self._reply_bytes_left is not None:
            data = data[: self._reply_bytes_left]
            self._reply_bytes_left -= len(data)
        size = self._slice_bytes or max(len(data), 1)
        for start in range(0, len(data), size):
            way.writer.write(data[start : start + size])
        if is_reply and self.has_hit_limit:
            self.reset_peer()
        elif way.has_ended:
            way.writer.close()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """What arrives, until the other end closes or resets the connection."""
    try:
        while data := await reader.read(READ_BYTES):
            yield data
    except OSError:
        return


GET = b"GET / HTTP/1.1\r\nhost: test\r\n\r\n"


@dataclass
class Source:
    """Frames for a stream, and whether the generator that gives them has been closed."""

    frames: list[bytes] = field(default_factory=list)
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    """What the generator waits for after its frames."""
    error: Exception | None = None
    is_closed: bool = False

    async def run(self) -> AsyncGenerator[bytes, None]:
        """Yields the frames of the stream."""
        task = asyncio.current_task()
        try:
            for frame in self.frames:
                yield frame
            await self.hold.wait()
            if self.error is not None:
                raise self.error
        finally:
            # In the task that began it, where timeouts and traces of the generator belong.
            self.is_closed = asyncio.current_task() is task


def streaming(source: Source, keep_alive_s: float = 60, stall_s: float = 60) -> ASGIApp:
    """An application that answers with the source's frames."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await EventStream(source.run(), keep_alive_s, stall_s)(scope, receive, send)

    return app


@asynccontextmanager
async def served(app: ASGIApp, listen: str = "127.0.0.1:0") -> AsyncIterator[RunningRest]:
    """The application on a free port."""
    running = await serve_rest(listen, app)
    try:
        yield running
    finally:
        await running.stop(0)


@asynccontextmanager
async def connected(
    running: RunningRest, request: bytes = GET
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection on which something was sent."""
    host, _, port = running.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        yield reader, writer
    finally:
        writer.close()
