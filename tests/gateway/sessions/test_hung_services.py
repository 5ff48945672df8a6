"""Services whose device hangs while their process answers handshakes: what later requests pay for it."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

import pytest
from support.basics import eventually
from support.services.markov import MarkovModel
from support.services.markov_services import DraftServicer, Mischief, TargetServicer, serving
from support.services.silences import DraftSilence, Patient

from gateway.rounds.planner import RoundPlanner
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import NOTHING, FallbackReason, GuessRequest, Proposal, Round, TokenLog
from gateway.sessions.draft import RemoteDraftSession
from gateway.sessions.peer import ModelInfo, ServicePeer
from gateway.sessions.replicas import Placing, Replicas
from gateway.sessions.session import RoundDeadline, TargetTimeouts
from gateway.sessions.target import RemoteTargetSession
from gateway.speculation import speculate
from outrider.errors import PeerLost
from outrider.parameters import SamplingParameters, SessionSpec
from outrider.rpc.breaker import CircuitBreaker
from outrider.v1 import model_service_pb2 as model_pb

PROMPT = (3, 5)
MAX_LEN = 40
SPEC = SessionSpec(PROMPT, len(PROMPT), SamplingParameters(), 9, MAX_LEN, frozenset({0}), frozenset())


@pytest.fixture(autouse=True)
def _short_closings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services that hang do not take note of a close."""
    monkeypatch.setattr("gateway.sessions.link.CLOSE_TIMEOUT_S", 0.05)


@dataclass
class Clock:
    """Clock of seconds that a test moves."""

    now_s: float = 0.0

    def __call__(self) -> float:
        """Seconds of the clock."""
        return self.now_s


@dataclass
class Pair:
    """Two services and their links; the draft's breaker has a clock that tests move."""

    target: TargetServicer
    draft: DraftServicer
    target_link: ServicePeer
    draft_link: ServicePeer
    clock: Clock = field(default_factory=Clock)
    timeouts: TargetTimeouts = field(
        default_factory=lambda: TargetTimeouts(RoundDeadline(0.05, 0.05), rebuild_budget_s=0.3)
    )
    num_sessions: int = 0

    def __post_init__(self) -> None:
        self.draft_link.breaker = CircuitBreaker(2, (0.5, 10.0), self.clock)

    def session_id(self) -> bytes:
        """A name that no other session has."""
        self.num_sessions += 1
        return b"session %d" % self.num_sessions

    def target_session(self, log: TokenLog) -> RemoteTargetSession:
        """A target session with a name of its own."""
        return RemoteTargetSession(
            Patient([self.target_link]), self.timeouts, SPEC, log, self.session_id(), Placing("hash")
        )

    async def run(self) -> list[Round]:
        """A request with four guesses a round; its tokens are not looked at here."""
        log, session_id = TokenLog(PROMPT), self.session_id()
        planner = RoundPlanner(SpeculationPolicy(), 4, MAX_LEN, max_draft_count=8)
        draft = RemoteDraftSession(Replicas([self.draft_link]), DraftSilence(self.draft), SPEC, log, session_id, True)
        return [committed async for committed in speculate(log, planner, self.target_session(log), draft)]


class Link(ServicePeer):
    """A link that closes with a context."""

    async def __aenter__(self) -> Self:
        assert await self.settled(5)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


def accept(info: ModelInfo) -> None:
    """Every model fits."""


@asynccontextmanager
async def pair_of(mischief: dict[int, Mischief]) -> AsyncIterator[Pair]:
    """A pair whose draft does the given mischief."""
    target = TargetServicer(model_pb.SERVICE_ROLE_TARGET, MarkovModel())
    draft = DraftServicer(model_pb.SERVICE_ROLE_DRAFT, MarkovModel(noise=0.3), mischief=mischief)
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving(service)) for service in (target, draft)]
        target_link = await stack.enter_async_context(Link("target", addresses[0], accept))
        draft_link = await stack.enter_async_context(Link("draft", addresses[1], accept))
        yield Pair(target, draft, target_link, draft_link)


