"""A TCP proxy in front of one service that spoils connections on demand, with toxiproxy's vocabulary.

    async with ChaosProxy(service.address) as proxy:
        gateway = await start_gateway(GatewaySettings(target=proxy.address, ...))
        proxy.timeout()  # replies leave the service and never arrive

Toxics concern all connections, those to come included. Knows neither HTTP/2 nor messages: it cuts where it is told.
"""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

READ_BYTES = 1 << 16
# Closing with a linger time of 0 sends a reset, as a connection through a rebooted router gets it.
NO_LINGER = struct.pack("ii", 1, 0)


@dataclass(eq=False)
class Way:
    """One direction of one connection: what came in, and what of it has not gone out yet."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    num_bytes: int = 0
    held: bytearray = field(default_factory=bytearray)
    has_ended: bool = False

    def reset(self) -> None:
        """Ends the connection behind the writer with a TCP reset; what is held is lost."""
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
        """Resets all connections when so many more bytes of replies have gone through."""
        self._reply_bytes_left = num_bytes

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
        """Passes on what may go; nobody waits for it to leave, because the messages of these tests are small."""
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
