"""The HTTP server takes a free port, is strict about what comes before a request, and stops in time."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncGenerator

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from structlog.contextvars import get_contextvars
from structlog.testing import capture_logs
from support.basics import eventually
from support.network import GET, Source, connected, served, streaming

from gateway.rest import server
from gateway.rest.server import OriginForm, serve_rest
from gateway.rest.sse import DONE, EventStream, data
from outrider.errors import InvalidRequest
from outrider.process.telemetry import bound
from outrider.rpc.channels import AddressTaken


def source() -> Source:
    """A stream that has begun and does not end by itself."""
    return Source([data("1")])


async def test_an_address_is_taken_once() -> None:
    """Port 0 finds a free one, which no other process can have meanwhile."""
    async with served(streaming(source())) as running:
        assert not running.address.endswith(":0")
        with pytest.raises(AddressTaken):
            await serve_rest(running.address, streaming(source()))
    with pytest.raises(AddressTaken):
        await serve_rest("192.0.2.1:0", streaming(source()))
    with pytest.raises(InvalidRequest):
        await serve_rest("8080", streaming(source()))


@pytest.mark.parametrize(
    ("listen", "others"), [("localhost:0", ["127.0.0.1", "::1"]), ("[::]:0", ["127.0.0.1", "::1"])]
)
async def test_a_name_of_both_families_is_served_in_both(listen: str, others: list[str]) -> None:
    """On one port, which no other server can have in either."""
    async with served(streaming(source()), listen=listen) as running:
        port = int(running.address.rpartition(":")[2])
        assert running.address == f"{listen.rpartition(':')[0]}:{port}"
        for host in ("127.0.0.1", "::1"):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(GET)
            assert await reader.readuntil(b"data: 1\n\n")
            writer.close()
        with pytest.raises(AddressTaken):
            await serve_rest(f"[::1]:{port}", streaming(source()))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (b"http://other.example:81/v1/a%20b?x=/y", ("/v1/a b", b"x=/y", b"other.example:81")),
        (b"HTTPS://user:word@[::1]:8080", ("/", b"", b"[::1]:8080")),
        (b"//v1//models/", ("/v1/models", b"", b"here")),
        (b"//", ("/", b"", b"here")),
        (b"/http://a/b", ("/http:/a/b", b"", b"here")),
    ],
)
async def test_a_target_may_have_scheme_and_host(target: bytes, expected: tuple[str, bytes, bytes]) -> None:
    """As proxies are asked; the host of it counts."""
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        [host] = [value for name, value in scope["headers"] if name == b"host"]
        seen.append((scope["path"], scope["query_string"], host))
        await PlainTextResponse("here")(scope, receive, send)

    request = b"GET %b HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n" % target
    async with served(OriginForm(app)) as running, connected(running, request) as (reader, _):
        assert (await reader.read()).endswith(b"here")
    assert seen == [expected]


async def test_no_chunk_waits_for_the_client_to_acknowledge_the_one_before() -> None:
    """Nagle's algorithm is off on the connection that was accepted, and a frame leaves in one write."""
    hold = asyncio.Event()

    async def frames() -> AsyncGenerator[bytes, None]:
        yield data("1")
        await hold.wait()
        yield data("2")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await EventStream(frames(), 60, 60)(scope, receive, send)

    async with served(app) as running, connected(running) as (reader, _):
        await reader.readuntil(b"data: 1\n\n\r\n")
        (connection,) = running.server.server_state.connections
        transport, writes = connection.transport, list[bytes]()
        assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        write = transport.write
        transport.write = lambda sent: (writes.append(bytes(sent)), write(sent))
        hold.set()
        await reader.readuntil(b"0\r\n\r\n")
    assert writes[0] == b"9\r\ndata: 2\n\n\r\n"


