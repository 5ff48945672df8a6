"""A request over two targets: where it goes, what it survives, and what it says about that."""

import asyncio
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
from gateway.sessions.peer import TRIAL_S, ModelInfo, ServicePeer
from gateway.sessions.placement import NO_PREFIX
from gateway.sessions.replicas import Placing, Replicas
from gateway.sessions.session import DraftDeadline, RoundDeadline, TargetTimeouts
from gateway.sessions.target import RemoteTargetSession
from gateway.speculation import speculate
from outrider.errors import PeerLost, TargetsEnded
from outrider.parameters import SamplingParameters, SessionSpec
from outrider.rpc.breaker import BREAKERS, CircuitBreaker
from outrider.v1 import model_service_pb2 as model_pb

PROMPT, SEED, MAX_LEN = (3, 5), 9, 60
SPEC = SessionSpec(PROMPT, len(PROMPT), SamplingParameters(), SEED, MAX_LEN, frozenset({0}), frozenset())


@dataclass
class World:
    """Targets and two drafts; those of a role have the same model."""

    targets: list[TargetServicer]
    drafts: list[DraftServicer]
    target: Replicas
    draft: Replicas
    lives: list[AsyncExitStack]
    timeouts: TargetTimeouts

    async def rounds(
        self, draft_count: int, session_id: bytes = b"0123456789abcdef", at: ServicePeer | None = None
    ) -> AsyncIterator[Round]:
        """The rounds of one request, which begins at a target if one is given."""
        log, placing = TokenLog(PROMPT), Placing("hash", peer=at)
        planner = RoundPlanner(SpeculationPolicy(), draft_count, MAX_LEN, max_draft_count=8)
        target = RemoteTargetSession(self.target, self.timeouts, SPEC, log, session_id, placing)
        deadline = DraftDeadline(0.5, 0.5)
        draft = RemoteDraftSession(self.draft, deadline, SPEC, log, session_id, warm=draft_count > 0)
        async with aclosing(speculate(log, planner, target, draft)) as rounds:
            async for committed in rounds:
                yield committed

    def check(self, rounds: list[Round]) -> None:
        """The tokens must be those of plain decoding, each of them once."""
        said = PROMPT + tuple(token for committed in rounds for token in committed.token_ids)
        assert said == plain_decoding(self.targets[0].model, PROMPT, SEED, MAX_LEN)


@asynccontextmanager
async def world(num_targets: int = 2) -> AsyncIterator[World]:
    """All services and links to them."""

    def accept(info: ModelInfo) -> None:
        """Every model fits."""

    targets = [
        TargetServicer(model_pb.SERVICE_ROLE_TARGET, MarkovModel(), instance_id=number + 9)
        for number in range(num_targets)
    ]
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
        yield World(targets, drafts, Replicas(links[:num_targets]), Replicas(links[num_targets:]), lives, timeouts)


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


async def test_sessions_of_a_killed_target_spread_over_the_others() -> None:
    """Six that were all there go on with two others, and say what one target says."""
    async with world(num_targets=3) as here:
        requests = [here.rounds(0, bytes([number] * 16), here.target.peers[0]) for number in range(6)]
        begun = [[await anext(each)] for each in requests]
        assert [peer.book.session_count for peer in here.target.peers] == [6, 0, 0]
        await here.lives[0].aclose()
        for each in await asyncio.gather(*map(_rest, requests, begun)):
            here.check(each)
        opened = [peer.book.num_opened for peer in here.target.peers]
        assert opened[0] == sum(opened[1:]) == 6
        assert min(opened[1:]) >= 2
        assert [peer.book.session_count for peer in here.target.peers] == [0, 0, 0]


async def _rest(rounds: AsyncIterator[Round], begun: list[Round]) -> list[Round]:
    return [*begun, *[committed async for committed in rounds]]


async def test_drafts_share_sessions_too() -> None:
    """Of eight that are there at once each draft has some."""
    async with world() as here:
        requests = [here.rounds(4, bytes([number] * 16)) for number in range(8)]
        begun = [[await anext(each), await anext(each)] for each in requests]
        counts = [peer.book.session_count for peer in here.draft.peers]
        assert sum(counts) == 8
        assert min(counts) >= 2
        for each, rounds in zip(requests, begun, strict=True):
            here.check(await _rest(each, rounds))
        assert [peer.book.session_count for peer in here.draft.peers] == [0, 0]


