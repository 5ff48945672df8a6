"""Several drafts that guess for one request, over real links: one that is late, dead or lying harms nothing."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from support.basics import eventually
from support.services.markov import EOS, MarkovModel, plain_decoding
from support.services.markov_services import GARBAGE, DraftServicer, Mischief, TargetServicer, serving

from gateway.lookup.guesses import LookupGuesses, LookupSources
from gateway.rounds.planner import Drafting, RoundPlanner
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import ANY_DRAFT, LOOKUP, DrafterId, FallbackReason, GuessRequest, Round, TokenLog
from gateway.sessions import draft_move
from gateway.sessions.draft import AbsentDraftSession, RemoteDraftSession
from gateway.sessions.draft_opening import DrafterSeat
from gateway.sessions.draft_team import DraftTeam
from gateway.sessions.peer import ModelInfo, ServicePeer
from gateway.sessions.placement import MovedFor
from gateway.sessions.replicas import Placing, Replicas
from gateway.sessions.session import DraftDeadline, RoundDeadline, TargetTimeouts
from gateway.sessions.target import RemoteTargetSession
from gateway.speculation import speculate
from outrider.parameters import Rule, SamplingParameters, SessionSpec
from outrider.v1 import model_service_pb2 as model_pb

PROMPT, SEED, MAX_LEN = (3, 5), 9, 120
SPEC = SessionSpec(PROMPT, len(PROMPT), SamplingParameters(), SEED, MAX_LEN, frozenset({EOS}), frozenset())
NAMES = ("first", "second", "third")
# No draft is late here that a test did not make so, however busy the machine is: the team's grace is after answers.
PATIENT_S = 30.0
ALL_FAULTS = (Mischief.LOST, Mischief.BROKEN, Mischief.FULL, Mischief.FORGET, Mischief.STALE_FIRST, *GARBAGE)


def endless(noise: float = 0.0) -> MarkovModel:
    """A model that hardly ever ends."""
    model = MarkovModel(noise=noise)
    for row in model._rows:
        row[EOS] = 1e-12
    return model


@dataclass
class Team:
    """A target, and three drafts of different quality, the first of which the team asks first."""

    target: TargetServicer
    drafts: list[DraftServicer]
    links: list[ServicePeer]
    lives: list[AsyncExitStack]

    async def rounds(
        self, draft_count: int | None = 3, then: Callable[[int], None] = lambda _: None, *, looks: bool = False
    ) -> list[Round]:
        """All rounds of a request, whose tokens must be those of plain decoding; `then` gets each."""
        log, session_id = TokenLog(PROMPT), b"0123456789abcdef"
        drafting = Drafting((DrafterId("+".join(NAMES)), *((LOOKUP,) if looks else ())), merges=True)
        planner = RoundPlanner(SpeculationPolicy(), draft_count, MAX_LEN, 32, drafting)
        target = RemoteTargetSession(
            Replicas(self.links[:1]), TargetTimeouts(RoundDeadline(PATIENT_S)), SPEC, log, session_id, Placing("hash")
        )
        drafts = [
            RemoteDraftSession(
                Replicas([link]),
                DraftDeadline(PATIENT_S, PATIENT_S),
                SPEC,
                log,
                session_id,
                True,
                DrafterSeat("", name, lane),
            )
            for lane, (link, name) in enumerate(zip(self.links[1:], NAMES, strict=True))
        ]
        lookup = LookupGuesses(LookupSources().session(PROMPT, (), "") if looks else None, Rule.MATCH, 32)
        rounds = []
        async for committed in speculate(log, planner, target, DraftTeam(drafts), lookup):
            rounds.append(committed)
            then(len(rounds))
        assert log.tokens() == plain_decoding(self.target.model, PROMPT, SEED, MAX_LEN)
        return rounds


@asynccontextmanager
async def team() -> AsyncIterator[Team]:
    """All services and links to them."""

    def accept(info: ModelInfo) -> None:
        """Every model fits."""

    target = TargetServicer(model_pb.SERVICE_ROLE_TARGET, endless(), instance_id=1)
    drafts = [
        DraftServicer(model_pb.SERVICE_ROLE_DRAFT, endless(noise), instance_id=number)
        for number, noise in enumerate((1.0, 0.3, 3.0), start=2)
    ]
    async with AsyncExitStack() as stack:
        lives = [await stack.enter_async_context(AsyncExitStack()) for _ in (target, *drafts)]
        links = []
        for service, life in zip((target, *drafts), lives, strict=True):
            address = await life.enter_async_context(serving(service))
            links.append(ServicePeer("target" if service is target else "draft", address, accept))
            stack.push_async_callback(links[-1].close)
            assert await links[-1].settled(5)
        yield Team(target, drafts, links, lives)


def sources(rounds: list[Round]) -> set[str]:
    """Drafters that made rows of proposals."""
    return {each.proposal.source(row) for each in rounds for row in range(1, each.draft_count + 1)}


async def test_their_guesses_are_one_tree() -> None:
    """Every round has rows of all three where they differ, and together they are right more often than the best one."""
    async with team() as here:
        rounds = await here.rounds()
        assert sources(rounds) == set(NAMES)
        assert any(not each.proposal.tree.is_chain for each in rounds)
        assert len({each.draft_count for each in rounds}) > 2


@pytest.mark.slow
@pytest.mark.parametrize("mischief", ALL_FAULTS, ids=lambda each: each.name)
@pytest.mark.parametrize("number", [0, 1])
async def test_a_bad_one_is_left_out(mischief: Mischief, number: int) -> None:
    """It lies, forgets, breaks its link or refuses, at every second answer: the others go on guessing."""
    async with team() as here:
        here.drafts[number].mischief = dict.fromkeys(range(2, 60, 2), mischief)
        rounds = await here.rounds()
        others = {name for place, name in enumerate(NAMES) if place != number}
        assert others <= sources(rounds)
        assert sum(each.draft_count == 0 for each in rounds) <= 2


async def test_a_hanging_one_is_not_waited_for() -> None:
    """Rounds go on with the answers that are there; the late one rests ever longer."""
    async with team() as here:
        here.drafts[0].mischief = dict.fromkeys(range(1, 60), Mischief.LATE)
        rounds = await here.rounds()
        assert sources(rounds) == {"second", "third"}
        assert here.drafts[0].answers < len(rounds) / 2


async def test_a_killed_one_is_left_out() -> None:
    """In the middle of a request, and so is another one; at last the target goes on alone."""
    async with team() as here:
        for number in (1, 2, 3):
            await here.lives[number].aclose()
            rounds = await here.rounds()
            left = set(NAMES[number:])
            assert sources(rounds) <= left
        assert FallbackReason.DRAFT_ABSENT in {each.proposal.fallback_reason for each in rounds}


async def test_one_that_drains_is_left_where_no_round_has_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not end before the request does, for guesses that it is not asked for."""
    monkeypatch.setattr(draft_move, "LOOK_S", 0.0)
    async with team() as here:
        first, second = here.links[1:3]
        replicas, asked, log = Replicas([first, second]), GuessRequest(ANY_DRAFT, 2), TokenLog(PROMPT)
        deadline = DraftDeadline(PATIENT_S, PATIENT_S)
        alone = RemoteDraftSession(replicas, deadline, SPEC, log, b"i" * 16, False, DrafterSeat("", NAMES[0], 0))
        async with DraftTeam([alone]) as drafts:
            await drafts.propose(asked)
            first.is_draining = True
            await drafts.propose(replace(asked, count=0))
            await eventually(lambda: here.drafts[1].answers == 1)

            async def is_left() -> bool:
                # When the other one's answer is read here is chance.
                await drafts.propose(replace(asked, count=0))
                return not here.drafts[0].sessions

            await eventually(is_left)
            assert replicas.moves[MovedFor.LEAVING] == 1


