"""Connections over TLS: who is refused, what both sides say about it, and certificates that are replaced meanwhile."""

import shutil
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc.experimental import session_cache
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs
from support.certificates import (
    DAY,
    KEYS,
    issue,
    pem_of,
    replace_files,
    self_signed,
    server_of,
    shown_at,
    shown_by,
    trusting,
)

from outrider.client import AsyncClient, Client
from outrider.errors import InvalidRequest, PeerLost
from outrider.rpc import channels, tls
from outrider.rpc.errors import error_from
from outrider.rpc.tls import ClientRefused, Tls, TlsFailed, TlsFiles, files_of, refusal, why_refused

CHECK = health_pb2.HealthCheckRequest()
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of one authority by kind: sound, expired, and of another host; and sound ones of another one."""
    made = tmp_path_factory.mktemp("certificates")
    sound = issue(made / "sound", "target", "gateway")
    for kind in ("expired", "elsewhere"):
        shutil.copytree(sound / "authority", made / kind / "authority")
    issue(made / "expired", "target", "gateway", lifetime=-DAY)
    issue(made / "elsewhere", "target", hosts=("target.example",))
    issue(made / "foreign", "target", "gateway")
    return made


@asynccontextmanager
async def serving(tls: Tls | None) -> AsyncIterator[str]:
    """The address of a server with health alone."""
    running = await channels.serve("127.0.0.1:0", {}, tls=None if tls is None else TlsFiles(tls))
    yield running.address
    await running.stop(0)


async def checked(address: str, tls: Tls | None) -> "health_pb2.HealthCheckResponse.ServingStatus.ValueType":
    """What health says; raises the AioRpcError of the call."""
    async with channels.open_channel(address, None if tls is None else TlsFiles(tls)) as channel:
        return (await health_pb2_grpc.HealthStub(channel).Check(CHECK)).status


@pytest.mark.parametrize("is_mutual", [False, True])
async def test_who_fits_gets_in(folder: Path, is_mutual: bool) -> None:
    """With the authority alone, or with a certificate of it where the server asks for one."""
    sound = folder / "sound"
    server = shown_by(sound, "target") if is_mutual else server_of(sound, "target")
    async with serving(server) as address:
        client = shown_by(sound, "gateway") if is_mutual else trusting(sound, "gateway")
        assert await checked(address, client) == SERVING
        assert why_refused(address, client) == ""


REFUSED: dict[str, tuple[tuple[str, str] | None, Callable[[Path], Tls | None], str, str]] = {
    "no certificate": (
        ("sound", "target"),
        lambda made: trusting(made / "sound", "gateway"),
        "lets nobody in without a certificate, and none was given.",
        "PEER_DID_NOT_RETURN_A_CERTIFICATE",
    ),
    "expired client": (
        ("sound", "target"),
        lambda made: shown_by(made / "expired", "gateway"),
        "expired/gateway/tls.crt: certificate has expired.",
        "CERTIFICATE_VERIFY_FAILED: certificate has expired",
    ),
    "foreign client": (
        ("sound", "target"),
        lambda made: Tls(trusting(made / "sound", "gateway").ca, *_pair(made / "foreign")),
        "foreign/gateway/tls.crt: it is not signed by the authority in",
        "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate",
    ),
    "expired server": (
        ("expired", "target"),
        lambda made: shown_by(made / "sound", "gateway"),
        "is refused: certificate has expired.",
        "CERTIFICATE_VERIFY_FAILED: certificate has expired",
    ),
    "foreign server": (
        ("foreign", "target"),
        lambda made: shown_by(made / "sound", "gateway"),
        "is refused: it is not signed by the authority in",
        "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate",
    ),
    "wrong name": (
        ("elsewhere", "target"),
        lambda made: shown_by(made / "sound", "gateway"),
        "is refused: IP address mismatch, certificate is not valid for '127.0.0.1'.",
        "",
    ),
    "plaintext": (
        ("sound", "target"),
        lambda _: None,
        "speaks TLS, and was called without it.",
        "WRONG_VERSION_NUMBER",
    ),
    "a plain server": (
        None,
        lambda made: shown_by(made / "sound", "gateway"),
        "does not speak TLS.",
        "WRONG_VERSION_NUMBER",
    ),
}


def _pair(folder: Path) -> tuple[str, str]:
    shown = shown_by(folder, "gateway")
    return shown.cert, shown.key


@pytest.mark.parametrize("kind", REFUSED)
async def test_a_refusal_is_a_sentence(folder: Path, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """At the client ours, typed; on stderr of who refuses gRPC's own, but for a wrong name, which the client checks."""
    server, client_of, sentence, line = REFUSED[kind]
    client = client_of(folder)
    async with serving(None if server is None else shown_by(folder / server[0], server[1])) as address:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await checked(address, client)
        assert line in capfd.readouterr().err
        refused = await refusal(caught.value, address, client)
        assert isinstance(refused, TlsFailed)
        assert sentence in refused.message
        # Who waits for a service that went away goes on waiting.
        assert isinstance(refused, PeerLost)
        assert (refused.exit_code, refused.metadata) == (78, {"address": address})
        assert isinstance(error_from(caught.value), PeerLost)
        async with AsyncClient(address, tls=client) as ours:
            with pytest.raises(TlsFailed) as raised:
                await ours.generate("Hi").result()
        assert raised.value.message == refused.message
        with Client(address, tls=client) as blocking, pytest.raises(TlsFailed):
            blocking.generate("Hi").result()