# Rollbacks are answered at once and proposals never come, as from a device that hangs.
HANGING = dict.fromkeys(range(1, 1000), Mischief.SILENT)


async def test_a_hung_draft_is_left_alone_by_all_requests() -> None:
    """The first request finds it out; later ones send it nothing, not even their prompt, and say that it is late."""
    async with pair_of(HANGING) as pair:
        first = await pair.run()
        assert any(committed.proposal.fallback_reason is FallbackReason.DRAFT_LATE for committed in first)
        assert pair.draft_link.breaker.is_open
        asked = pair.draft.answers
        for _ in range(3):
            rounds = await pair.run()
            reasons = {committed.proposal.fallback_reason for committed in rounds[1:-1]}
            assert reasons == {FallbackReason.DRAFT_LATE}
        assert pair.draft.answers == asked


async def test_one_trial_at_a_time_and_a_proposal_ends_the_rest() -> None:
    """After a pause one request tries once; when the draft is well again, the next trial brings speculation back."""
    async with pair_of(HANGING) as pair:
        await pair.run()
        asked = pair.draft.answers
        pair.clock.now_s += 0.5
        await pair.run()
        assert pair.draft.answers == asked + 1
        pair.draft.mischief = {}
        pair.clock.now_s += 1.0
        rounds = await pair.run()
        assert not pair.draft_link.breaker.is_open
        assert sum(committed.draft_count > 0 for committed in rounds) > 3


async def test_another_incarnation_of_the_draft_is_asked_at_once() -> None:
    """A restart ends the rest: what the old process did is not held against the new one."""
    async with pair_of(HANGING) as pair:
        await pair.run()
        pair.draft.mischief = {}
        for instance_id, is_open in ((1, True), (2, False)):
            pair.draft.instance_id = instance_id
            pair.draft_link.report_lost(pair.draft_link.link())
            await eventually(lambda: pair.draft_link.info is not None)
            assert pair.draft_link.breaker.is_open == is_open
        assert any(committed.draft_count for committed in await pair.run())


async def test_requests_behind_a_hung_target_wait_for_the_one_on_trial() -> None:
    """One request at a time tries a target that hangs; the others send it nothing, and an answer lets all in again."""
    async with pair_of({}) as pair:
        pair.target.mischief = dict.fromkeys(range(1, 1000), Mischief.FROZEN)
        pair.target.stalled_us = 60_000_000
        async with pair.target_session(TokenLog(PROMPT)) as trying, pair.target_session(TokenLog(PROMPT)) as other:
            with pytest.raises(PeerLost, match="no target took the request over within"):
                await trying.verify(NOTHING, 0)
            assert pair.target_link.breaker.is_open
            await eventually(lambda: pair.target_link.info is not None)
            pair.target_link.breaker.enter(b"on trial")
            asked = pair.target.answers
            with pytest.raises(PeerLost, match="does not answer requests"):
                await other.verify(NOTHING, 0)
            assert pair.target.answers == asked
            pair.target_link.breaker.left(b"on trial")
            pair.target.mischief, pair.target.stalled_us = {}, 0
            await trying.verify(NOTHING, 0)
            await other.verify(NOTHING, 0)
            assert not pair.target_link.breaker.is_open


async def test_answers_between_faults_do_not_hide_them() -> None:
    """A draft that fails every second time rests between faults, because each may cost reading everything again."""
    async with pair_of(dict.fromkeys(range(2, 500, 2), Mischief.FULL)) as pair:
        log = TokenLog(PROMPT)
        draft = RemoteDraftSession(
            Replicas([pair.draft_link]), DraftSilence(pair.draft), SPEC, log, b"draft", warm=False
        )
        rests = []
        async with draft:
            for number in range(8):
                proposal: Proposal = await draft.propose(GuessRequest(count=1))
                assert (proposal.fallback_reason is FallbackReason.DRAFT_REFUSED) == number % 2
                rests.append(draft._resume_len - len(log) - 1)
        assert rests[1] == 0
        assert all(rest > 2 for rest in rests[3::2])
