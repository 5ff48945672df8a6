"""REST over TLS: the certificate of a new connection is the newest, and who is refused leaves a sentence in the log."""

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from structlog.testing import capture_logs
from support.basics import eventually
from support.certificates import DAY, issue, pem_of, replace_files, server_of, shown_at, shown_by, trusting

from gateway.rest.server import RunningRest, serve_rest
from outrider.rpc.tls import Tls, TlsFiles, why_refused


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Says hello."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


@asynccontextmanager
async def serving(tls: Tls) -> AsyncIterator[RunningRest]:
    running = await serve_rest("127.0.0.1:0", app, tls=TlsFiles(tls))
    yield running
    await running.stop(0)


def client_of(running: RunningRest, tls: Tls) -> httpx.AsyncClient:
    context = tls.context(ssl.PROTOCOL_TLS_CLIENT)
    return httpx.AsyncClient(base_url=f"https://{running.address}", verify=context, trust_env=False)


async def test_connections_come_with_the_newest_certificate(tmp_path: Path) -> None:
    """One that was there before goes on."""
    sound, renewed = issue(tmp_path / "sound", "gateway"), tmp_path / "renewed"
    shutil.copytree(sound / "authority", renewed / "authority")
    issue(renewed, "gateway")
    used, further = server_of(sound, "gateway"), server_of(renewed, "gateway")
    new = pem_of(further)
    client = trusting(sound, "gateway")
    async with serving(used) as running, client_of(running, client) as before:
        assert (await before.get("/")).text == "hello"
        assert await shown_at(running.address, client) != new
        replace_files(further, used, "cert", "key")
        assert await shown_at(running.address, client) == new
        assert (await before.get("/")).text == "hello"
        async with client_of(running, client) as after:
            assert (await after.get("/")).text == "hello"


@pytest.mark.parametrize(
    ("kind", "here", "there"),
    [
        ("none", "It has shown no certificate.", "lets nobody in without a certificate, and none was given."),
        ("expired", "Its certificate is refused: certificate has expired.", "certificate has expired."),
        ("plaintext", "It does not speak TLS.", "speaks TLS, and was called without it."),
    ],
)
async def test_a_refusal_is_a_sentence_on_both_sides(tmp_path: Path, kind: str, here: str, there: str) -> None:
    """With an authority of clients, as with gRPC."""
    sound = issue(tmp_path, "gateway")
    issue(tmp_path, "expired", lifetime=-DAY)
    client = {"none": trusting(sound, "gateway"), "expired": shown_by(sound, "expired"), "plaintext": None}[kind]
    with capture_logs() as logs:
        async with serving(shown_by(sound, "gateway")) as running:
            if kind == "plaintext":
                reader, writer = await asyncio.open_connection(*running.address.split(":"))
                writer.write(b"GET / HTTP/1.1\r\n\r\n")
                assert await reader.read() == b""
                writer.close()
            assert there in await asyncio.to_thread(why_refused, running.address, client)
            await eventually(lambda: here in [line.get("reason") for line in logs])


async def test_what_is_no_http_is_told_so(tmp_path: Path) -> None:
    """Though a connection with TLS cannot be closed on one side alone."""
    sound = issue(tmp_path, "gateway")
    async with serving(server_of(sound, "gateway")) as running:
        context = trusting(sound, "gateway").context(ssl.PROTOCOL_TLS_CLIENT)
        reader, writer = await asyncio.open_connection(*running.address.split(":"), ssl=context)
        writer.write(b"hello\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
        writer.close()