async def test_lookups_join_in() -> None:
    """A text of twelve words repeats itself; what is found stands beside what the drafts say."""
    async with team() as here:
        rounds = await here.rounds(looks=True)
        assert "lookup" in sources(rounds)
        assert {"first", "second"} <= sources(rounds)
        await here.rounds(None, looks=True)


@pytest.mark.slow
async def test_a_stretch_is_ended_over_a_real_link() -> None:
    """A lookup alone: unasked verdicts that had been on their way are taken, and none is taken twice."""
    async with team() as here:
        for seed in range(4):
            log = TokenLog(PROMPT)
            spec = SessionSpec(PROMPT, 2, SamplingParameters(), seed, 400, frozenset({EOS}), frozenset())
            # A fixed number, because what `auto` makes of a busy machine is none of this test's business.
            planner = RoundPlanner(SpeculationPolicy(), 8, 400, 32, Drafting((LOOKUP,)))
            timeouts = TargetTimeouts(RoundDeadline(PATIENT_S))
            target = RemoteTargetSession(
                Replicas(here.links[:1]), timeouts, spec, log, bytes([seed] * 16), Placing("hash")
            )
            lookup = LookupGuesses(LookupSources().session(PROMPT, (), ""), Rule.MATCH, 32)
            rounds = [each async for each in speculate(log, planner, target, AbsentDraftSession(), lookup)]
            assert log.tokens() == plain_decoding(here.target.model, PROMPT, seed, 400)
            assert {each.proposal.drafter.name for each in rounds if each.draft_count} == {"lookup"}
        assert here.target.halted > 0
