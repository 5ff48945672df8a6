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
from support.services.lying_draft import ANSWERS, FAULTY, MANNERS, Lie, LyingDraft, Manner, lies, lying_draft, silent
from support.stack import PATIENT, RunningStack, request_of, running_stack

from gateway.server import RunningGateway, start
from gateway.sessions.peer import ServicePeer
from gateway.settings import GatewaySettings
from outrider.rpc.channels import open_channel
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1 import types_pb2
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub

NUM_TOKENS = 8
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
    def link(self) -> ServicePeer:
        """The gateway's link to the liar."""
        assert self.gateway.backend.draft is not None
        return self.gateway.backend.draft.peers[0]

    async def said(self, *names: str) -> dict[str, tuple[int, ...]]:
        """What the gateway says to some requests that come at once; fails when one has an error."""
        return dict(zip(names, await asyncio.gather(*map(self._said, names)), strict=True))

    async def _said(self, name: str) -> tuple[int, ...]:
        call = self.calls.Generate(request_of(**COMMON, **ASKED[name]))
        return tuple([token.token_id async for response in call for token in response.round.tokens])

    async def forgiven(self) -> None:
        """Waits until the gateway has its link, with all that it held against the draft forgotten."""
        self.draft.lie = self.draft.manner = None
        await eventually(lambda: self.link.info is not None)
        self.link.breaker.renew()


@asynccontextmanager
async def lied(deadlines: dict[str, float] = HASTY) -> AsyncIterator[Lied]:
    """Everything of it, on free ports."""
    leases = {"lease_seconds": 1.0}
    async with (
        running_stack(str(TARGET), str(TRAINED), draft_options=leases) as stack,
        lying_draft(stack.draft.address) as (draft, address),
    ):
        settings = GatewaySettings(
            stack.target.address, str(TARGET), address, listen="127.0.0.1:0", rest_listen="", branches=4, **deadlines
        )
        gateway = await start(settings)
        try:
            async with open_channel(gateway.address) as channel:
                yield Lied(stack, draft, gateway, GenerationServiceStub(channel))
        finally:
            await gateway.stop(0)


# Which requests hear a lie, and every how many of the lies is told.
SHARES = [(("tree", "ratio"), 9), pytest.param(("tree", "named", "auto", "ratio"), 1, marks=pytest.mark.grid)]


async def told(here: Lied, lie: Lie, asked: tuple[str, ...]) -> tuple[str, ...]:
    """Puts a lie into the draft's mouth; returns those of the requests that will hear it, or what stands for them."""
    here.draft.lie, here.draft.told = lie, 0
    if lie.path[0].containing_type is model_pb.GetModelInfoResponse.DESCRIPTOR:
        # A handshake hears it.
        here.link.report_lost(here.link.link())
        await eventually(lambda: here.draft.told > 0)
        await here.link.settled(1.0)
        return ("auto",)
    if lie.path[0].containing_type is model_pb.RollbackResponse.DESCRIPTOR:
        # A draft that is late is taken back.
        here.draft.manner = silent
        return ("named",)
    return tuple(asked)


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "step"), SHARES, ids=["share", "all"])
@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.name)
async def test_no_lie_about_any_field_costs_a_token_or_an_error(
    answer: Descriptor, asked: tuple[str, ...], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each field of each message, those of later versions too, with values of all kinds that its type can have."""
    monkeypatch.setattr("gateway.sessions.peer.BACKOFF_S", (0.01, 0.02))
    monkeypatch.setattr("gateway.sessions.peer.MISFIT_LOOK_S", 0.01)
    async with lied() as here:
        plain = (await here.said("tree"))["tree"]
        assert len(plain) == NUM_TOKENS
        for lie in [*lies(answer)][::step]:
            await here.forgiven()
            names = await told(here, lie, asked)
            try:
                said = await here.said(*names)
            except grpc.aio.AioRpcError as error:
                pytest.fail(f"{lie}: {error.details()}")
            for name, token_ids in said.items():
                assert len(token_ids) == NUM_TOKENS, f"{lie}, {name}"
                assert name == "ratio" or token_ids == plain, f"{lie}, {name}"


@pytest.mark.slow
@pytest.mark.parametrize("manner", MANNERS, ids=lambda manner: manner.__name__)
async def test_whatever_messages_come_tokens_stay(manner: Manner) -> None:
    """None, too many, too large, other ones, or an end: where no draft may send them they count as its fault."""
    async with lied(HASTY if manner is silent else PATIENT) as here:
        plain = (await here.said("tree"))["tree"]
        here.draft.manner = manner
        for _ in range(2):
            said = await here.said(*ASKED)
            assert [said[name] for name in ("tree", "named", "auto")] == [plain] * 3
            assert len(said["ratio"]) == NUM_TOKENS
        assert here.draft.told > 0
        if manner in FAULTY:
            await eventually(lambda: here.link.faults > 0)
        await here.forgiven()
        await eventually(lambda: here.link.info is not None)
        assert (await here.said("tree"))["tree"] == plain