def test_where_nobody_is_nothing_is_wrong_with_tls(folder: Path) -> None:
    """A port that is not served refuses everybody alike."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        for tls in (None, shown_by(folder / "sound", "gateway")):
            assert why_refused(address, tls) == ""
            with Client(address, tls=tls) as client, pytest.raises(PeerLost) as raised:
                client.generate("Hi").result()
            assert type(raised.value) is PeerLost


async def test_a_replaced_certificate_is_that_of_the_next_connection(tmp_path: Path) -> None:
    """A stream that runs goes on with the one that it began with, and nothing is refused in between."""
    sound, renewed = issue(tmp_path / "sound", "target", "gateway"), tmp_path / "renewed"
    shutil.copytree(sound / "authority", renewed / "authority")
    issue(renewed, "target")
    client = trusting(sound, "gateway")
    used, further = server_of(sound, "target"), server_of(renewed, "target")
    async with serving(used) as address, channels.open_channel(address, TlsFiles(client)) as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watching.read()).status == SERVING
        first = await shown_at(address, client)
        replace_files(further, used, "cert")
        # Half of a pair is no certificate yet.
        assert await shown_at(address, client) == first
        assert await checked(address, client) == SERVING
        replace_files(further, used, "key")
        assert await shown_at(address, client) == pem_of(further) != first
        assert await checked(address, client) == SERVING
        assert (await health_pb2_grpc.HealthStub(channel).Check(CHECK)).status == SERVING
        assert not watching.done()
        watching.cancel()


async def test_an_earlier_session_lets_nobody_in_whose_certificate_has_expired(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though such a connection shows no certificate again, and so its handshake finds nothing wrong."""

    class Later(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Later":
            return super().now(tz) + timedelta(days=2)

    shutil.copytree(folder / "sound" / "authority", tmp_path / "authority")
    client = shown_by(issue(tmp_path, "gateway", lifetime=timedelta(days=1)), "gateway")
    remembering: Any = session_cache.ssl_session_cache_lru(1)  # an option of channels, which are numbers else
    async with serving(shown_by(folder / "sound", "target")) as address:
        # Sessions are remembered by the name of their server, and an address of numbers is none.
        named = address.replace("127.0.0.1", "localhost")

        async def ask(*options: tuple[str, int]) -> None:
            async with channels.open_channel(named, TlsFiles(client), options) as channel:
                await health_pb2_grpc.HealthStub(channel).Check(CHECK)

        await ask(("grpc.ssl_session_cache", remembering))
        monkeypatch.setattr(tls, "datetime", Later)
        with capture_logs() as logs, pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(("grpc.ssl_session_cache", remembering))
    raised = error_from(caught.value)
    assert isinstance(raised, ClientRefused)
    assert raised.message.startswith("The client 'gateway' has a certificate that was valid until ")
    assert [line["reason"] for line in logs if line["event"] == "client refused"] == [raised.message]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize(
    ("kind", "certificate_sentence"),
    [
        ("", "lets nobody in without a certificate, and none was given."),
        ("foreign", "does not accept the certificate in"),
    ],
)
def test_an_alert_is_a_sentence(folder: Path, version: ssl.TLSVersion, kind: str, certificate_sentence: str) -> None:
    """Servers other than gRPC's say why they end a handshake; without certificates TLS 1.2 has no word of its own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shown = shown_by(folder / "sound", "target")
    context.load_cert_chain(shown.cert, shown.key)
    context.load_verify_locations(shown.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = context.maximum_version = version
    client = Tls(shown.ca, *(_pair(folder / kind) if kind else ()))

    def refuse(listener: socket.socket) -> None:
        with listener.accept()[0] as connection, suppress(ssl.SSLError), context.wrap_socket(connection, True):
            pass

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        refusing = threading.Thread(target=refuse, args=(listener,))
        refusing.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        sentence = why_refused(address, client)
        refusing.join()
    is_vague = version == ssl.TLSVersion.TLSv1_2 and not kind
    assert sentence.startswith(address)
    assert ("ends the handshake: handshake failure." if is_vague else certificate_sentence) in sentence


@pytest.mark.parametrize("kind", KEYS)
async def test_keys_that_grpc_does_not_take_are_refused(folder: Path, tmp_path: Path, kind: str) -> None:
    """At the start, and when a certificate is replaced by such a one, which then is not taken up."""
    unfit = self_signed(tmp_path, kind)
    with pytest.raises(InvalidRequest, match=r"^tls.cert is .* must be a certificate (whose key is RSA|that gRPC can)"):
        TlsFiles(unfit)
    shutil.copytree(folder / "sound" / "target", tmp_path / "used")
    used, client = Tls(cert=str(tmp_path / "used/tls.crt"), key=str(tmp_path / "used/tls.key")), folder / "sound"
    async with serving(used) as address:
        replace_files(unfit, used, "cert", "key")
        with capture_logs() as logs:
            assert await checked(address, trusting(client, "gateway")) == SERVING
    assert [line["event"] for line in logs] == ["certificate not taken up"]


class Unfit(TlsFiles):
    """Files that fit, but which gRPC does not take for a reason that was not foreseen."""

    def server_credentials(self) -> grpc.ServerCredentials:
        """Those of something that is no certificate."""
        return grpc.ssl_server_credentials([(b"key", b"certificate")])


async def test_a_taken_port_is_told_from_a_certificate_that_grpc_does_not_take(folder: Path) -> None:
    """Though gRPC does not."""
    shown = server_of(folder / "sound", "target")
    with pytest.raises(InvalidRequest, match=r"^tls.cert is .* must be a certificate that gRPC takes, with a key"):
        await channels.serve("127.0.0.1:0", {}, tls=Unfit(shown))
    async with serving(shown) as address:
        for files in (Unfit(shown), TlsFiles(shown)):
            with pytest.raises(channels.AddressTaken):
                await channels.serve(address, {}, tls=files)


async def test_a_server_says_that_its_certificate_has_expired(folder: Path) -> None:
    """At the start; its clients would be all who know."""
    shown = server_of(folder / "expired", "target")
    with capture_logs() as logs:
        async with serving(shown):
            pass
    assert [(line["event"], line["cert"]) for line in logs] == [("certificate not valid now", shown.cert)]


def test_a_client_takes_nothing_but_files(folder: Path) -> None:
    """What others take, a path or a dictionary, is refused in a sentence."""
    path = shown_by(folder / "sound", "gateway").ca
    for unfit in (path, {"ca": path}):
        wrong: Any = unfit
        with pytest.raises(InvalidRequest, match=r"^tls is .* must be an outrider.client.Tls, or None for plaintext$"):
            Client("127.0.0.1:1", tls=wrong)


async def test_files_that_do_not_fit_are_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    """In the names of the options: one without the other, one that is not there, and a key of another certificate."""
    sound, foreign = shown_by(folder / "sound", "target"), shown_by(folder / "foreign", "target")
    options = {"ca": "--tls-client-ca", "cert": "--tls-cert", "key": "--tls-key"}
    assert files_of({"ca": "", "cert": "", "key": ""}, options) is None
    for files, words in (
        ({"cert": sound.cert}, "^--tls-cert is .* but must be given with --tls-key, or left out$"),
        ({"key": sound.key}, "^--tls-key is .* but must be given with --tls-cert, or left out$"),
        ({"cert": sound.cert, "key": foreign.key}, "^--tls-cert is .* fits the key in .*: KEY_VALUES_MISMATCH$"),
        ({"cert": sound.key, "key": sound.key}, "^--tls-cert is .* fits the key in [^:]*: it cannot be read$"),
        ({"cert": str(tmp_path / "no"), "key": sound.key}, "^--tls-cert is .*: No such file or directory$"),
        ({"ca": sound.key}, "^--tls-client-ca is .* an authority's certificate in PEM: NO_CERTIFICATE_OR_CRL_FOUND$"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            files_of(files, options)
    with pytest.raises(InvalidRequest, match=r"^tls.ca is "):
        Client("127.0.0.1:1", tls=Tls(ca=str(tmp_path / "no")))
    # Nor is one that has gone since an error beside the one that is being looked into.
    assert why_refused("127.0.0.1:1", Tls(ca=str(tmp_path / "no"))).startswith("tls.ca is ")


def test_a_client_that_shows_no_certificate_takes_a_new_authority_up(tmp_path: Path) -> None:
    """It has no certificate whose time could be over."""
    authority = tmp_path / "ca.crt"
    authority.write_bytes(trustme.CA().cert_pem.bytes())
    files = TlsFiles(Tls(ca=str(authority)))
    assert not files.renew()
    authority.write_bytes(trustme.CA().cert_pem.bytes() + b"\n")
    assert files.renew()
