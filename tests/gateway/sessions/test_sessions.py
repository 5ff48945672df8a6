"""The sessions over real links, against services of the tiny model that fail in every way the protocol can show."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import structlog
from support.basics import eventually
from support.services.markov import MarkovModel, plain_decoding
from support.services.markov_services import (
    GARBAGE,
    DraftServicer,
    MarkovSession,
    Mischief,
    Taking,
    TargetServicer,
    linked,
    serving,
)
from support.services.silences import DraftSilence, TargetSilence

from gateway.rounds.planner import RoundPlanner
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import FallbackReason, Round, TokenLog
from gateway.sessions.draft import RemoteDraftSession
from gateway.sessions.peer import ModelInfo, ServicePeer, WrongService
from gateway.sessions.replicas import Placing, Replicas
from gateway.sessions.session import DraftDeadline, TargetTimeouts
from gateway.sessions.target import RemoteTargetSession
from gateway.speculation import speculate
from outrider.errors import InvalidRequest, PeerLost, VocabularyMismatch
from outrider.parameters import SamplingParameters, SessionSpec
from outrider.rpc.breaker import BREAKERS, CircuitBreaker
from outrider.rpc.fencing import PROTOCOL_VERSION
from outrider.v1 import draft_service_pb2 as draft_pb
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1 import target_service_pb2 as target_pb
from outrider.v1 import types_pb2

PROMPT = (3, 5)
SEED = 9
MAX_LEN = 60


@dataclass
class Pair:
    """Two services, two links, and requests over them."""

    target: TargetServicer
    draft: DraftServicer
    target_link: ServicePeer
    draft_link: ServicePeer
    deadline: DraftDeadline
    timeouts: TargetTimeouts = field(default_factory=TargetTimeouts)

    async def rounds(self, draft_count: int | None = 4) -> AsyncIterator[Round]:
        """The rounds of one request."""
        spec = SessionSpec(PROMPT, len(PROMPT), SamplingParameters(), SEED, MAX_LEN, frozenset({0}), frozenset())
        log, session_id = TokenLog(PROMPT), b"0123456789abcdef"
        planner = RoundPlanner(SpeculationPolicy(), draft_count, MAX_LEN, max_draft_count=8)
        target = RemoteTargetSession(
            Replicas([self.target_link]), self.timeouts, spec, log, session_id, Placing("hash")
        )
        drafts = Replicas([self.draft_link])
        draft = RemoteDraftSession(drafts, self.deadline, spec, log, session_id, planner.expects_draft())
        async with aclosing(speculate(log, planner, target, draft)) as rounds:
            async for committed in rounds:
                yield committed

    async def run(self, draft_count: int | None = 4) -> list[Round]:
        """All rounds, after checking that the tokens are those of plain decoding and that both sessions are gone."""
        rounds = [committed async for committed in self.rounds(draft_count)]
        said = PROMPT + tuple(token for committed in rounds for token in committed.token_ids)
        assert said == plain_decoding(self.target.model, PROMPT, SEED, MAX_LEN)
        await gone(self)
        return rounds


def accept(info: ModelInfo) -> None:
    """Every model fits."""


@asynccontextmanager
async def pair_of(mischief: dict[int, Mischief] | None = None, context_len: int = 512) -> AsyncIterator[Pair]:
    """A pair whose draft does the given mischief, or has a short context."""
    target = TargetServicer(model_pb.SERVICE_ROLE_TARGET, MarkovModel())
    draft = DraftServicer(model_pb.SERVICE_ROLE_DRAFT, MarkovModel(noise=0.3), context_len=context_len)
    draft.mischief = mischief or {}
    async with linked(target) as target_link, linked(draft) as draft_link:
        yield Pair(target, draft, target_link, draft_link, DraftSilence(draft))


def reasons(rounds: list[Round]) -> list[FallbackReason]:
    """Why rounds were not speculative."""
    return [
        committed.proposal.fallback_reason for committed in rounds if committed.proposal.fallback_reason is not None
    ]


@pytest.mark.parametrize("draft_count", [0, 1, 4, 8, None])
async def test_tokens_equal_plain_decoding(draft_count: int | None) -> None:
    """Over real links, for fixed and chosen K, and both sessions are closed by a message."""
    async with pair_of() as pair:
        rounds = await pair.run(draft_count)
        assert reasons(rounds) == []
        assert pair.target.closed == 1
        assert pair.draft.closed == (draft_count != 0)


async def test_a_plain_request_asks_the_draft_nothing() -> None:
    """With K = 0 the draft gets no message, and the target's unasked tokens are acknowledged as they come."""
    async with pair_of() as pair:
        rounds = await pair.run(0)
        assert pair.draft.answers == 0
        assert len(rounds) == MAX_LEN - len(PROMPT)
        assert pair.target.max_acknowledged > 30


