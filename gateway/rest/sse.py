"""Server-sent events: frames as bytes, and a response that sends them to a client that may leave or stop reading."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.generation.frontend import ClientStalled
from gateway.rest.errors import ClientGone

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
# To readers that split text as Python does, httpx's for one, these end a line, though not to the standard.
BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    # Proxies such as nginx buffer a response without this.
    "x-accel-buffering": "no",
}

log = structlog.get_logger()


def line(json: str) -> bytes:
    """A line of JSON as bytes that every reader takes for one line."""
    return json.translate(BREAKS).encode()


def data(payload: str) -> bytes:
    """An event without a type; the payload is one line of JSON."""
    return b"data: %b\n\n" % line(payload)


def typed(event: str, payload: str) -> bytes:
    """An event of a type; the payload is one line of JSON."""
    return b"event: %b\ndata: %b\n\n" % (event.encode(), line(payload))


@asynccontextmanager
async def while_there(receive: Receive, *companions: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Cancels its block when the client leaves, and then raises ClientGone; what a companion raises ends it as well.

    The server cancels nothing when a client leaves; code that works for one has to look.
    """

    async def watch() -> None:
        # What is left of its body is dropped.
        while (await receive())["type"] != "http.disconnect":
            pass
        raise ClientGone("The client left before its answer was there")

    first: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(watch(), name="departure")]
            tasks += [group.create_task(each, name="companion") for each in companions]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        # The first is why the others were cancelled.
        first = errors.exceptions[0]
        # Its frames hold all of them, and what holds the first keeps it, with all that it is about.
        errors.__traceback__ = None
    try:
        # Within the handler all of them would be its context.
        if first is not None:
            raise first
    finally:
        del first, group


class EventStream(Response):
    """Sends frames one by one, each awaited, and keep_alive, a comment, whenever nothing was sent for keep_alive_s.

    The generator is closed before the response is over: when it ends, when the client leaves, and when the client has
    taken nothing for stall_s, which breaks the connection. An empty frame is not sent. What the generator raises after
    the headers breaks the connection too, so that no client takes the beginning of an answer for the whole.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        keep_alive_s: float,
        stall_s: float,
        headers: Mapping[str, str] | None = None,
        keep_alive: bytes = KEEP_ALIVE,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({**HEADERS, **(headers or {})})
        self._frames, self._first = frames, b""
        self._keep_alive_s, self._stall_s = keep_alive_s, stall_s
        self._keep_alive_frame = keep_alive
        self._wrote_s, self._is_over = 0.0, False

    async def begin(self, receive: Receive) -> None:
        """Runs the generator up to its first frame; raises what it raises before that, and ClientGone."""
        try:
            async with while_there(receive):
                self._first = await anext(self._frames, b"")
        except BaseException:
            await self._frames.aclose()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response, until its end or until the client has left."""
        try:
            async with aclosing(self._frames):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                self._wrote_s = asyncio.get_running_loop().time()
                async with while_there(receive, self._keep_alive(send)):
                    await self._write(self._first, send)
                    async for frame in self._frames:
                        await self._write(frame, send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientGone:
            return
        except Exception as error:
            if isinstance(error, ClientStalled):
                log.warning("client cut off", reason=error.message)
            else:
                log.error("unexpected error in an event stream", exc_info=error)
            abort = scope.get("state", {}).get("abort")
            if abort is None:
                raise
            # In the middle of the response: its client sees that it was not the end of the answer.
            abort()
            # The connection learns of it in the loop's next turn.
            await asyncio.sleep(0)

    async def _write(self, frame: bytes, send: Send) -> None:
        if not frame:
            return
        self._is_over = frame == DONE
        try:
            async with asyncio.timeout(self._stall_s):
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        except TimeoutError:
            raise ClientStalled(f"The client read nothing for {self._stall_s:g} seconds") from None
        self._wrote_s = asyncio.get_running_loop().time()
        # A connection that is gone takes everything at once; without this, a generator that has all its frames ready
        # would keep the loop to itself.
        await asyncio.sleep(0)

    async def _keep_alive(self, send: Send) -> None:
        while not self._is_over:
            wait_s = self._wrote_s + self._keep_alive_s - asyncio.get_running_loop().time()
            await (asyncio.sleep(wait_s) if wait_s > 0 else self._write(self._keep_alive_frame, send))
