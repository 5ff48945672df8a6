"""An HTTP server inside the running loop: uvicorn without its signal handlers and its log of requests.

It bounds what no middleware sees: length and time of request headers, how long a client may go on to send what has
been answered, and what a client that does not read makes the server keep.
"""

import asyncio
import contextvars
import re
import socket
import uuid
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import h11
import structlog
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.rest.errors import HeadersTooLarge, InvalidHttp, error_json, status_of
from outrider.process.upkeep import Upkeep
from outrider.rpc.channels import listeners
from outrider.rpc.crowd import MADE_ROOM, Crowd, OncePerMinute
from outrider.rpc.tls import TlsFiles

HEAD_BYTES = 32 << 10
# Longer than clients keep an idle connection, so that none is closed under their next request.
IDLE_S = 75
# For how long a client may send a head, also its first, or the rest of a body that has its answer already.
SEND_S = 30.0
# What a client that does not read can make the kernel and the server keep. Without these, megabytes.
SEND_BUFFER_BYTES, WRITE_BUFFER_BYTES = 64 << 10, 16 << 10
# Of those that come how many wait in the system, and how many are taken before others have made room for them.
BACKLOG, ACCEPTED = 1024, 64
LOOK_S = 0.02
SLASHES = re.compile(rb"//+")
ABSOLUTE = re.compile(rb"https?://([^/@]*@)?(?P<host>[^/@]+)(?P<path>/.*)?", re.IGNORECASE | re.DOTALL)
# What connections have to their places: with nothing to answer 0, or 1 with a key; with a body on its way, and more.
SENDING, ANSWERED = 2, 3
CUT_S = 5.0

log = structlog.get_logger()


class Places:
    """Places of the connections that there may be; one that asks for nothing makes room for those that come.

    With TLS there are more, which have not shaken hands and are known to no other code; the crowd ends these.
    """

    def __init__(self, *, has_tls: bool) -> None:
        self.crowd = Crowd()
        self._most = self.crowd.most // 2 if has_tls else self.crowd.most
        self._log = OncePerMinute(MADE_ROOM)

    def make_room(self, new: "HttpConnection", connections: "set[HttpConnection]") -> "HttpConnection | None":
        """The connection that goes for a new one, None while there is room: first those that have shown no key, then
        those whose last answer is longest ago, then those whose body is longest on its way. Where all others are being
        answered it is the new one.
        """
        if len(connections) <= self._most:
            return None
        self._log.tell(most=self._most)
        least = min(connections - {new}, key=lambda each: each.claim)
        return new if least.claim[0] == ANSWERED else least


