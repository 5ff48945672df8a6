"""Connections are fewer than descriptors, and one that asks for nothing makes room for one that comes."""

import asyncio
import resource
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from structlog.testing import capture_logs
from support.basics import eventually
from support.certificates import issue, server_of, trusting
from support.network import GET, Source, connected, served, streaming
from support.rest.rest_stack import exchange
from support.services.gateway_process import gateway_process

from gateway.rest.server import RunningRest, serve_rest
from gateway.rest.sse import data
from outrider.client import AsyncClient
from outrider.rpc import crowd
from outrider.rpc.crowd import MADE_ROOM, OncePerMinute
from outrider.rpc.tls import TlsFiles

FEW = 8
# Runs a program that may have so many descriptors, and may raise that to so many.
LIMITS = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({}, {}))
os.execv(sys.argv[1], sys.argv[1:])
"""
LIVE = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n"


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of this process have few connections, and look often whether there are too many."""
    monkeypatch.setattr(crowd, "MOST", FEW)
    monkeypatch.setattr(crowd, "CALM_S", 0.05)


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that vouches for those who ask at `/known`, and waits for the body of a POST."""
    if scope["path"] == "/known":
        scope["state"]["welcome"]()
    while scope["method"] == "POST" and (await receive()).get("more_body", False):
        pass
    await PlainTextResponse("well")(scope, receive, send)


@asynccontextmanager
async def idle(running: RunningRest, count: int, begun: bytes = b"") -> AsyncIterator[list[asyncio.StreamReader]]:
    """Connections on which something was sent, and which are held."""
    async with AsyncExitStack() as life:
        yield [(await life.enter_async_context(connected(running, begun)))[0] for _ in range(count)]


async def is_answered(running: RunningRest, request: bytes = GET) -> bool:
    """Whether a new connection is."""
    with suppress(ConnectionError):
        return (await exchange(running.address, request)).startswith(b"HTTP/1.1 200 ")
    return False


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nx: ", GET, POST])
async def test_who_asks_for_nothing_makes_room(begun: bytes) -> None:
    """Whatever it has begun, and however often others come; the log has one line about it."""
    with capture_logs() as logged:
        async with served(answer) as running, idle(running, FEW, begun), idle(running, 20 * FEW, begun):
            assert await is_answered(running)
            assert len(running.server.server_state.connections) <= FEW
    assert [each["event"] for each in logged if each["event"] == MADE_ROOM] == [MADE_ROOM]


async def test_who_has_shown_a_key_stays_longest() -> None:
    """Of those that wait for a next request; among equals the longest idle goes first."""
    known = b"GET /known HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with served(answer) as running, connected(running, known) as (reader, writer):
        await reader.readuntil(b"well")
        async with idle(running, 5 * FEW), idle(running, 5 * FEW, GET):
            assert await is_answered(running)
            writer.write(GET)
            await reader.readuntil(b"well")


async def test_who_is_answered_is_never_cut_off() -> None:
    """Where all are, who comes is refused."""
    source = Source([data("1")])
    async with served(streaming(source)) as running, idle(running, FEW, GET) as readers:
        for reader in readers:
            await reader.readuntil(b"data: 1\n\n")
        async with connected(running) as (reader, _):
            assert await reader.read() == b""
        source.hold.set()
        for reader in readers:
            await reader.readuntil(b"0\r\n\r\n")


async def test_who_does_not_shake_hands_makes_room(tmp_path: Path) -> None:
    """With TLS there is no connection for the server before that, and yet a descriptor is taken."""
    folder = issue(tmp_path, "gateway")
    running = await serve_rest("127.0.0.1:0", answer, tls=TlsFiles(server_of(folder, "gateway")))
    context = trusting(folder, "gateway").context(ssl.PROTOCOL_TLS_CLIENT)
    try:
        async with idle(running, 5 * FEW):

            async def is_served() -> bool:
                with suppress(httpx.TransportError):
                    async with httpx.AsyncClient(verify=context, trust_env=False, timeout=5) as http:
                        return (await http.get(f"https://{running.address}")).status_code == 200
                return False

            await eventually(is_served)
    finally:
        await running.stop(0)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_more_connections_than_descriptors_keep_nobody_out(words: str) -> None:
    """Of a process that may have few, on both surfaces at once; and its log does not grow."""
    before = (sys.executable, "-c", LIMITS.format(200, 400))
    async with gateway_process(words, before=before) as gateway, AsyncExitStack() as life:
        assert resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE) == (400, 400)

        async def hold(address: str) -> None:
            host, _, port = address.rpartition(":")
            with suppress(ConnectionError):
                _, writer = await asyncio.open_connection(host, int(port))
                life.callback(writer.close)

        async def is_served() -> bool:
            try:
                reply = await exchange(gateway.rest, LIVE)
                async with AsyncClient(gateway.address, timeout_s=10) as client:
                    return reply.startswith(b"HTTP/1.1 200 ") and bool((await client.generate("fox sea").result()).text)
            except Exception:  # noqa: BLE001 - the next try may find room
                return False

        for _ in range(3):
            for _ in range(300):
                await hold(gateway.rest)
                await hold(gateway.address)
            await eventually(is_served, 60)
    said = [line for line in gateway.lines if MADE_ROOM in line or "Traceback" in line or "descriptor" in line]
    # Of each port that others made room, and once that what came faster than that was not taken.
    assert 1 <= sum(MADE_ROOM in line for line in said) <= 2
    assert sum(MADE_ROOM not in line for line in said) <= 1
    assert not any("Traceback" in line for line in said)


async def test_what_comes_a_thousand_times_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute, with how often it came meanwhile."""
    now_s = 1000.0
    monkeypatch.setattr(crowd.time, "monotonic", lambda: now_s)
    often = OncePerMinute("it came")
    with capture_logs() as logged:
        for _ in range(1000):
            often.tell(port=5)
        now_s += crowd.LOG_S
        often.tell(port=5)
    assert [(line["event"], line["count"], line["port"]) for line in logged] == [
        ("it came", 1, 5),
        ("it came", 1000, 5),
    ]