@pytest.mark.parametrize(
    ("mischief", "reason"),
    [
        (Mischief.LATE, FallbackReason.DRAFT_LATE),
        (Mischief.FROZEN, FallbackReason.DRAFT_LATE),
        (Mischief.LOST, FallbackReason.DRAFT_LOST),
        (Mischief.FULL, FallbackReason.DRAFT_REFUSED),
        (Mischief.UNWANTED, FallbackReason.DRAFT_REFUSED),
        *((mischief, FallbackReason.DRAFT_REFUSED) for mischief in GARBAGE),
    ],
)
async def test_a_fault_costs_a_round_and_no_token(mischief: Mischief, reason: FallbackReason) -> None:
    """Every way to fail gives its reason, and speculation resumes where the fault was the answer's only."""
    async with pair_of({3: mischief}) as pair:
        rounds = await pair.run()
        assert reasons(rounds)[0] is reason
        assert any(committed.draft_count for committed in rounds[-4:]) == (mischief is not Mischief.FROZEN)


async def test_a_late_draft_is_rolled_back() -> None:
    """The Rollback carries the next epoch, and the late answer of the old one is not taken for a new one."""
    async with pair_of({3: Mischief.LATE}) as pair:
        rounds = await pair.run()
        assert pair.draft.rollbacks == [2]
        assert reasons(rounds).count(FallbackReason.DRAFT_LATE) >= 1


@pytest.mark.parametrize("mischief", [Mischief.STALE_FIRST, Mischief.TWICE])
async def test_answers_of_another_time_are_dropped(mischief: Mischief) -> None:
    """Old and repeated answers change nothing and cost nothing."""
    async with pair_of({2: mischief, 4: mischief}) as pair:
        assert reasons(await pair.run()) == []


async def test_a_draft_that_forgot_the_session_gets_all_tokens() -> None:
    """TokensWanted is answered by opening again, within the same round."""
    async with pair_of({3: Mischief.FORGET}) as pair:
        assert reasons(await pair.run()) == []


async def test_a_draft_with_a_short_context_is_closed_properly() -> None:
    """Past its context the draft gets no message, and the last one is still its close."""
    async with pair_of(context_len=20) as pair:
        rounds = await pair.run()
        assert set(reasons(rounds)) == {FallbackReason.DRAFT_CONTEXT}
        assert pair.draft.closed == 1


async def test_a_draft_that_always_fails_is_asked_less_and_less() -> None:
    """After faults in a row the draft rests for longer and longer."""
    async with pair_of(dict.fromkeys(range(2, 100), Mischief.FULL)) as pair:
        rounds = await pair.run()
        assert pair.draft.answers < 8
        assert len(reasons(rounds)) >= len(rounds) - 2  # the prompt's pass and the last token want no draft


@pytest.mark.parametrize("mischief", [*GARBAGE, Mischief.UNWANTED])
async def test_a_draft_that_always_lies_is_left_alone_by_all(mischief: Mischief) -> None:
    """Its faults are counted and open the breaker, so that the requests that follow do not get the lie again."""
    async with pair_of(dict.fromkeys(range(2, 1000), mischief)) as pair:
        for _ in range(4):
            rounds = await pair.run()
        assert set(reasons(rounds)) == {FallbackReason.DRAFT_REFUSED}
        assert pair.draft_link.breaker.is_open
        assert 2 <= pair.draft_link.faults == pair.draft.answers - 1 < 8


