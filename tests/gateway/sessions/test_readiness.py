"""Health of a gateway while its target comes and goes, asked as a load balancer asks."""

from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs
from support.basics import PATIENCE_S, eventually
from support.services.markov import MarkovModel
from support.services.markov_services import TargetServicer, serving

from gateway.server import start
from gateway.sessions.peer import ModelInfo, ServicePeer
from gateway.settings import GatewaySettings
from outrider.errors import InvalidRequest
from outrider.model_files.vocabulary import Vocabulary
from outrider.process.upkeep import Upkeep
from outrider.rpc.channels import open_channel
from outrider.v1 import model_service_pb2 as model_pb

TOKENIZER = str(Path(__file__).resolve().parents[3] / "models" / "target")


@pytest.mark.parametrize("name", ["", "outrider.v1.GenerationService"])
async def test_health_follows_the_target(name: str) -> None:
    """It turns red when the only target goes, and green when another incarnation answers on its port."""
    target = TargetServicer(model_pb.SERVICE_ROLE_TARGET, MarkovModel(), Vocabulary.read(TOKENIZER).digests)
    target.vocabulary_size = 4096
    async with AsyncExitStack() as life:
        address = await life.enter_async_context(serving(target))
        gateway = await start(GatewaySettings(address, TOKENIZER, listen="127.0.0.1:0", rest_listen=""))
        channel = open_channel(gateway.address)
        health = health_pb2_grpc.HealthStub(channel)

        async def is_status(status: int) -> bool:
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            return bool(answer.status == status)

        try:
            statuses = health_pb2.HealthCheckResponse
            assert await is_status(statuses.SERVING)
            await life.aclose()
            await eventually(lambda: is_status(statuses.NOT_SERVING))
            await life.enter_async_context(serving(target, address))
            await eventually(lambda: is_status(statuses.SERVING))
        finally:
            await channel.close()
            await gateway.stop(0)


async def test_a_spare_with_other_weights_gets_no_request() -> None:
    """While the first is there and while it is away: the gateway is not ready then, and says why, there and in the log.

    When the first comes back with these weights, the spare is one again.
    """
    digests = Vocabulary.read(TOKENIZER).digests
    first, spare = (
        TargetServicer(model_pb.SERVICE_ROLE_TARGET, MarkovModel(), digests, vocabulary_size=4096, model_hash=each)
        for each in ("one", "two")
    )
    async with AsyncExitStack() as stack:
        life = await stack.enter_async_context(AsyncExitStack())
        address = await life.enter_async_context(serving(first))
        other = await stack.enter_async_context(serving(spare))
        settings = GatewaySettings(f"{address},{other}", TOKENIZER, listen="127.0.0.1:0", rest_listen="127.0.0.1:0")
        with capture_logs() as logs:
            gateway = await start(settings)
            stack.push_async_callback(gateway.stop, 0)
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{gateway.rest_address}"))

            async def ready() -> tuple[int, str, bool]:
                """Status and text of /ready, and whether its list of who is left out has anybody."""
                reply = await http.get("/ready")
                return reply.status_code, reply.text, bool(reply.json().get("left_out"))

            async def is_(status: int, words: str, *, left_out: bool) -> bool:
                found = await ready()
                return (found[0], found[2]) == (status, left_out) and words in found[1]

            sentence = f"The target service at {other} has other weights, with which no request begins"
            await eventually(lambda: is_(200, sentence, left_out=True))
            up = "outrider_service_up"
            figures = (await http.get("/metrics", params={"name[]": up})).text.splitlines()
            assert f'{up}{{address="{other}",service="target"}} 0.0' in figures
            await life.aclose()
            await eventually(lambda: is_(503, sentence, left_out=False))
            assert gateway.backend.target.info is None
            first.model_hash = "two"
            await stack.enter_async_context(serving(first, address))
            await eventually(lambda: is_(200, "ready", left_out=False))
            # And the spare is one now.
            assert [each.model_hash for each in gateway.backend.target.peers] == ["two", "two"]
    reasons = [line["reason"] for line in logs if line["event"] == "target left out"]
    assert reasons == [f"{sentence} (model hash two, not one)"]
    [changed] = [line for line in logs if line["event"] == "service has other weights"]
    assert (changed["before"], changed["now"]) == ("one", "two")


@pytest.mark.slow
async def test_a_watch_outlives_whatever_comes_in_between() -> None:
    """A fault in the middle of it is counted, and the service is found all the same, then and when it comes back."""
    target, upkeep = TargetServicer(model_pb.SERVICE_ROLE_TARGET, MarkovModel()), Upkeep()
    faults = [OSError(28, "No space left on device"), RuntimeError("a bug")]

    def check(_info: ModelInfo) -> None:
        if faults:
            raise faults.pop()

    async with AsyncExitStack() as life:
        address = await life.enter_async_context(serving(target))
        link = ServicePeer("target", address, check, upkeep=upkeep)
        try:
            assert await link.settled(PATIENCE_S)
            assert link.info is not None
            assert upkeep.failing == (f"target link {address}",)
            await eventually(lambda: not upkeep.failing)
            await life.aclose()
            await eventually(lambda: link.info is None)
            faults.append(RuntimeError("another one"))
            await life.enter_async_context(serving(target, address))
            await eventually(lambda: link.info is not None)
            [family] = upkeep.collect()
            assert [sample.value for sample in family.samples] == [3]
        finally:
            await link.close()
    assert upkeep.failing == ()
    assert [family.samples for family in upkeep.collect()] == [[]]


def test_every_address_of_a_list_is_checked() -> None:
    """A replica that can never be reached is a mistake, and is named."""
    settings = GatewaySettings("a:1, b:2", "model")
    with pytest.raises(InvalidRequest, match="target is 'b'"):
        replace(settings, target="a:1,b")
    with pytest.raises(InvalidRequest, match="draft is 'b'"):
        replace(settings, draft="b")
    with pytest.raises(InvalidRequest, match="target is ''"):
        replace(settings, target=" , ")
