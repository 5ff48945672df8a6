"""Clients of a service by the names in their certificates: who is let in, and whose a session is."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
import pytest
from cryptography import x509
from structlog.testing import capture_logs
from support.basics import check_empty, spec_of
from support.certificates import issue, shown_by, signed
from support.models.tiny_models import SETTINGS
from support.services.session_clients import DraftClient, TargetClient

from draft_service.server import DraftSettings
from draft_service.server import start_with as start_draft_with
from outrider.errors import OutriderError
from outrider.model_service.server import LoadedModel, RunningModelService
from outrider.model_service.sessions import MAX_REMEMBERED, SessionRefused
from outrider.rpc.channels import open_channel
from outrider.rpc.errors import error_from
from outrider.rpc.tls import ClientRefused, TlsFiles
from outrider.v1 import model_service_pb2 as pb
from outrider.v1.model_service_pb2_grpc import ModelServiceStub
from target_service.server import start_with

PROMPT = (0, 40, 91, 26, 55, 12)
SPEC = spec_of(PROMPT, 40, eos=())


ClientT = TypeVar("ClientT", TargetClient, DraftClient)


@dataclass
class Served(Generic[ClientT]):
    """A service that lets two clients in, and a channel of each who has a certificate, by name."""

    service: RunningModelService
    channels: dict[str, grpc.aio.Channel]
    kind: type[ClientT]

    def client(self, name: str, session_id: bytes | None = None) -> ClientT:
        """A session of one of them, on a link of its own."""
        return self.kind(self.channels[name], session_id)


Either = Served[TargetClient] | Served[DraftClient]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return issue(tmp_path_factory.mktemp("certificates"), "target", "gateway", "gateway-b", "client")


def files_of_service(folder: Path) -> dict[str, Any]:
    """What the settings of either service are, so that two clients are let in."""
    shown = shown_by(folder, "target")
    files = {"tls_cert": shown.cert, "tls_key": shown.key, "tls_client_ca": shown.ca}
    return {"tls_clients": "gateway, gateway-b", **files}


@pytest.fixture
async def served(model: LoadedModel, folder: Path) -> AsyncIterator[Served[TargetClient]]:
    running = await start_with(model, replace(SETTINGS, **files_of_service(folder)))
    async with serving(running, folder, TargetClient) as service:
        yield service


@pytest.fixture(params=["target", "draft"])
async def either(request: pytest.FixtureRequest, model: LoadedModel, folder: Path) -> AsyncIterator[Either]:
    files = files_of_service(folder)
    if request.param == "target":
        running = await start_with(model, replace(SETTINGS, **files))
        async with serving(running, folder, TargetClient) as target:
            yield target
    else:
        settings = DraftSettings(SETTINGS.model, SETTINGS.listen, threads=1, kv_tokens=8192, **files)
        async with serving(await start_draft_with(model, settings), folder, DraftClient) as draft:
            yield draft


@asynccontextmanager
async def serving(running: RunningModelService, folder: Path, kind: type[ClientT]) -> AsyncIterator[Served[ClientT]]:
    """A service that runs, with its channels; it is stopped at the end, and must hold nothing then."""
    async with AsyncExitStack() as life:
        life.push_async_callback(running.stop, 0)
        names = ("target", "gateway", "gateway-b", "client")
        channels = {name: open_channel(running.address, TlsFiles(shown_by(folder, name))) for name in names}
        for channel in channels.values():
            life.push_async_callback(channel.close)
        yield Served(running, channels, kind)
    check_empty(running.runner.pool)


@pytest.mark.slow
async def test_only_those_who_are_named_may_ask(served: Served[TargetClient], folder: Path) -> None:
    """Any other one, though the authority signed its certificate, learns so, and so does the log; but for health."""
    info = await ModelServiceStub(served.channels["gateway-b"]).GetModelInfo(pb.GetModelInfoRequest())
    assert info.role == pb.SERVICE_ROLE_TARGET
    with capture_logs() as logs:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ModelServiceStub(served.channels["client"]).GetModelInfo(pb.GetModelInfoRequest())
        with pytest.raises(ClientRefused) as refused:
            await served.client("client").read()
    raised = error_from(caught.value)
    sentence = "The client 'client' is not one of those that are let in"
    assert (caught.value.code(), type(raised), raised.message) == (
        grpc.StatusCode.PERMISSION_DENIED,
        ClientRefused,
        sentence,
    )
    assert (refused.value.message, refused.value.exit_code) == (sentence, 77)
    told = [(line["reason"], line["allowed"]) for line in logs if line["event"] == "client refused"]
    assert told == [(sentence, ["gateway", "gateway-b"])] * 2
    # The probe of a container shows the certificate of its own service.
    shown = shown_by(folder, "target")
    command = [sys.executable, "-m", "outrider.process.health_probe", served.service.address]
    for words, code in (([shown.ca, shown.cert, shown.key], 0), ([shown.ca], 69)):
        run = partial(subprocess.run, [*command, *words], capture_output=True, text=True, check=False)
        ended = await asyncio.to_thread(run)
        assert (ended.returncode, len(ended.stderr.splitlines())) == (code, int(code > 0)), ended


async def test_a_session_is_its_opener_s(served: Served[TargetClient]) -> None:
    """Another client that names its id is refused, whatever the message, and nothing happens to it; own links go on."""
    owner = served.client("gateway")
    await owner.open(SPEC)
    _, _, first = await owner.verdict()
    assert first is not None
    other = served.client("gateway-b", owner.session_id)
    base_len = len(PROMPT) + 1
    messages = [
        other.opening(SPEC, epoch=9),
        other.stepping(1, base_len),
        other.stepping(9, base_len),
        other.request(other.fence(9, base_len), close={}),
        other.request(other.fence(9, base_len), acknowledge={}),
    ]
    with capture_logs() as logs:
        for message in messages:
            await other.send(message)
            with pytest.raises(SessionRefused, match=r"^The session belongs to another client$"):
                await other.read()
        with pytest.raises(SessionRefused) as refused:
            await other.rollback(9, 3)
    assert refused.value.status == "PERMISSION_DENIED"
    told = [(line["client"], line["owner"]) for line in logs if line["event"] == "session refused"]
    assert told == [("gateway-b", "gateway")] * (len(messages) + 1)
    await owner.step(1, base_len)
    assert (await owner.verdict())[0] == base_len
    # A link that broke is begun again, and the session with it, as after any loss.
    owner.call.cancel()
    again = served.client("gateway", owner.session_id)
    await again.open(replace(SPEC, token_ids=(*PROMPT, first), prompt_len=len(PROMPT)), epoch=2)
    assert (await again.verdict())[0] == base_len
    # Nor is it another's when its link is gone.
    again.call.cancel()
    with pytest.raises(SessionRefused):
        await other.rollback(9, 3)
    last = served.client("gateway", owner.session_id)
    assert (await last.rollback(3, base_len)).fence.epoch == 3
    await last.open(replace(SPEC, token_ids=(*PROMPT, first), prompt_len=len(PROMPT)), epoch=4)
    await last.verdict()
    await last.close(4, base_len)
    assert isinstance(refused.value, OutriderError)
    assert len(served.service.table) == 0


async def open_at(client: TargetClient | DraftClient, epoch: int) -> None:
    """Opens a session of either service, and waits until the device has taken that."""
    if isinstance(client, DraftClient):
        await client.open(SPEC, 4, epoch=epoch)
    else:
        await client.open(SPEC, epoch=epoch)
    await client.settle()


async def test_a_rollback_of_another_client_does_not_keep_a_session_from_being_opened(either: Either) -> None:
    """Whose a session is only its open says, so a Rollback before that is about one of the caller's own."""
    owner = either.client("gateway")
    await either.client("gateway-b", owner.session_id).rollback(10**9, 3)
    await open_at(owner, 1)
    assert (await owner.read()).fence.epoch == 1
    await owner.close(1, len(PROMPT))


