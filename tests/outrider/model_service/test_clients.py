"""Clients of a service by the names in their certificates: who is let in, and whose a session is."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs
from support.basics import check_empty, spec_of
from support.certificates import issue, shown_by
from support.models.tiny_models import SETTINGS
from support.services.session_clients import TargetClient

from outrider.errors import OutriderError
from outrider.model_service.server import LoadedModel, RunningModelService
from outrider.model_service.session_store import SessionRefused
from outrider.rpc.channels import open_channel
from outrider.rpc.errors import error_from
from outrider.rpc.tls import ClientRefused, TlsFiles
from outrider.v1 import model_service_pb2 as pb
from outrider.v1.model_service_pb2_grpc import ModelServiceStub
from target_service.server import start_with

PROMPT = (0, 40, 91, 26, 55, 12)


@dataclass
class Served:
    """A service that lets two clients in, and a channel of each who has a certificate, by name."""

    service: RunningModelService
    channels: dict[str, grpc.aio.Channel]

    def client(self, name: str, session_id: bytes | None = None) -> TargetClient:
        """A session of one of them, on a link of its own."""
        return TargetClient(self.channels[name], session_id)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return issue(tmp_path_factory.mktemp("certificates"), "target", "gateway", "gateway-b", "client")


@pytest.fixture
async def served(model: LoadedModel, folder: Path) -> AsyncIterator[Served]:
    shown = shown_by(folder, "target")
    files = {"tls_cert": shown.cert, "tls_key": shown.key, "tls_client_ca": shown.ca}
    running = await start_with(model, replace(SETTINGS, tls_clients="gateway, gateway-b", **files))
    async with AsyncExitStack() as life:
        life.push_async_callback(running.stop, 0)
        names = ("target", "gateway", "gateway-b", "client")
        channels = {name: open_channel(running.address, TlsFiles(shown_by(folder, name))) for name in names}
        for channel in channels.values():
            life.push_async_callback(channel.close)
        yield Served(running, channels)
    check_empty(running.runner.pool)


async def test_only_those_who_are_named_may_ask(served: Served, folder: Path) -> None:
    """Any other one, though the authority has signed its certificate, is told so, and so is the log; but for health."""
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


async def test_a_session_is_its_opener_s(served: Served) -> None:
    """Whoever else names its id is refused, whatever the message, and nothing happens to it; links of its own go on."""
    owner = served.client("gateway")
    spec = spec_of(PROMPT, 40, eos=())
    await owner.open(spec)
    _, _, first = await owner.verdict()
    assert first is not None
    other = served.client("gateway-b", owner.session_id)
    base_len = len(PROMPT) + 1
    messages = [
        other.opening(spec, epoch=9),
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
    await again.open(replace(spec, token_ids=(*PROMPT, first), prompt_len=len(PROMPT)), epoch=2)
    assert (await again.verdict())[0] == base_len
    # Nor is it another's when its link is gone.
    again.call.cancel()
    with pytest.raises(SessionRefused):
        await other.rollback(9, 3)
    last = served.client("gateway", owner.session_id)
    assert (await last.rollback(3, base_len)).fence.epoch == 3
    await last.open(replace(spec, token_ids=(*PROMPT, first), prompt_len=len(PROMPT)), epoch=4)
    await last.verdict()
    await last.close(4, base_len)
    assert isinstance(refused.value, OutriderError)
    assert len(served.service.table) == 0