class HttpConnection(H11Protocol):
    """A connection over HTTP. The application finds `abort` in its state, which ends it at once, and `welcome`, which
    says that it has shown a key.
    """

    def __init__(self, places: Places, **rest: Any) -> None:  # noqa: ANN401 - as the server has it
        super().__init__(**rest)
        self._places = places
        self._is_welcome, self._active_s = False, self.loop.time()

    @property
    def claim(self) -> tuple[int, float]:
        """Claim of a connection to its place, the least first."""
        if self.cycle is None or self.cycle.response_complete:
            return int(self._is_welcome), self._active_s
        if self.cycle.more_body:
            return SENDING, self._active_s
        return ANSWERED, self._active_s

    def _welcome(self) -> None:
        self._is_welcome = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Bounds how many there are, what may wait to be sent, and how long a head may take."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self.app_state = {**self.app_state, "abort": transport.abort, "welcome": self._welcome}
        self.sending: asyncio.TimerHandle | None = self.loop.call_later(SEND_S, transport.abort)
        host, port = self.client or ("", 0)
        self._known = self._places.crowd.begin(f"ip:[{host}]:{port}")
        going = self._places.make_room(self, self.connections)  # type: ignore[arg-type]
        if going is not None:
            # It is closed in the next turn of the loop, in which more may come.
            self.connections.discard(going)
            going.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends what waits for the client."""
        if self.sending is not None:
            self.sending.cancel()
        self._places.crowd.end(self._known, was_let_in=True)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Takes what came, unless the connection has been refused."""
        # In pieces: headers that come whole in one piece are not measured here, but where their request is.
        for start in range(0, len(data), HEAD_BYTES):
            if self.conn.their_state is not h11.ERROR and not self.transport.is_closing():
                super().data_received(data[start : start + HEAD_BYTES])

    def handle_events(self) -> None:
        """Begins requests, which have contexts of their own, and logs what is none outside of any other's."""
        contextvars.Context().run(super().handle_events)
        self._await_client()

    def on_response_complete(self) -> None:
        """Looks for the next request, and whether the client still sends the one before."""
        self._active_s = self.loop.time()
        super().on_response_complete()
        self._await_client()

    def _await_client(self) -> None:
        """A clock runs from when the client has begun to send what it has to until that is here.

        The server's own stops at every byte.
        """
        state = self.conn.their_state
        has_begun = state is h11.IDLE and bool(self.conn.trailing_data[0])
        goes_on = state is h11.SEND_BODY and self.conn.our_state is h11.DONE
        if not (has_begun or goes_on):
            if self.sending is not None:
                self.sending.cancel()
            self.sending = None
        elif self.sending is None:
            self.sending = self.loop.call_later(SEND_S, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are no HTTP, or more than a head may have, in the form of all errors."""
        is_long = len(self.conn.trailing_data[0]) > HEAD_BYTES
        error = HeadersTooLarge(HEAD_BYTES) if is_long else InvalidHttp(msg)
        # No middleware sees it, so no other code could give it an id.
        status, request_id = HTTPStatus(status_of(error)), uuid.uuid4().hex
        headers = {"content-type": "application/json", "connection": "close", "x-should-retry": "false"}
        headers |= {"x-request-id": request_id, "request-id": request_id}
        response = h11.Response(status_code=status, headers=[*headers.items()], reason=status.phrase.encode())
        log.debug("answered", request_id=request_id, client=self.client, status=int(status), problem=error.message)
        for event in (response, h11.Data(data=error_json(error).encode()), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        # Closing while the client still sends would take the answer from it; what it sends is dropped for a while.
        # A connection with TLS ends both ways at once.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(CUT_S, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        """Closes an idle connection, and one whose client has not even taken its answer."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()


class OriginForm:
    """Middleware for requests that name their target otherwise than by a path of this server.

    With scheme and host, as to a proxy, that host counts, as RFC 9112 has it, and not the header's. Slashes that are
    too many, as of a base address that ends with one, are left out.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: bytes = scope["raw_path"]
        found = ABSOLUTE.fullmatch(path)
        if found is not None:
            path = found["path"] or b"/"
            others = [each for each in scope["headers"] if each[0] != b"host"]
            scope["headers"] = [(b"host", found["host"]), *others]
        path = SLASHES.sub(b"/", path).removesuffix(b"/") or b"/"
        if path != scope["raw_path"]:
            scope.update(raw_path=path, path=unquote(path))
        await self._app(scope, receive, send)


@dataclass(frozen=True, slots=True)
class RunningRest:
    """A server that answers on `address`."""

    address: str
    server: uvicorn.Server
    tasks: "tuple[asyncio.Task[None], ...]"

    async def stop(self, grace_s: float) -> None:
        """Takes no new connections, gives running requests grace_s to end, and cuts the others off."""
        for listener in self.server.servers:
            listener.close()
        connections, tasks = self.server.server_state.connections, self.server.server_state.tasks
        for connection in list(connections):
            connection.shutdown()
        await _emptied(connections, grace_s)
        for connection in list(connections):
            connection.transport.abort()
        await _emptied(tasks, CUT_S)
        remaining = {*self.tasks, *tasks}
        for task in remaining:
            task.cancel()
        await asyncio.wait(remaining)


async def serve_rest(
    listen: str,
    app: ASGIApp,
    *,
    shares_port: bool = False,
    tls: TlsFiles | None = None,
    upkeep: Upkeep | None = None,
) -> RunningRest:
    """Serves an application on HOST:PORT, where port 0 takes a free one, alone or beside servers that share it.

    With `tls` it speaks nothing else. Raises AddressTaken and InvalidRequest.
    """
    sockets = await asyncio.to_thread(listeners, listen, backlog=BACKLOG, shares_port=shares_port)
    for listener in sockets:
        # Accepted connections inherit both. Without the second a chunk waits until the client has acknowledged the one
        # before, which takes up to 40 ms; asyncio sets it only on sockets that were made for TCP by number.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    places = Places(has_tls=tls is not None)
    config = uvicorn.Config(
        app,
        # All connections of this server have their places together.
        http=partial(HttpConnection, places),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=ACCEPTED,
        timeout_keep_alive=IDLE_S,
        h11_max_incomplete_event_size=HEAD_BYTES,
        # A connection's task would see the trace of the request that happened to run when its bytes came.
        reset_contextvars=True,
    )
    config.load()
    # Uvicorn's own reads the files once.
    config.ssl = tls.server_context() if tls is not None else None
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=sockets)
    for listener in sockets:
        # The loop takes as many at a time as its own backlog allows to wait.
        listener.listen(BACKLOG)
    bound, kept = sockets[0].getsockname()[1], upkeep or Upkeep()
    tasks = [asyncio.create_task(kept.keep("rest server", server.main_loop), name="rest server")]
    if tls is not None:
        watching = kept.keep("rest connections", partial(places.crowd.watch, bound))
        tasks.append(asyncio.create_task(watching, name="rest connections"))
    return RunningRest(f"{listen.rpartition(':')[0]}:{bound}", server, tuple(tasks))


async def _emptied(things: AbstractSet[object], max_s: float) -> None:
    """Waits until a set that others change is empty, but not longer than max_s."""
    with suppress(TimeoutError):
        async with asyncio.timeout(max_s):
            while True:
                await asyncio.sleep(0)
                if not things:
                    return
                await asyncio.sleep(LOOK_S)