@pytest.mark.slow
async def test_rollbacks_of_another_client_make_nothing_forgotten(either: Either) -> None:
    """However many there are; an open that a Rollback has overtaken stays unanswered, and the next one is taken."""
    owner, other = either.client("gateway"), either.client("gateway-b")
    await owner.rollback(5, 3)
    for _ in range(MAX_REMEMBERED):
        other.session_id = os.urandom(16)
        await other.rollback(1, 1)
    await open_at(owner, 1)
    await open_at(owner, 5)
    assert (await owner.read()).fence.epoch == 5
    await owner.close(5, len(PROMPT))


async def test_a_session_is_taken_up_with_a_renewed_certificate(either: Either, folder: Path, tmp_path: Path) -> None:
    """What counts is the name in it."""
    before = either.client("gateway")
    await open_at(before, 1)
    await before.read()
    before.call.cancel()
    shutil.copytree(folder / "authority", tmp_path / "authority")
    files = TlsFiles(shown_by(issue(tmp_path, "gateway"), "gateway"))
    async with open_channel(either.service.address, files) as channel:
        again = either.kind(channel, before.session_id)
        assert (await again.rollback(2, len(PROMPT))).fence.epoch == 2
        await open_at(again, 3)
        assert (await again.read()).fence.epoch == 3
        await again.close(3, len(PROMPT))


