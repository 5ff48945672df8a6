"""How long a service may leave the question unanswered whether it works, and what else is heard meanwhile."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.basics import eventually
from support.services.markov import MarkovModel
from support.services.markov_services import MarkovSession, TargetServicer, linked

from gateway.rounds.round import NOTHING, TokenLog
from gateway.sessions.probe import LONGEST_TURN_S, MOST_SILENT_S, MOST_WAIT_S, Patience
from gateway.sessions.replicas import Placing, Replicas
from gateway.sessions.session import RoundDeadline, TargetTimeouts
from gateway.sessions.target import RemoteTargetSession
from outrider.parameters import SamplingParameters, SessionSpec
from outrider.v1 import model_service_pb2 as model_pb

PROMPT = (3, 5)
SPEC = SessionSpec(PROMPT, len(PROMPT), SamplingParameters(), 9, 40, frozenset({0}), frozenset())


@dataclass
class Reticent(TargetServicer):
    """A target that keeps answers to the question back until it may give them."""

    num_asked: int = 0
    may_say: asyncio.Event = field(default_factory=asyncio.Event)

    async def GetModelInfo(  # noqa: N802
        self, request: model_pb.GetModelInfoRequest, context: object
    ) -> model_pb.GetModelInfoResponse:
        self.num_asked += 1
        await self.may_say.wait()
        return await super().GetModelInfo(request, context)


def reticent() -> Reticent:
    """One that answers until it has shaken hands."""
    service = Reticent(model_pb.SERVICE_ROLE_TARGET, MarkovModel())
    service.may_say.set()
    return service


@pytest.mark.parametrize(
    ("spoken", "turn_s", "over_after_s"),
    [
        ([False] * 60, 0.125, MOST_SILENT_S),
        ([False] * 11 + [True] + [False] * 60, 0.125, 2 * MOST_SILENT_S),
        ([True] * 60, 0.125, MOST_WAIT_S),
        ([True, False] * 30, 0.125, MOST_WAIT_S),
        # However long a turn was, so many it has to be.
        ([False] * 60, 3600.0, 3600.0 * MOST_SILENT_S / LONGEST_TURN_S),
    ],
)
def test_a_service_that_speaks_has_more_time(spoken: list[bool], turn_s: float, over_after_s: float) -> None:
    """Turns in which something came begin the silence anew, and end what is waited for all the same."""
    patience = Patience()
    overs = []
    for has_spoken in spoken:
        patience.turn(turn_s, has_spoken=has_spoken)
        overs.append(patience.is_over)
    assert (overs.index(True) + 1) * turn_s == over_after_s


async def test_a_turn_is_one_turn_however_long_the_gateway_was_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute passes between two turns of its loop: what has come by then has not been read, so it is waited for."""
    service = reticent()
    async with linked(service) as peer:
        loop = asyncio.get_running_loop()
        service.may_say.clear()
        question = peer.probe.stalled_s(peer.link())
        await eventually(lambda: service.num_asked == 2)
        clock_s = loop.time
        monkeypatch.setattr(loop, "time", lambda: clock_s() + 60.0)
        await eventually(lambda: peer.probe.is_silent)
        assert not question.done()
        service.may_say.set()
        assert await question == 0.0
        assert not peer.is_silent


async def test_all_who_doubt_share_one_question() -> None:
    """It is sent once, and the next one who doubts asks anew."""
    service = reticent()
    async with linked(service) as peer:
        service.may_say.clear()
        questions = {peer.probe.stalled_s(peer.link()) for _ in range(3)}
        await eventually(lambda: service.num_asked == 2)
        service.may_say.set()
        assert [await each for each in questions] == [0.0]
        assert await peer.probe.stalled_s(peer.link()) == 0.0
        assert service.num_asked == 3


async def test_another_incarnation_is_not_the_one_that_is_asked_about() -> None:
    """Whatever it says of itself, the sessions of the one before are lost."""
    service = reticent()
    async with linked(service) as peer:
        service.instance_id += 1
        assert await peer.probe.stalled_s(peer.link()) == math.inf


async def test_an_answer_is_taken_while_a_question_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that is slow to say that it works has not to say so first."""
    may_decide, verdict = asyncio.Event(), MarkovSession.verdict

    async def slow(self: MarkovSession, *arguments: Any) -> AsyncIterator[object]:
        await may_decide.wait()
        async for response in verdict(self, *arguments):
            yield response

    monkeypatch.setattr(MarkovSession, "verdict", slow)
    service = reticent()
    async with linked(service) as peer:
        timeouts = TargetTimeouts(RoundDeadline(0.05, 0.05))
        session = RemoteTargetSession(
            Replicas([peer]), timeouts, SPEC, TokenLog(PROMPT), b"i" * 16, Placing(peer.model_hash)
        )
        async with session:
            service.may_say.clear()
            waiting = asyncio.create_task(session.verify(NOTHING, 0))
            await eventually(lambda: peer.probe.is_silent)
            question = peer.probe.stalled_s(peer.link())
            may_decide.set()
            assert (await waiting).reopens == 0
            assert not question.done()