async def test_a_draft_that_is_full_is_no_liar() -> None:
    """What it may say of a request counts against no other."""
    async with pair_of(dict.fromkeys(range(2, 1000), Mischief.FULL)) as pair:
        await pair.run()
        assert pair.draft_link.faults == 0
        assert not pair.draft_link.breaker.is_open


@pytest.mark.parametrize("cached_len", [-(2**31), -1, 2**31 - 1])
async def test_a_draft_cannot_stretch_its_own_deadline(cached_len: int) -> None:
    """What it says it has cached is what its deadline allows for; minus two thousand millions were months."""
    async with pair_of() as pair:
        right = pair.draft.right_answer

        def wrong(*asked: Any) -> draft_pb.ProposeResponse:
            answer = right(*asked)
            answer.cached_len = cached_len
            return answer

        pair.draft.right_answer = wrong  # type: ignore[method-assign]
        pair.draft.mischief, pair.deadline = {4: Mischief.LATE}, DraftDeadline(2.0, 2.0)
        pair.draft_link.breaker = CircuitBreaker(*BREAKERS["draft"], clock_s=lambda: 0.0)
        assert set(reasons(await pair.run())) == {FallbackReason.DRAFT_REFUSED}
        assert pair.draft_link.faults > 0


class Refusing(TargetServicer):
    """Takes no guesses at all, as another version might not take some; says so of a field."""

    field = "proposal"
    num_refused = 0

    def session(self) -> Taking:
        return RefusingSession(self)


class RefusingSession(MarkovSession):
    """One of its sessions."""

    async def verdict(
        self, fence: types_pb2.Fence, proposal: types_pb2.TokenTree
    ) -> AsyncIterator[target_pb.VerifyResponse]:
        if proposal.token_ids:
            assert isinstance(self.service, Refusing)
            self.service.num_refused += 1
            raise InvalidRequest(self.service.field, "16 tokens deep", "at most 15 deep here, up to max_len")
        async for response in super().verdict(fence, proposal):
            yield response


@pytest.mark.parametrize("field", ["proposal", "proposal.token_ids.3", "proposal.distributions"])
async def test_guesses_that_a_target_refuses_end_no_request(field: str) -> None:
    """It is decided without them, rounds say so, and after a few no more are sent."""
    async with pair_of() as pair:
        target = Refusing(model_pb.SERVICE_ROLE_TARGET, MarkovModel())
        target.field = field
        async with linked(target) as link:
            pair.target, pair.target_link = target, link
            rounds = await pair.run()
        assert target.num_refused == 3
        assert set(reasons(rounds)) == {FallbackReason.DRAFT_REFUSED}
        assert [committed.verdict.reopens for committed in rounds if committed.verdict.reopens] == [1] * 3
        assert not any(committed.draft_count for committed in rounds)


async def test_what_a_target_refuses_of_a_request_ends_it() -> None:
    """A field that is not about guesses is the request's."""
    async with pair_of() as pair:
        target = Refusing(model_pb.SERVICE_ROLE_TARGET, MarkovModel())
        target.field = "session.max_len"
        async with linked(target) as link:
            pair.target, pair.target_link = target, link
            with pytest.raises(InvalidRequest, match=r"session\.max_len"):
                await pair.run()