DNS, URI, MAIL, IP = x509.DNSName, x509.UniformResourceIdentifier, x509.RFC822Name, x509.IPAddress
PERSON = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gateway")])
# The names of a certificate, and how it is called where it is refused; None where it is let in.
NAMES: dict[str, tuple[list[x509.GeneralName], str | None]] = {
    "DNS": ([DNS("gateway")], None),
    "DNS before others": ([DNS("gateway"), DNS("other"), IP(ip_address("10.0.0.7"))], None),
    "DNS behind other kinds": ([URI("spiffe://a/b"), IP(ip_address("10.0.0.7")), DNS("gateway")], None),
    "none": ([], ""),
    "URI": ([URI("gateway")], "UniformResourceIdentifier:gateway"),
    "URI before another DNS": ([URI("gateway"), DNS("other")], "other"),
    "e-mail": ([MAIL("gateway")], "RFC822Name:gateway"),
    "person": ([x509.DirectoryName(PERSON)], "DirectoryName:<Name(CN=gateway)>"),
    "address": ([IP(ip_address("10.0.0.7"))], "IPAddress:10.0.0.7"),
    "second DNS": ([DNS("other"), DNS("gateway")], "other"),
    "zero": ([DNS("gateway\0.other")], "gateway\0.other"),
    "wildcard": ([DNS("*")], "*"),
    "capitals": ([DNS("Gateway")], "Gateway"),
    "dot": ([DNS("gateway.")], "gateway."),
    "space": ([DNS(" gateway")], " gateway"),
}


@pytest.mark.parametrize("kind", NAMES)
async def test_a_name_is_the_first_dns_name(
    kind: str, served: Served[TargetClient], folder: Path, tmp_path: Path
) -> None:
    """Nothing else that says the same lets anybody in: no URI, no e-mail, no subject, no text that ends at a zero."""
    names, refused_as = NAMES[kind]
    shutil.copytree(folder / "authority", tmp_path / "authority")
    files = TlsFiles(signed(tmp_path, "shown", *names))
    async with open_channel(served.service.address, files) as channel:
        asking = ModelServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest())
        if refused_as is None:
            assert (await asking).role == pb.SERVICE_ROLE_TARGET
            return
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asking
    raised = error_from(caught.value)
    assert isinstance(raised, ClientRefused)
    assert raised.message == f"The client {refused_as!r} is not one of those that are let in"