async def test_a_target_that_hung_is_left_alone_while_there_is_another() -> None:
    """However idle it looks. After a while one session tries it, and no other one meanwhile."""
    async with world() as here:
        now_s = 100.0
        hung, other = here.target.peers
        hung.breaker = CircuitBreaker(*BREAKERS["target"], clock_s=lambda: now_s)
        hung.breaker.failed(b"first", PeerLost("it does not answer requests"))
        for number in range(9):
            other.book.opened(bytes([number]), 50, NO_PREFIX)
        assert here.target.pick(b"second") is other
        now_s += TRIAL_S + 1
        assert here.target.pick(b"second") is hung
        hung.breaker.enter(b"second")
        assert here.target.pick(b"third") is other
        assert here.target.pick(b"second") is hung


async def test_each_link_has_deadlines_of_its_own() -> None:
    """What one target or draft takes, or fails to say in time, changes nothing for another one."""
    async with world() as here:
        rounds, draft = RoundDeadline(), DraftDeadline()
        for _ in range(50):
            rounds.of(here.target.peers[0]).observe(1.0)
            draft.of(here.draft.peers[0]).observe(0.02, 1)
            draft.of(here.draft.peers[1]).observe(0.001, 1)
        assert [round(rounds.of(peer).seconds(), 1) for peer in here.target.peers] == [19.9, 2.0]
        draft.of(here.draft.peers[0]).missed()
        assert [round(draft.of(peer).seconds(1), 2) for peer in here.draft.peers] == [0.8, 0.25]
        # A session learns about the one where it is.
        here.check([committed async for committed in here.rounds(4)])
        learnt = [here.timeouts.deadline.of(peer) == here.timeouts.deadline for peer in here.target.peers]
        assert learnt == [False, True]


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


async def test_a_lost_session_prefers_targets_of_its_numerics() -> None:
    """Where there is one it says what the seed says everywhere else."""
    async with world(num_targets=3) as here:
        here.targets[1].numerics_id, peer = "other", here.target.peers[1]
        peer.report_lost(peer.link())
        await eventually(lambda: peer.info is not None and peer.info.numerics_id == "other")
        rounds: list[Round] = []
        async for committed in here.rounds(0, at=here.target.peers[0]):
            rounds.append(committed)
            if len(rounds) == 1:
                await here.lives[0].aclose()
        here.check(rounds)
        assert {committed.verdict.numerics_id for committed in rounds} == {"markov"}
        assert here.targets[1].answers == 0 < here.targets[2].answers


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


async def test_a_request_that_ended_two_targets_is_refused() -> None:
    """By name, and the third one never gets it."""
    async with world(num_targets=3) as here:
        for target in here.targets:
            target.mischief = {1: Mischief.FROZEN}
        request = asyncio.create_task(_rest(here.rounds(0), []))
        for num_ended in range(2):
            await eventually(lambda count=num_ended: sum(len(target.opens) for target in here.targets) == count + 1)
            last = [number for number, target in enumerate(here.targets) if target.sessions]
            await here.lives[last[0]].aclose()
        with pytest.raises(TargetsEnded, match=r"^2 targets ended while they read the request, and no other gets it: "):
            await request
        assert sorted(len(target.opens) for target in here.targets) == [0, 1, 1]
        assert not here.target.suspect_turn.locked()


async def test_a_connection_that_ends_is_no_target_that_does() -> None:
    """However often that happens while a session is read."""
    async with world(num_targets=3) as here:
        here.timeouts = TargetTimeouts(RoundDeadline(0.5, 0.5), rebuild_budget_s=30.0)
        for target in here.targets:
            target.mischief = {1: Mischief.BROKEN}
        here.check(await _rest(here.rounds(0), []))
        assert sum(target.answers for target in here.targets) > 3


async def test_others_that_a_target_read_when_it_ended_are_read_one_by_one() -> None:
    """So the one that ends the next target too is the only one that is refused."""
    async with world(num_targets=3) as here:
        first, second, third = here.target.peers
        here.target.change((first, second))
        here.targets[0].mischief = dict.fromkeys((1, 2), Mischief.FROZEN)
        here.targets[1].mischief = dict.fromkeys((1, 2), Mischief.FROZEN)
        requests = [asyncio.create_task(_rest(here.rounds(0, bytes([each] * 16), first), [])) for each in range(2)]
        await eventually(lambda: here.targets[0].sessions == 2)
        await here.lives[0].aclose()
        await eventually(lambda: here.targets[1].sessions > 0)
        here.target.change((first, second, third))
        await here.lives[1].aclose()
        ends = await asyncio.gather(*requests, return_exceptions=True)
        assert [type(end) for end in ends].count(TargetsEnded) == 1
        here.check(next(end for end in ends if isinstance(end, list)))
        assert (len(here.targets[1].opens), len(here.targets[2].opens)) == (1, 1)
