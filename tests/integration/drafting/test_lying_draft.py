"""A draft that lies about any field of any message costs no client a token or an error, and is found out.

Real services and weights; between the draft and the gateway stands a server that changes what comes by.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from support.basics import eventually
from support.models.tiny_models import TARGET, TRAINED
from support.services.lying_draft import ANSWERS, Lie, LyingDraft, lies, lying_draft
from support.stack import RunningStack, request_of, running_stack

from gateway.server import RunningGateway, start
from gateway.sessions.link import ServiceLink
from gateway.settings import GatewaySettings
from outrider.rpc.channels import open_channel
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1 import types_pb2
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub

NUM_TOKENS = 14
COMMON: dict[str, Any] = {"text": "Once", "seed": 5, "max_tokens": NUM_TOKENS, "temperature": 1.0, "ignore_eos": True}
ASKED: dict[str, dict[str, Any]] = {
    "tree": {"draft_count": 6, "shape": types_pb2.TreeShape(max_depth=4), "return_rounds": True},
    "named": {"drafter": "model", "draft_count": 4},
    "auto": {},
    "ratio": {"draft_count": 4, "rule": types_pb2.ACCEPTANCE_RULE_RATIO},
}
HASTY = {"draft_deadline_min_s": 0.05, "draft_deadline_max_s": 0.1}


@dataclass
class Lied:
    """A gateway whose draft lies."""

    stack: RunningStack
    draft: LyingDraft
    gateway: RunningGateway
    calls: GenerationServiceStub

    @property
    def link(self) -> ServiceLink:
        """The gateway's link to the liar."""
        assert self.gateway.backend.draft is not None
        return self.gateway.backend.draft.links[0]

    async def said(self, *names: str) -> dict[str, tuple[int, ...]]:
        """What the gateway says to some requests that come at once; fails when one has an error."""
        return dict(zip(names, await asyncio.gather(*map(self._said, names)), strict=True))

    async def _said(self, name: str) -> tuple[int, ...]:
        call = self.calls.Generate(request_of(**COMMON, **ASKED[name]))
        return tuple([token.token_id async for response in call for token in response.round.tokens])

    async def forgiven(self) -> None:
        """Waits until the gateway has its link again, with all that it held against the draft forgotten."""
        self.draft.lie = self.draft.manner = None
        self.link.report_lost(self.link._stream)  # type: ignore[arg-type]
        await eventually(lambda: self.link.info is not None)
        self.link.breaker.renew()


@asynccontextmanager
async def lied() -> AsyncIterator[Lied]:
    """Everything of it, on free ports."""
    async with running_stack(str(TARGET), str(TRAINED)) as stack, lying_draft(stack.draft.address) as (draft, address):
        settings = GatewaySettings(
            stack.target.address, str(TARGET), address, listen="127.0.0.1:0", rest_listen="", **HASTY
        )
        gateway = await start(settings)
        try:
            async with open_channel(gateway.address) as channel:
                yield Lied(stack, draft, gateway, GenerationServiceStub(channel))
        finally:
            await gateway.stop(0)


async def silent(_frame: object, _context: object) -> AsyncIterator[bytes]:
    """No answer."""
    return
    yield b""


async def told(here: Lied, lie: Lie) -> tuple[str, ...]:
    """Puts a lie into the draft's mouth; returns the requests that will hear it."""
    await here.forgiven()
    here.draft.lie, here.draft.told = lie, 0
    if lie.path[0].containing_type is model_pb.GetModelInfoResponse.DESCRIPTOR:
        # A handshake hears it.
        here.link.report_lost(here.link.stream())
        await eventually(lambda: here.draft.told > 0)
        await asyncio.wait({asyncio.ensure_future(here.link.settled(1.0))})
        return ("auto",)
    if lie.path[0].containing_type is model_pb.RollbackResponse.DESCRIPTOR:
        # Whoever is late is taken back.
        here.draft.manner = silent
        return ("named",)
    return tuple(ASKED)


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.name)
async def test_no_lie_about_any_field_costs_a_token_or_an_error(answer: Descriptor) -> None:
    """Each field of each message, those of later versions too, with values of all kinds that its type can have."""
    async with lied() as here:
        plain = (await here.said("tree"))["tree"]
        assert len(plain) == NUM_TOKENS
        for lie in lies(answer):
            names = await told(here, lie)
            try:
                said = await here.said(*names)
            except grpc.aio.AioRpcError as error:
                pytest.fail(f"{lie}: {error.details()}")
            for name, token_ids in said.items():
                assert len(token_ids) == NUM_TOKENS, f"{lie}, {name}"
                assert name == "ratio" or token_ids == plain, f"{lie}, {name}"
        await here.forgiven()
