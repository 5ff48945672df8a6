"""Connections over TLS: who is refused, what both sides say about it, and certificates that are replaced meanwhile."""

import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.certificates import DAY, issue, pem_of, replace_files, server_of, shown_at, shown_by, trusting

from outrider.client import AsyncClient, Client
from outrider.errors import InvalidRequest, PeerLost
from outrider.rpc import channels
from outrider.rpc.errors import error_from
from outrider.rpc.tls import Tls, TlsFailed, TlsFiles, files_of, refusal, why_refused

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
    """A port that nobody serves refuses everybody alike."""
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


async def test_files_that_do_not_fit_are_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    """In the names of the options: one without the other, one that is not there, and a key of another certificate."""
    sound, foreign = shown_by(folder / "sound", "target"), shown_by(folder / "foreign", "target")
    options = {"ca": "--tls-client-ca", "cert": "--tls-cert", "key": "--tls-key"}
    assert files_of({"ca": "", "cert": "", "key": ""}, options) is None
    for files, words in (
        ({"cert": sound.cert}, "^--tls-cert is .* but must be given with --tls-key, or left out$"),
        ({"key": sound.key}, "^--tls-key is .* but must be given with --tls-cert, or left out$"),
        ({"cert": sound.cert, "key": foreign.key}, "^--tls-cert is .* fits the key in .*: KEY_VALUES_MISMATCH$"),
        ({"cert": str(tmp_path / "no"), "key": sound.key}, "^--tls-cert is .*: No such file or directory$"),
        ({"ca": sound.key}, "^--tls-client-ca is .* an authority's certificate in PEM: NO_CERTIFICATE_OR_CRL_FOUND$"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            files_of(files, options)
    with pytest.raises(InvalidRequest, match=r"^tls.ca is "):
        Client("127.0.0.1:1", tls=Tls(ca=str(tmp_path / "no")))
    # Nor is one that has gone since an error beside the one that is being looked into.
    assert why_refused("127.0.0.1:1", Tls(ca=str(tmp_path / "no"))).startswith("tls.ca is ")
