"""Almost right messages over real links: answered or refused by name, nothing kept, and no other session disturbed."""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.basics import eventually, spec_of
from support.models.tiny_models import write_tiny_model
from support.requests.garbage import check_refusal, conversation, draft_messages, fence, garbled, target_messages
from support.services.session_clients import DraftClient, TargetClient

from draft_service.server import DraftSettings
from draft_service.server import start as start_draft
from outrider.model_service.server import RunningModelService
from outrider.rpc.channels import open_channel
from outrider.rpc.errors import error_from, session_error_from
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1.model_service_pb2_grpc import ModelServiceStub
from target_service.server import TargetSettings
from target_service.server import start as start_target

SPEC = spec_of((5, 6, 7), 60, eos=())
START = {"draft": start_draft, "target": start_target}
SETTINGS = {"draft": DraftSettings, "target": TargetSettings}
MESSAGES = {"draft": draft_messages(), "target": target_messages()}
# A failing example is a handful of messages already, and each takes a round trip to try.
GARBAGE = settings(
    max_examples=300,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


def check_answers(responses: Iterable[Any]) -> None:
    """Fails unless each that ends a session is a documented refusal."""
    for response in responses:
        if response.HasField("error"):
            check_refusal(session_error_from(response.error))


@dataclass
class Attacked:
    """A service on a loop of its own, which runs while a test awaits something on it."""

    role: str
    runner: asyncio.Runner
    service: RunningModelService
    channel: grpc.aio.Channel

    def client(self) -> Any:
        """A session on a link of its own."""
        return (DraftClient if self.role == "draft" else TargetClient)(self.channel)

    async def bystander(self, garbage: list[Message]) -> list[Any]:
        """The answers to a well-behaved session that is open while somebody else sends garbage, here and elsewhere."""
        client = self.client()
        await (client.open(SPEC, 3) if self.role == "draft" else client.open(SPEC))
        try:
            answers = [await client.read()]
            await self.converse(garbage)
            await self.share(client, garbage)
            await (client.advance(1, 4, [9], 3) if self.role == "draft" else client.step(1, 4, [9, 9]))
            answers.append(await client.read())
            await client.close(1)
        finally:
            client.call.cancel()
        return [getattr(answer, answer.WhichOneof("answer")) for answer in answers]

    async def converse(self, messages: list[Message]) -> None:
        """Sends messages on a link of their own, in a frame each, and reads to its end, which must be a good one."""
        client = self.client()
        for message in messages:
            await client.send(message)
        await client.call.done_writing()
        with suppress(EOFError):
            while True:
                check_answers((await client.link.frame()).responses)

    async def share(self, client: Any, messages: list[Message]) -> None:
        """Sends messages on the link of a session, all in one frame."""
        if messages:
            await client.send(*messages)
            await client.settle()
            check_answers(each for answers in client.link._answers.values() for each in answers)

    async def quiet(self) -> None:
        """Waits until nothing is held, and checks the books of the pool."""
        pool = self.service.runner.pool
        await eventually(lambda: len(self.service.table) == 0 and pool.num_free == pool.num_blocks)
        await self.service.worker.call(pool.check_integrity)


@pytest.fixture(scope="module", params=["draft", "target"])
def attacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """A service of a tiny model, whose leases end at once."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny") / "m", "llama", vocab_size=257, context_len=640)
    model = SETTINGS[request.param](
        str(folder), "127.0.0.1:0", dtype="float32", threads=1, kv_tokens=2048, lease_seconds=0.001
    )
    with asyncio.Runner() as runner:
        service = runner.run(START[request.param](model))

        async def connect() -> grpc.aio.Channel:
            return open_channel(service.address)

        channel = runner.run(connect())
        yield Attacked(request.param, runner, service, channel)
        runner.run(channel.close())
        runner.run(service.stop(0))


@pytest.mark.slow
@GARBAGE
@given(chance=st.randoms())
def test_garbage_harms_nobody(attacked: Attacked, chance: Random) -> None:
    """Whatever is sent beside it or on another link, a session's answers are the same, and nothing stays."""
    expected = attacked.runner.run(attacked.bystander([]))
    garbage = conversation(chance, MESSAGES[attacked.role])
    assert attacked.runner.run(attacked.bystander(garbage)) == expected
    attacked.runner.run(attacked.quiet())


@settings(GARBAGE, max_examples=50)
@given(chance=st.randoms())
def test_garbled_rollbacks_are_answered_or_refused(attacked: Attacked, chance: Random) -> None:
    """A call has no session to end, so each stands for itself."""
    request = garbled(chance, model_pb.RollbackRequest(fence=fence(5)))

    async def roll_back() -> None:
        try:
            await ModelServiceStub(attacked.channel).Rollback(request)
        except grpc.aio.AioRpcError as error:
            check_refusal(error_from(error))

    attacked.runner.run(roll_back())
