"""What a request learns when its target goes away, and that what a target says itself arrives unchanged."""

import os
from contextlib import AsyncExitStack

import pytest
from support.services.markov import MarkovModel
from support.services.markov_services import Mischief, TargetServicer, serving
from support.services.silences import Patient

from gateway.rounds.round import NOTHING, TokenLog
from gateway.sessions.peer import ModelInfo, ServicePeer
from gateway.sessions.replicas import Placing, Replicas
from gateway.sessions.session import RoundDeadline, TargetTimeouts
from gateway.sessions.target import RemoteTargetSession
from outrider.errors import CacheFull, PeerLost
from outrider.parameters import SamplingParameters, SessionSpec
from outrider.v1 import model_service_pb2 as model_pb

PROMPT = (3, 5)


class Request:
    """A target, a link to it and a session; `kill` ends the service at once."""

    def __init__(self, mischief: dict[int, Mischief] | None = None, replicas: type[Replicas] = Replicas) -> None:
        self._replicas = replicas
        self.target = TargetServicer(model_pb.SERVICE_ROLE_TARGET, MarkovModel(), mischief=mischief or {})
        self._life, self._parts = AsyncExitStack(), AsyncExitStack()

    async def __aenter__(self) -> "Request":
        self.address = await self._life.enter_async_context(serving(self.target))
        link = ServicePeer("target", self.address, _accept)
        self._parts.push_async_callback(link.close)
        assert await link.settled(5)
        spec = SessionSpec(PROMPT, len(PROMPT), SamplingParameters(), 9, 60, frozenset({0}), frozenset())
        self.log = TokenLog(PROMPT)
        timeouts = TargetTimeouts(RoundDeadline(0.5, 0.5), rebuild_budget_s=0.2)
        session = RemoteTargetSession(self._replicas([link]), timeouts, spec, self.log, os.urandom(16), Placing("hash"))
        self.session = await self._parts.enter_async_context(session)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._parts.aclose()
        await self._life.aclose()

    async def kill(self) -> None:
        """Ends the service and its links."""
        await self._life.aclose()

    async def round(self) -> None:
        """One plain round."""
        self.log.commit(NOTHING, await self.session.verify(NOTHING, 0))


def _accept(info: ModelInfo) -> None:
    """Every model fits."""


async def test_a_link_that_breaks_names_the_target() -> None:
    """Nothing of gRPC's own words reaches the client."""
    async with Request(dict.fromkeys(range(2, 1000), Mischief.BROKEN), Patient) as request:
        await request.round()
        with pytest.raises(PeerLost) as caught:
            await request.round()
        assert caught.value.message == (
            f"The target service at {request.address} was lost in the middle of the request, and no target took the "
            "request over within 0.2 seconds"
        )


async def test_a_target_that_ends_in_the_middle_is_named() -> None:
    """The process goes away while a session is open."""
    async with Request() as request:
        await request.round()
        await request.kill()
        with pytest.raises(PeerLost, match=r"^The target service at [\d.:]+ cannot be reached$"):
            await request.round()


async def test_a_target_that_is_not_there_cannot_be_reached() -> None:
    """The link has not noticed yet, but the session's first message finds no service."""
    async with Request() as request:
        await request.kill()
        with pytest.raises(PeerLost) as caught:
            await request.round()
        assert caught.value.message == f"The target service at {request.address} cannot be reached"


async def test_what_the_target_says_itself_arrives_unchanged() -> None:
    """Class and sentence are the target's own."""
    async with Request({2: Mischief.FULL}) as request:
        await request.round()
        with pytest.raises(CacheFull, match=r"^no blocks$"):
            await request.round()