async def test_a_draft_that_is_killed_and_comes_back() -> None:
    """Without the draft rounds are plain; its next incarnation is found and given all tokens."""
    target = TargetServicer(model_pb.SERVICE_ROLE_TARGET, MarkovModel())
    first, second = (
        DraftServicer(model_pb.SERVICE_ROLE_DRAFT, MarkovModel(noise=0.3), instance_id=number) for number in (1, 2)
    )
    async with AsyncExitStack() as stack:
        target_link = await stack.enter_async_context(linked(target))
        life = await stack.enter_async_context(AsyncExitStack())
        address = await life.enter_async_context(serving(first))
        draft_link = ServicePeer("draft", address, accept)
        stack.push_async_callback(draft_link.close)
        assert await draft_link.settled(5)
        pair = Pair(target, second, target_link, draft_link, DraftSilence(second))
        rounds = []
        async with aclosing(pair.rounds()) as stream:
            async for committed in stream:
                rounds.append(committed)
                if len(rounds) == 3:
                    await life.aclose()
                if len(rounds) == 5:
                    await stack.enter_async_context(serving(second, address))
                    await eventually(lambda: draft_link.info is not None and draft_link.info.instance_id == 2)
        assert reasons(rounds)[0] in {FallbackReason.DRAFT_LOST, FallbackReason.DRAFT_ABSENT}
        assert second.answers > 0
        said = PROMPT + tuple(token for committed in rounds for token in committed.token_ids)
        assert said == plain_decoding(target.model, PROMPT, SEED, MAX_LEN)


async def test_a_target_that_forgot_the_session_gets_all_tokens() -> None:
    """The target, too, is sent everything again; tokens stay the same."""
    async with pair_of() as pair:
        pair.target.mischief = {3: Mischief.FORGET, 6: Mischief.TWICE}
        await pair.run()


async def test_a_target_that_always_forgets_is_given_up() -> None:
    """The number of tries is bounded."""
    async with pair_of() as pair:
        pair.target.mischief = dict.fromkeys(range(3, 100), Mischief.FORGET)
        with pytest.raises(PeerLost, match="lost the session"):
            await pair.run()
        assert pair.target.answers < 10


@pytest.mark.parametrize("mischief", [Mischief.LOST, Mischief.BROKEN, Mischief.FROZEN])
async def test_a_lost_target_gets_the_session_again(mischief: Mischief) -> None:
    """A target that loses the session, breaks its link or leaves a request unanswered costs no token and no request."""
    async with pair_of() as pair:
        pair.target.mischief = {4: mischief}
        if mischief is Mischief.FROZEN:
            pair.timeouts = TargetTimeouts(TargetSilence(pair.target), answer_s=0.1)
        rounds = await pair.run()
        assert [committed.verdict.reopens for committed in rounds if committed.verdict.reopens] == [1]


