"""An HTTP server inside the running loop: uvicorn without its signal handlers and its log of requests. Knows no route.

It is strict about what no middleware sees: heads that are slow or long, and clients that do not take what was written
to them.
"""

import asyncio
import socket
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.rest.errors import error_json
from gateway.rest.json_text import InvalidJson
from outrider.rpc.channels import AddressTaken, check_address

HEAD_BYTES = 32 << 10
HEAD_WAIT_S = 10.0
# Longer than clients keep an idle connection, so that none is closed under their next request.
IDLE_S = 75
# What a client that does not read can make the kernel and the server keep. Without these, megabytes.
SEND_BUFFER_BYTES, WRITE_BUFFER_BYTES = 64 << 10, 16 << 10
BACKLOG = 1024
LOOK_S = 0.02
CUT_S = 5.0


class Protocol(H11Protocol):
    """A connection. What it serves finds `abort` in its state, which ends the connection at once."""

    _head_timer: asyncio.TimerHandle | None = None
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for a first request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self.app_state = {**self.app_state, "abort": transport.abort}
        self._time_head()

    def data_received(self, data: bytes) -> None:
        """Takes what came, and stops the clock when something is to be done with it."""
        # In pieces: a head that comes whole in one is not measured.
        for start in range(0, len(data), HEAD_BYTES):
            if not (self._is_refused or self.transport.is_closing()):
                super().data_received(data[start : start + HEAD_BYTES])
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clock."""
        self._stop_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are no HTTP in the shape of all errors."""
        body = error_json(InvalidJson(msg)).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        # Closing while the client still sends would take the answer from it; what it sends is dropped for a while.
        self._is_refused = True
        self.transport.write_eof()
        self._stop_timer()
        self._head_timer = self.loop.call_later(HEAD_WAIT_S, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        """Closes an idle connection, and one whose client has not even taken its answer."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _time_head(self) -> None:
        """Bounds for how long a client sends what nobody works on: a head, or a body that was answered already."""
        if self._is_refused:
            return
        is_answered = self.cycle is not None and self.cycle.response_complete
        if self.conn.their_state is not h11.IDLE and not (is_answered and self.conn.their_state is h11.SEND_BODY):
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_WAIT_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


@dataclass(frozen=True, slots=True)
class RunningRest:
    """A server that answers on `address`."""

    address: str
    server: uvicorn.Server
    ticking: "asyncio.Task[None]"

    async def stop(self, grace_s: float) -> None:
        """Takes no new connections, gives running requests grace_s to end, and cuts the others off.

        What works for a client that is cut off sees it leave.
        """
        for listener in self.server.servers:
            listener.close()
        connections = self.server.server_state.connections
        for connection in list(connections):
            connection.shutdown()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await _emptied(connections)
        for connection in list(connections):
            connection.transport.abort()
        with suppress(TimeoutError):
            async with asyncio.timeout(CUT_S):
                await _emptied(self.server.server_state.tasks)
        remaining = {self.ticking, *self.server.server_state.tasks}
        for task in remaining:
            task.cancel()
        await asyncio.wait(remaining)


async def serve_rest(listen: str, app: ASGIApp) -> RunningRest:
    """Serves an application on HOST:PORT, where port 0 takes a free one. Raises AddressTaken and InvalidRequest."""
    listener = await _bind(listen)
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=IDLE_S,
        h11_max_incomplete_event_size=HEAD_BYTES,
        # A connection's task would see the trace of whoever happened to run when its bytes came.
        reset_contextvars=True,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    host = listen.rpartition(":")[0]
    ticking = asyncio.create_task(server.main_loop(), name="rest server")
    return RunningRest(f"{host}:{listener.getsockname()[1]}", server, ticking)


async def _bind(listen: str) -> socket.socket:
    host, _, port = check_address("listen", listen, least_port=0).rpartition(":")
    taken = AddressTaken(f"Cannot listen on {listen}: it is taken, or not an address of this machine.", listen=listen)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        # The send buffer is what accepted connections inherit.
        listener = socket.create_server(found[0][4][:2], family=found[0][0], backlog=BACKLOG)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    except OSError:
        raise taken from None
    return listener


async def _emptied(things: AbstractSet[object]) -> None:
    """Waits until a set that others change is empty."""
    while True:
        await asyncio.sleep(0)
        if not things:
            return
        await asyncio.sleep(LOOK_S)