async def test_what_is_no_http_is_told_so_in_the_shape_of_all_errors() -> None:
    """Before there is a request that a middleware could see; with an id that the log has, and the client's address."""
    with capture_logs() as logged:
        async with served(streaming(source())) as running, connected(running, b"\x16\x03 hello\r\n\r\n") as (reader, _):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request")
    [line] = [each for each in logged if each["event"] == "answered"]
    assert f"x-request-id: {line['request_id']}".encode() in head
    assert (line["status"], line["client"][0]) == (400, "127.0.0.1")
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")


async def test_what_is_no_http_is_logged_as_nobodys_request() -> None:
    """Also when it comes after a request on the same connection, whose line would have that one's id."""
    seen: list[dict[str, object]] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append({"text": record.getMessage(), **get_contextvars()})

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with bound(request_id="first"):
            await answer_at_once(scope, receive, send)

    logger, handler = logging.getLogger("uvicorn.error"), Lines()
    logger.addHandler(handler)
    try:
        async with served(app) as running, connected(running, GET + b"no HTTP\r\n\r\n") as (reader, _):
            assert (await reader.read()).count(b"HTTP/1.1 ") == 2
    finally:
        logger.removeHandler(handler)
    assert seen == [{"text": "Invalid HTTP request received."}]


async def test_a_head_that_is_far_too_long_is_refused() -> None:
    """Before it is read to its end, and the connection is closed."""
    request = GET[:-2] + b"x-long: " + b"x" * (server.HEAD_BYTES + 70_000) + b"\r\n\r\n"
    async with served(streaming(source())) as running, connected(running, request) as (reader, _):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 Request Header Fields Too Large")
    assert json.loads(body)["error"]["code"] == "headers_too_large"


async def answer_at_once(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that looks at no body."""
    await PlainTextResponse("well")(scope, receive, send)


BEGUN = b"POST / HTTP/1.1\r\nhost: test\r\ncontent-length: 1000000\r\n\r\n"


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nx: ", GET + b"GET / HTTP/1.1\r\nx: ", BEGUN])
async def test_a_client_that_trickles_is_cut_off(monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    """A head, the first or a further one, and a body that has its answer already have a time to come in, whatever else
    is sent meanwhile.
    """
    monkeypatch.setattr(server, "SEND_S", 0.05)
    async with served(answer_at_once) as running, connected(running, begun) as (reader, writer):
        reading = asyncio.create_task(reader.read())

        def is_cut_off() -> bool:
            if begun:
                writer.write(b"x")
            return reading.done()

        await eventually(is_cut_off)
        await asyncio.wait({reading})
        assert reading.exception() is None or isinstance(reading.exception(), ConnectionError)


async def test_no_clock_runs_for_a_client_that_sent_its_request() -> None:
    """However long the answer takes, and between two requests, where the server has one of its own."""
    slow = source()
    async with served(streaming(slow)) as running, connected(running) as (reader, _):
        await reader.readuntil(b"data: 1\n\n")
        (connection,) = running.server.server_state.connections
        assert connection.sending is None
        slow.frames.append(DONE)
        slow.hold.set()
        await reader.readuntil(b"0\r\n\r\n")
        assert connection.sending is None


async def test_stopping_lets_streams_end() -> None:
    """A request that ends within the grace gets all of its answer; new connections are refused."""
    ending = Source([data("1")])
    async with served(streaming(ending)) as running, connected(running) as (reader, _):
        await reader.readuntil(b"data: 1\n\n")
        stopping = asyncio.create_task(running.stop(20))
        await eventually(lambda: not running.server.servers[0].is_serving())
        with pytest.raises(ConnectionRefusedError):
            async with connected(running):
                pass
        ending.frames.append(DONE)
        ending.hold.set()
        assert await reader.readuntil(b"0\r\n\r\n")
        await stopping


async def test_stopping_cuts_what_does_not_end() -> None:
    """Its generator is closed before the server is stopped."""
    endless = source()
    async with served(streaming(endless)) as running, connected(running) as (reader, _):
        await reader.readuntil(b"data: 1\n\n")
        await running.stop(0)
        assert endless.is_closed
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readuntil(b"0\r\n\r\n")
