"""A running session goes on with another draft: what for, without a lost round, and what is left where it was."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.basics import eventually
from support.services.markov import MarkovModel, plain_decoding
from support.services.markov_services import DraftServicer, Mischief, TargetServicer, linked

from gateway.rounds.planner import RoundPlanner
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import ANY_DRAFT, GuessRequest, Round, TokenLog
from gateway.sessions import draft_move
from gateway.sessions.draft import RemoteDraftSession
from gateway.sessions.draft_move import DraftMoves
from gateway.sessions.peer import ServicePeer
from gateway.sessions.placement import NO_PREFIX, LinkFigures, MovedFor, PlaceWish, better
from gateway.sessions.replicas import Placing, Replicas
from gateway.sessions.session import DraftDeadline, TargetTimeouts
from gateway.sessions.target import RemoteTargetSession
from gateway.speculation import speculate
from outrider.parameters import Acceptance, Rule, SamplingParameters, SessionSpec
from outrider.v1 import model_service_pb2 as model_pb

PROMPT, SEED, MAX_LEN = (3, 5), 9, 120
SPEC = SessionSpec(PROMPT, len(PROMPT), SamplingParameters(), SEED, MAX_LEN, frozenset({0}), frozenset())
SESSION_ID = b"0123456789abcdef"


@pytest.fixture(autouse=True)
def looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions look before every round, but not again after a move that failed."""
    monkeypatch.setattr(draft_move, "LOOK_S", 0.0)
    monkeypatch.setattr(draft_move, "REST_S", 3600.0)


@dataclass
class Pool:
    """A target, two drafts of one model, and a session that begins at the first of these."""

    target: TargetServicer
    target_link: ServicePeer
    drafts: list[DraftServicer]
    replicas: Replicas
    links: list[ServicePeer]

    async def rounds(self, spec: SessionSpec = SPEC) -> AsyncIterator[Round]:
        """The rounds of one request."""
        log = TokenLog(PROMPT)
        planner = RoundPlanner(SpeculationPolicy(), 4, MAX_LEN, max_draft_count=8)
        targets = Replicas([self.target_link])
        target = RemoteTargetSession(targets, TargetTimeouts(), SPEC, log, SESSION_ID, Placing("hash"))
        draft = RemoteDraftSession(self.replicas, DraftDeadline(60, 60), spec, log, SESSION_ID, warm=True)
        async with aclosing(speculate(log, planner, target, draft)) as rounds:
            async for committed in rounds:
                yield committed

    def crowd(self) -> None:
        """Nine more sessions are on the first draft."""
        for number in range(9):
            self.links[0].book.opened(bytes([number]), 1, NO_PREFIX)
            self.links[0].book.answered(bytes([number]), 1, 0, 0)

    async def check(self, rounds: list[Round], **moves: int) -> None:
        """Every token is that of plain decoding, every round but the first has guesses or was the last, and no draft
        has a session any more; so many moves were made.
        """
        said = PROMPT + tuple(token for committed in rounds for token in committed.token_ids)
        assert said == plain_decoding(self.target.model, PROMPT, SEED, MAX_LEN)
        assert all(committed.draft_count for committed in rounds[1:-1])
        assert {reason.value: count for reason, count in self.replicas.moves.items() if count} == moves
        await eventually(lambda: not any(draft.sessions for draft in self.drafts))
        assert self.links[1].book.session_count == 0


@asynccontextmanager
async def pool(*hashes: str) -> AsyncIterator[Pool]:
    """All services, and links to them; a further draft for each hash of another model."""
    target = TargetServicer(model_pb.SERVICE_ROLE_TARGET, MarkovModel())
    drafts = [
        DraftServicer(model_pb.SERVICE_ROLE_DRAFT, MarkovModel(noise=0.3), instance_id=number, model_hash=model_hash)
        for number, model_hash in enumerate(("hash", "hash", *hashes), start=3)
    ]
    async with AsyncExitStack() as stack:
        target_link = await stack.enter_async_context(linked(target))
        links = [await stack.enter_async_context(linked(draft)) for draft in drafts]
        replicas = Replicas(links)
        yield Pool(target, target_link, drafts, replicas, links)