async def test_a_client_that_leaves_ends_both_sessions() -> None:
    """Closing the generator between two rounds, and cancelling it inside one, leave no session."""
    async with pair_of({4: Mischief.LATE}) as pair:
        async with aclosing(pair.rounds()) as rounds:
            await anext(rounds)
        await gone(pair)
        pair.deadline = DraftDeadline(30, 30)
        task = asyncio.create_task(pair.run())
        await eventually(lambda: pair.draft.answers >= 4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await gone(pair)


async def gone(pair: Pair) -> None:
    """Waits until no session is left on either service."""
    await eventually(lambda: not pair.target.sessions and not pair.draft.sessions)


async def test_a_model_that_does_not_fit_is_absent() -> None:
    """A service with another vocabulary is never asked, and the link keeps the sentence that says why."""

    def refuse(info: ModelInfo) -> None:
        """Refuses every service, for none fits."""
        raise VocabularyMismatch("different")

    async with serving(DraftServicer(model_pb.SERVICE_ROLE_DRAFT, MarkovModel())) as address:
        link = ServicePeer("draft", address, refuse)
        assert await link.settled(5)
        assert link.info is None
        with pytest.raises(VocabularyMismatch):
            link.present()
        await link.close()


async def test_a_service_of_the_other_kind_does_not_fit() -> None:
    """A target where a draft is expected is refused with a sentence that says so."""
    async with serving(TargetServicer(model_pb.SERVICE_ROLE_TARGET, MarkovModel())) as address:
        link = ServicePeer("draft", address, accept)
        assert await link.settled(5)
        assert str(link.mismatch) == f"A target service answers at {address}, but a draft service is wanted there"
        assert isinstance(link.mismatch, WrongService)
        await link.close()


@pytest.mark.parametrize(
    ("field", "wrong", "right"),
    [
        ("protocol_version", 1, PROTOCOL_VERSION),
        ("role", model_pb.SERVICE_ROLE_TARGET, model_pb.SERVICE_ROLE_DRAFT),
        ("context_len", 0, 512),
        ("model_hash", "x" * 5000, "hash"),
        ("digests", (8,), (7,)),
    ],
)
async def test_a_service_that_fits_later_is_taken_though_the_connection_stays(
    field: str, wrong: object, right: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At one address another may come; that it does not fit is said once, however often it is looked at."""
    monkeypatch.setattr("gateway.sessions.peer.MISFIT_LOOK_S", 0.01)
    draft = DraftServicer(model_pb.SERVICE_ROLE_DRAFT, MarkovModel())
    setattr(draft, field, wrong)

    def check(info: ModelInfo) -> None:
        if info.vocabulary_digests != (7,):
            raise VocabularyMismatch("different")

    with structlog.testing.capture_logs() as logged:
        async with serving(draft) as address:
            link = ServicePeer("draft", address, check)
            for _ in range(3):
                await eventually(link._settled.is_set)
                await eventually(lambda: not link._settled.is_set())
            assert Replicas([link]).state == "misfit"
            setattr(draft, field, right)
            await eventually(lambda: link.info is not None)
            assert Replicas([link]).state == "present"
            await link.close()
    assert [entry["event"] for entry in logged].count("service does not fit") == 1


async def test_a_service_of_another_version_does_not_fit() -> None:
    """Both versions are named."""
    draft = DraftServicer(model_pb.SERVICE_ROLE_DRAFT, MarkovModel(), protocol_version=1)
    async with serving(draft) as address:
        link = ServicePeer("draft", address, accept)
        assert await link.settled(5)
        assert f"speaks version 1 of the protocol, but version {PROTOCOL_VERSION} is needed" in str(link.mismatch)
        assert isinstance(link.mismatch, WrongService)
        await link.close()


class Measured(TargetServicer):
    """Says what some numbers of rows cost, among them some that cannot be."""

    num_costs = 3

    async def GetModelInfo(  # noqa: N802 - the name is the protocol's
        self, request: model_pb.GetModelInfoRequest, context: object
    ) -> model_pb.GetModelInfoResponse:
        answer = await super().GetModelInfo(request, context)
        for row_count in range(self.num_costs):
            answer.row_costs.add(row_count=row_count, compute_us=100 * row_count)
        return answer


async def test_costs_of_rows_are_taken_as_far_as_they_can_be() -> None:
    """No cost of no rows; and a service that says more of them than are of use does not fit."""
    target = Measured(model_pb.SERVICE_ROLE_TARGET, MarkovModel())
    async with serving(target) as address:
        link = ServicePeer("target", address, accept)
        assert await link.settled(5)
        assert link.present().row_costs == {1: 100, 2: 200}
        await link.close()
        target.num_costs = 65
        link = ServicePeer("target", address, accept)
        assert await link.settled(5)
        assert "it says what 65 numbers of rows cost, and 64 at most are of use" in str(link.mismatch)
        await link.close()


class Recommending(TargetServicer):
    """Recommends a temperature that no request could have."""

    async def GetModelInfo(  # noqa: N802 - the name is the protocol's
        self, request: model_pb.GetModelInfoRequest, context: object
    ) -> model_pb.GetModelInfoResponse:
        """Answer like any other, but for that."""
        answer = await super().GetModelInfo(request, context)
        answer.generation_defaults.temperature = -1
        return answer


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_a_recommendation_that_no_request_could_have_is_told_of_its_target(role: str) -> None:
    """By its field, its value and its limit, before a client could hear of it; a draft's is not used."""
    number = model_pb.SERVICE_ROLE_TARGET if role == "target" else model_pb.SERVICE_ROLE_DRAFT
    async with serving(Recommending(number, MarkovModel())) as address:
        link = ServicePeer(role, address, accept)
        assert await link.settled(5)
        sentence = "generation_defaults.temperature is -1.0, but must be greater than or equal to 0"
        assert str(link.mismatch) == (sentence if role == "target" else "None")
        await link.close()
