"""A request over two targets: where it goes, what it survives, and what it says about that."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass

import pytest
from support.basics import eventually
from support.services.markov import MarkovModel, plain_decoding
from support.services.markov_services import DraftServicer, Mischief, TargetServicer, serving

from gateway.rounds.planner import RoundPlanner
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import Round, TokenLog
from gateway.sessions.draft import RemoteDraftSession
from gateway.sessions.peer import ModelInfo, ServicePeer
from gateway.sessions.replicas import Replicas
from gateway.sessions.session import DraftDeadline, RoundDeadline, TargetTimeouts
from gateway.sessions.target import RemoteTargetSession
from gateway.speculation import speculate
from outrider.errors import PeerLost
from outrider.parameters import SamplingParameters, SessionSpec
from outrider.v1 import model_service_pb2 as model_pb

PROMPT, SEED, MAX_LEN = (3, 5), 9, 60
SPEC = SessionSpec(PROMPT, len(PROMPT), SamplingParameters(), SEED, MAX_LEN, frozenset({0}), frozenset())


@dataclass
class World:
    """Two targets and two drafts; each pair has the same model, the second of a kind is the spare one."""

    targets: list[TargetServicer]
    drafts: list[DraftServicer]
    target: Replicas
    draft: Replicas
    lives: list[AsyncExitStack]
    timeouts: TargetTimeouts

    async def rounds(self, draft_count: int) -> AsyncIterator[Round]:
        """The rounds of one request."""
        log = TokenLog(PROMPT)
        planner = RoundPlanner(SpeculationPolicy(), draft_count, MAX_LEN, max_draft_count=8)
        target = RemoteTargetSession(self.target, self.timeouts, SPEC, log, b"0123456789abcdef", "hash")
        deadline = DraftDeadline(0.5, 0.5)
        draft = RemoteDraftSession(self.draft, deadline, SPEC, log, b"0123456789abcdef", warm=draft_count > 0)
        async with aclosing(speculate(log, planner, target, draft)) as rounds:
            async for committed in rounds:
                yield committed

    def check(self, rounds: list[Round]) -> None:
        """The tokens must be those of plain decoding, each of them once."""
        said = PROMPT + tuple(token for committed in rounds for token in committed.token_ids)
        assert said == plain_decoding(self.targets[0].model, PROMPT, SEED, MAX_LEN)


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    """All four services and links to them."""

    def accept(info: ModelInfo) -> None:
        """Every model fits."""

    targets = [TargetServicer(model_pb.SERVICE_ROLE_TARGET, MarkovModel(), instance_id=number) for number in (1, 2)]
    drafts = [
        DraftServicer(model_pb.SERVICE_ROLE_DRAFT, MarkovModel(noise=0.3), instance_id=number) for number in (3, 4)
    ]
    async with AsyncExitStack() as stack:
        lives = [await stack.enter_async_context(AsyncExitStack()) for _ in (*targets, *drafts)]
        links = []
        for service, life in zip((*targets, *drafts), lives, strict=True):
            address = await life.enter_async_context(serving(service))
            links.append(ServicePeer("target" if service in targets else "draft", address, accept))
            stack.push_async_callback(links[-1].close)
            assert await links[-1].settled(5)
        timeouts = TargetTimeouts(RoundDeadline(0.1, 0.1), rebuild_budget_s=0.5)
        yield World(targets, drafts, Replicas(links[:2]), Replicas(links[2:]), lives, timeouts)


@pytest.mark.parametrize("draft_count", [0, 4])
async def test_the_spare_target_takes_the_session_over(draft_count: int) -> None:
    """The first one dies in the middle; the tokens are those of plain decoding, and one round reports the move."""
    async with world() as here:
        rounds: list[Round] = []
        async for committed in here.rounds(draft_count):
            rounds.append(committed)
            if len(rounds) == 3:
                await here.lives[0].aclose()
        here.check(rounds)
        assert sum(committed.verdict.reopens for committed in rounds) == 1
        assert here.targets[0].answers > 0
        assert here.targets[1].answers > 0


async def test_the_spare_draft_takes_the_session_over() -> None:
    """The first draft dies; after at most a few rounds the second one guesses."""
    async with world() as here:
        rounds: list[Round] = []
        async for committed in here.rounds(4):
            rounds.append(committed)
            if len(rounds) == 3:
                await here.lives[2].aclose()
        here.check(rounds)
        assert here.drafts[1].answers > 0
        assert rounds[-2].draft_count > 0


async def test_a_spare_target_is_idle_while_the_first_one_works() -> None:
    """Replicas stand in for one another; they do not share the load."""
    async with world() as here:
        here.check([committed async for committed in here.rounds(4)])
        assert here.targets[1].answers == here.drafts[1].answers == 0


async def test_another_model_never_goes_on_with_a_session() -> None:
    """A spare target with other weights is no replica: the request ends with a sentence that says so."""
    async with world() as here:
        here.targets[1].model_hash = "another"
        here.target.peers[1].report_lost(here.target.peers[1].link())
        await eventually(lambda: here.target.peers[1].info is not None)
        rounds = here.rounds(0)
        await anext(rounds)
        await here.lives[0].aclose()
        with pytest.raises(PeerLost, match="none has the model with which the request began"):
            [committed async for committed in rounds]
        assert here.targets[1].answers == 0


async def test_a_target_with_other_numerics_takes_over_and_is_named() -> None:
    """Rounds carry the numerics of the target that made them, so that the move can be announced."""
    async with world() as here:
        here.targets[1].numerics_id = "other"
        rounds: list[Round] = []
        async for committed in here.rounds(0):
            rounds.append(committed)
            if len(rounds) == 1:
                await here.lives[0].aclose()
        assert {committed.verdict.numerics_id for committed in rounds} == {"markov", "other"}


@pytest.mark.parametrize("drifter", ["targets", "drafts"])
async def test_drift_is_counted_and_repaired(drifter: str) -> None:
    """A service that has cached fewer tokens than it should is rolled back to the first one and sent everything."""
    async with world() as here:
        service = (here.targets if drifter == "targets" else here.drafts)[0]
        rounds: list[Round] = []
        async for committed in here.rounds(4):
            rounds.append(committed)
            service.drift = 1 if len(rounds) == 2 else 0
        here.check(rounds)
        assert sum(committed.drift_repairs for committed in rounds) == 1
        assert len(service.rollbacks) == 1


async def test_a_service_that_goes_on_drifting_is_left_alone() -> None:
    """Its word is wrong, but its tokens are right, so repairs end after a few."""
    async with world() as here:
        here.targets[0].drift = 1
        rounds = [committed async for committed in here.rounds(4)]
        here.check(rounds)
        assert sum(committed.drift_repairs for committed in rounds) == 3


async def test_a_broken_stream_is_no_reason_to_leave_a_target_for_good() -> None:
    """The link repeats the handshake; the next fault may bring the session back to it."""
    async with world() as here:
        here.targets[0].mischief = {2: Mischief.BROKEN}
        here.targets[1].mischief = {3: Mischief.BROKEN}
        here.check([committed async for committed in here.rounds(4)])
        assert here.targets[0].answers > 2