async def test_a_draft_that_drains_is_left_without_a_lost_round() -> None:
    """The session reads on the other one meanwhile, and ends where it was before the draft itself ends."""
    async with pool() as here:
        rounds: list[Round] = []
        async for committed in here.rounds():
            rounds.append(committed)
            if len(rounds) == 3:
                assert here.drafts[0].sessions == 1
                here.links[0].is_draining = True
        await here.check(rounds, leaving=1)
        assert here.drafts[1].answers > 3


async def test_a_draft_that_drains_is_left_for_one_with_the_same_model() -> None:
    """Though another model's would be free; it is taken where there is no other."""
    async with pool("another") as here:
        for number in range(9):
            here.links[1].book.opened(bytes([number]), 1, NO_PREFIX)
            here.links[1].book.answered(bytes([number]), 1, 0, 0)
        here.links[0].is_draining = True
        moves = DraftMoves(here.replicas, SPEC, NO_PREFIX)
        assert moves.due(here.links[0], 10, is_guessing=True) == (here.links[1], MovedFor.LEAVING)
        here.links[1].is_draining = True
        assert moves.due(here.links[1], 10, is_guessing=True) == (here.links[2], MovedFor.LEAVING)


async def test_a_draft_whose_address_has_gone_is_left() -> None:
    """Its link can close before the request ends."""
    async with pool() as here:
        rounds: list[Round] = []
        async for committed in here.rounds():
            rounds.append(committed)
            if len(rounds) == 3:
                here.replicas.change(here.links[1:])
        await here.check(rounds, leaving=1)
        assert not here.links[0].has_sessions
        here.replicas.change(here.links)


async def test_a_session_leaves_a_crowd_once() -> None:
    """It goes to the idle draft and stays there, however often it looks."""
    async with pool() as here:
        rounds: list[Round] = []
        async for committed in here.rounds():
            rounds.append(committed)
            if len(rounds) == 3:
                here.crowd()
        await here.check(rounds, load=1)
        assert here.drafts[1].answers > 3


async def test_a_session_stays_where_others_are_no_better() -> None:
    """Two drafts with a session each."""
    async with pool() as here:
        here.links[1].book.opened(b"other", 1, NO_PREFIX)
        rounds = [committed async for committed in here.rounds()]
        here.links[1].book.closed(b"other")
        await here.check(rounds)


@pytest.mark.parametrize("mischief", [Mischief.FULL, Mischief.LOST, Mischief.FORGET, Mischief.FROZEN])
async def test_a_move_that_fails_costs_nothing(mischief: Mischief) -> None:
    """Whatever the draft does to which the session was to move: it stays, and has guesses in every round."""
    async with pool() as here:
        here.drafts[1].mischief = {1: mischief}
        rounds: list[Round] = []
        async for committed in here.rounds():
            rounds.append(committed)
            if len(rounds) == 3:
                here.crowd()
        await here.check(rounds)
        assert here.drafts[1].answers == 1


@pytest.mark.parametrize("numerics_id", ["markov", "other"])
@pytest.mark.parametrize("rule", Rule)
async def test_a_session_whose_answer_depends_on_guesses_stays_with_their_numerics(
    rule: Rule, numerics_id: str
) -> None:
    """Under such a rule it moves for load only where guesses are the same."""
    async with pool() as here:
        link = here.links[1]
        assert link.info is not None
        link._info = replace(link.info, numerics_id=numerics_id)
        here.crowd()
        spec = replace(SPEC, acceptance=Acceptance(rule=rule))
        found = draft_move.DraftMoves(here.replicas, spec, NO_PREFIX).due(here.links[0], 10, is_guessing=True)
        assert found == ((link, MovedFor.LOAD) if rule is Rule.MATCH or numerics_id == "markov" else None)


