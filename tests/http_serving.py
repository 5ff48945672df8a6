"""A small application behind the real HTTP server, and a client that speaks bytes, as no HTTP library would."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.rest.server import RunningRest, serve_rest
from gateway.rest.sse import EventStream

GET = b"GET / HTTP/1.1\r\nhost: test\r\n\r\n"


@dataclass
class Source:
    """Frames for a stream, and whether the generator that gives them has been closed."""

    frames: list[bytes] = field(default_factory=list)
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    """What the generator waits for behind its frames."""
    error: Exception | None = None
    is_closed: bool = False

    async def run(self) -> AsyncGenerator[bytes, None]:
        """The frames."""
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
async def served(app: ASGIApp) -> AsyncIterator[RunningRest]:
    """The application on a free port."""
    running = await serve_rest("127.0.0.1:0", app)
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
