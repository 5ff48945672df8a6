"""REST over TLS: the certificate of a new connection is the newest, and who is refused leaves a sentence in the log."""

import asyncio
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from structlog.testing import capture_logs
from support.basics import eventually
from support.certificates import DAY, issue, pem_of, replace_files, server_of, shown_at, shown_by, trusting

from gateway.rest.server import RunningRest, serve_rest
from outrider.client import AsyncClient
from outrider.errors import InvalidRequest
from outrider.rpc.tls import Tls, TlsFiles, why_refused


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with a greeting."""
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


async def test_a_client_that_does_not_trust_us_is_one_line(tmp_path: Path) -> None:
    """Which says whose certificate is not taken."""
    sound, foreign = issue(tmp_path / "sound", "gateway"), issue(tmp_path / "foreign", "gateway")
    with capture_logs() as logs:
        async with serving(server_of(sound, "gateway")) as running:
            said = await asyncio.to_thread(why_refused, running.address, trusting(foreign, "gateway"))
            assert "is refused: it is not signed by the authority in" in said
            reason = "It does not accept our certificate: unknown ca."
            await eventually(lambda: reason in [line.get("reason") for line in logs])


async def test_no_session_is_taken_up_again_where_clients_show_certificates(tmp_path: Path) -> None:
    """It would let in whose certificate has expired, and whose authority is no longer asked for."""
    sound, foreign = issue(tmp_path / "sound", "gateway", "client"), issue(tmp_path / "foreign", "gateway")
    used = shown_by(sound, "gateway")

    def connect(address: str, session: ssl.SSLSession | None) -> tuple[bytes, bool | None, ssl.SSLSession | None]:
        host, _, port = address.rpartition(":")
        with (
            socket.create_connection((host, int(port))) as connection,
            context.wrap_socket(connection, server_hostname=host, session=session) as secure,
        ):
            # Who is refused may learn so from either of these.
            with suppress(OSError):
                secure.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                return secure.recv(15), secure.session_reused, secure.session
            return b"", secure.session_reused, None

    context = shown_by(sound, "client").context(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(shown_by(foreign, "gateway").ca)
    async with serving(used) as running:
        answer, _, session = await asyncio.to_thread(connect, running.address, None)
        again, is_resumed, _ = await asyncio.to_thread(connect, running.address, session)
        assert (answer, again, is_resumed) == (b"HTTP/1.1 200 OK", b"HTTP/1.1 200 OK", False)
        replace_files(shown_by(foreign, "gateway"), used, "ca", "cert", "key")
        assert (await asyncio.to_thread(connect, running.address, session))[:2] == (b"", False)
        # Before TLS 1.3 the server keeps sessions for clients that name one.
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with capture_logs() as logs, pytest.raises(ssl.SSLError):
            await asyncio.to_thread(connect, running.address, None)
        assert [line["reason"] for line in logs] == ["It speaks no version of TLS that is spoken here."]


class Torn(TlsFiles):
    """Files that are replaced once more as soon as they have been looked at, and of which one is there so far."""

    def __init__(self, tls: Tls, next_ones: Tls) -> None:
        super().__init__(tls)
        self._next_ones = next_ones

    def renew(self) -> bool:
        """Renews like any other."""
        is_new = super().renew()
        replace_files(self._next_ones, self.tls, "cert")
        return is_new


async def test_certificates_that_are_replaced_all_the_time_disturb_no_request(tmp_path: Path) -> None:
    """What was looked at is what is shown, whatever the files hold a moment later."""
    sound, renewed = issue(tmp_path / "sound", "gateway"), tmp_path / "renewed"
    shutil.copytree(sound / "authority", renewed / "authority")
    shutil.copytree(sound / "gateway", tmp_path / "used" / "gateway")
    used, further = server_of(tmp_path / "used", "gateway"), server_of(issue(renewed, "gateway"), "gateway")
    running = await serve_rest("127.0.0.1:0", app, tls=Torn(used, further))
    with capture_logs() as logs:
        for _ in range(10):
            replace_files(server_of(sound, "gateway"), used, "cert", "key")
            async with client_of(running, trusting(sound, "gateway")) as client:
                assert (await client.get("/")).text == "hello"
    await running.stop(0)
    assert {line["event"] for line in logs} == {"certificate taken up"}


async def test_a_client_of_grpc_is_told_that_it_called_rest(tmp_path: Path) -> None:
    """As without TLS."""
    sound = issue(tmp_path, "gateway")
    async with (
        serving(server_of(sound, "gateway")) as running,
        AsyncClient(running.address, tls=trusting(sound, "gateway")) as client,
    ):
        with pytest.raises(InvalidRequest, match="must be where a gateway answers gRPC, and not its REST"):
            await client.generate("Hi").result()


async def test_what_is_no_http_is_told_so(tmp_path: Path) -> None:
    """Though a connection with TLS cannot be closed on one side alone."""
    sound = issue(tmp_path, "gateway")
    async with serving(server_of(sound, "gateway")) as running:
        context = trusting(sound, "gateway").context(ssl.PROTOCOL_TLS_CLIENT)
        reader, writer = await asyncio.open_connection(*running.address.split(":"), ssl=context)
        writer.write(b"hello\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
        writer.close()