async def test_a_session_does_not_move_to_a_draft_without_its_drafter() -> None:
    """That would refuse it, and be blamed for what it never offered."""
    async with pool() as here:
        link = here.links[1]
        assert link.info is not None
        link._info = replace(link.info, drafters={"other": link.info.drafters["model"]})
        here.crowd()
        assert draft_move.DraftMoves(here.replicas, SPEC, NO_PREFIX).due(here.links[0], 10, is_guessing=True) is None


async def test_a_session_alone_on_its_draft_wants_to_no_idle_one() -> None:
    """Though two would wait twice as long there as one: it is not a second one beside itself."""
    async with pool() as here:
        for link in here.links:
            link.book.answer_us.begin({1: 5_000.0, 2: 10_000.0})
        here.links[0].book.opened(SESSION_ID, 10, NO_PREFIX)
        here.links[0].book.answered(SESSION_ID, 10, 0, 0)
        looks = draft_move.DraftMoves(here.replicas, SPEC, NO_PREFIX)
        assert looks.due(here.links[0], 10, is_guessing=True) is None


async def test_no_more_sessions_leave_a_crowd_than_should() -> None:
    """Those that are still being read elsewhere count there, and no more where they guess meanwhile."""
    asked = GuessRequest(ANY_DRAFT, 2)
    async with pool() as here, AsyncExitStack() as life:
        crowded, idle = (link.book for link in here.links)
        here.replicas.change(here.links[:1])
        sessions = [
            RemoteDraftSession(
                here.replicas, DraftDeadline(60, 60), SPEC, TokenLog(PROMPT), bytes([number] * 16), warm=True
            )
            for number in range(10)
        ]
        for session in sessions:
            await life.enter_async_context(session)
            await session.propose(asked)
        here.replicas.change(here.links)
        here.drafts[1].reading.clear()
        for session in sessions:
            await session.propose(asked)
        num_left = len(crowded.leaving)
        assert 3 <= num_left <= 5
        assert (crowded.session_count, idle.session_count) == (10 - num_left, num_left)
        here.drafts[1].reading.set()
        await eventually(lambda: idle.waiting_tokens == 0)
        for session in sessions:
            await session.propose(asked)
        assert (len(crowded.leaving), crowded.session_count) == (0, 10 - num_left)


async def test_what_a_draft_has_read_does_not_wait_there() -> None:
    """Also where no round has asked it for guesses since it was given the prompt."""
    async with pool() as here:
        book = here.links[0].book
        async with RemoteDraftSession(
            here.replicas, DraftDeadline(60, 60), SPEC, TokenLog(PROMPT), SESSION_ID, warm=True
        ):
            assert book.waiting_tokens == len(PROMPT)
            await eventually(lambda: book.waiting_tokens == 0)


async def test_a_session_without_guesses_moves_only_for_an_end() -> None:
    """It costs its draft nothing, but would hold up its end."""
    async with pool() as here:
        here.crowd()
        looks = draft_move.DraftMoves(here.replicas, SPEC, NO_PREFIX)
        assert looks.due(here.links[0], 10, is_guessing=False) is None
        here.links[0].is_draining = True
        assert looks.due(here.links[0], 10, is_guessing=False) == (here.links[1], MovedFor.LEAVING)


loads = st.builds(
    LinkFigures,
    address=st.just("a"),
    session_count=st.integers(0, 200),
    prompt_token_us=st.floats(1, 1e3),
    step_us=st.floats(100, 1e5),
    row_us=st.floats(0, 1e3),
)


@given(loads, loads, st.integers(1, 4_000))
def test_a_session_that_has_moved_would_not_go_back(one: LinkFigures, other: LinkFigures, length: int) -> None:
    """So sessions do not go to and fro between drafts whose costs stay as they are."""
    wish, there = PlaceWish(length, 64.0), replace(other, address="b")
    assert better(one, [there], wish) is None or better(there, [one], wish) is None
