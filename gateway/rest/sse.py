"""Server-sent events: frames as bytes, and a response that sends them to a client that may leave or stop reading.

Knows no generation, and does not look into a frame. No event has an `id:` or `retry:` line, for which clients of OpenAI
have no ear.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.grpc.servicer import ClientStalled
from gateway.rest.clients import departure, while_there

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
# To readers that split text as Python does, httpx's for one, these end a line, though not to the standard.
BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    # Proxies of nginx's kind collect a response unless they are told not to.
    "x-accel-buffering": "no",
}

log = structlog.get_logger()


def line(json: str) -> bytes:
    """JSON without breaks as bytes, in which no reader sees the end of a line."""
    return json.translate(BREAKS).encode()


def data(payload: str) -> bytes:
    """An event without a type; the payload is JSON without breaks."""
    return b"data: %b\n\n" % line(payload)


def typed(event: str, payload: str) -> bytes:
    """An event of a type; the payload is JSON without breaks."""
    return b"event: %b\ndata: %b\n\n" % (event.encode(), line(payload))


class EventStream(Response):
    """Sends frames one by one, each awaited, and a comment whenever nothing was sent for keep_alive_s.

    The generator runs in one task from its first line to its last. It is closed in that task before the response is
    over: when it ends, when the client leaves, and when the client has taken nothing for stall_s, which breaks the
    connection. An empty frame is not sent. What the generator raises after the headers breaks the connection too, so
    that no client takes the beginning of an answer for the whole.
    """

    def __init__(self, frames: AsyncGenerator[bytes, None], keep_alive_s: float, stall_s: float) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)
        self._frames = frames
        self._keep_alive_s = keep_alive_s
        self._stall_s = stall_s
        self._began: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[_Writer] | None = None
        self._running: asyncio.Task[None] | None = None

    async def begin(self, receive: Receive) -> None:
        """Runs the generator up to its first frame, which waits for the headers.

        Raises what the generator raises before that, when a status can still be chosen, and ClientGone.
        """
        running, began = self._start()
        try:
            await while_there(receive, _either(began, running))
            if running.done():
                running.result()
        except BaseException:
            await _end(running)
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response. Ends without a word when the client has left."""
        running, _ = self._start()
        writer = _Writer(send, self._stall_s)
        parts = [running]
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            leaving = asyncio.create_task(departure(receive), name="departure")
            parts += [leaving, asyncio.create_task(writer.keep_alive(self._keep_alive_s), name="keep-alive")]
            if self._writer is not None and not self._writer.done():
                self._writer.set_result(writer)
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            has_left = leaving.done()
        finally:
            results = await _end(*parts)
        if has_left:
            return
        errors = [each for each in results if isinstance(each, Exception)]
        if errors:
            await _break(scope, errors[0])
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _start(self) -> tuple["asyncio.Task[None]", "asyncio.Future[None]"]:
        if self._running is None or self._began is None:
            loop = asyncio.get_running_loop()
            self._began, self._writer = loop.create_future(), loop.create_future()
            self._running = asyncio.create_task(self._run(self._began, self._writer), name="event stream")
        return self._running, self._began

    async def _run(self, began: "asyncio.Future[None]", writer: "asyncio.Future[_Writer]") -> None:
        async with aclosing(self._frames) as frames:
            async for frame in frames:
                if not began.done():
                    began.set_result(None)
                if frame:
                    await (await writer).write(frame)


class _Writer:
    """Writes frames, and knows when it did."""

    def __init__(self, send: Send, stall_s: float) -> None:
        self._send = send
        self._stall_s = stall_s
        self._clock_s: Callable[[], float] = asyncio.get_running_loop().time
        self._wrote_s = self._clock_s()
        self._is_over = False

    async def write(self, frame: bytes) -> None:
        """Sends a frame; raises ClientStalled when the client lets it wait for too long."""
        self._is_over = frame == DONE
        try:
            async with asyncio.timeout(self._stall_s):
                await self._send({"type": "http.response.body", "body": frame, "more_body": True})
        except TimeoutError:
            raise ClientStalled(f"The client read nothing for {self._stall_s:g} seconds") from None
        self._wrote_s = self._clock_s()
        # A connection that is gone takes everything at once; without this, a generator that has all its frames ready
        # would keep the loop to itself.
        await asyncio.sleep(0)

    async def keep_alive(self, every_s: float) -> None:
        """Writes a comment whenever nothing was written for every_s, but none behind the end; never returns."""
        while True:
            silent_s = self._clock_s() - self._wrote_s
            if self._is_over:
                await asyncio.sleep(every_s)
            elif silent_s >= every_s:
                await self.write(KEEP_ALIVE)
            else:
                await asyncio.sleep(every_s - silent_s)


async def _either(first: "asyncio.Future[Any]", second: "asyncio.Future[Any]") -> None:
    await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)


async def _end(*tasks: "asyncio.Future[Any]") -> list[Any]:
    """Cancels tasks and waits for them; their results or exceptions."""
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


async def _break(scope: Scope, error: Exception) -> None:
    """Ends the connection in the middle of the response: its client sees that it was not the end of the answer."""
    if isinstance(error, ClientStalled):
        log.warning("client cut off", reason=error.message)
    else:
        log.error("unexpected error in an event stream", exc_info=error)
    abort = scope.get("state", {}).get("abort")
    if abort is None:
        raise error
    abort()
    # The connection is told in the loop's next turn.
    await asyncio.sleep(0)
