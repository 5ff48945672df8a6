"""Branches at the gateway: what of a draft's it hands on, what counts as the draft's fault, and a target that lies."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.services.markov import MarkovModel
from support.services.markov_services import DraftServicer, MarkovSession, Taking, TargetServicer, linked

from gateway.rounds.planner import RoundPlanner
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import BranchOutcome, GuessRequest, Round, TokenLog
from gateway.sessions import draft_move
from gateway.sessions.draft import RemoteDraftSession
from gateway.sessions.draft_opening import ALONE, DraftOpening
from gateway.sessions.peer import ServicePeer
from gateway.sessions.replicas import Placing, Replicas
from gateway.sessions.session import DraftDeadline, RoundDeadline, TargetTimeouts
from gateway.sessions.target import RemoteTargetSession
from gateway.speculation import speculate
from outrider.errors import InvalidRequest, ProtocolViolation
from outrider.parameters import SamplingParameters, SessionSpec
from outrider.v1 import draft_service_pb2 as draft_pb
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1 import target_service_pb2 as target_pb
from outrider.v1 import types_pb2

PROMPT, SESSION = (3, 5), b"0123456789abcdef"
SPEC = SessionSpec(PROMPT, 2, SamplingParameters(), 9, 40, frozenset({0}), frozenset())
RIGHT = types_pb2.Branch(accepted_count=1, next_token_id=4, token_ids=[5, 6])


@dataclass
class BranchingDraft(DraftServicer):
    """A draft that sends branches after each proposal, right in form."""

    async def GetModelInfo(  # noqa: N802
        self, request: model_pb.GetModelInfoRequest, context: object
    ) -> model_pb.GetModelInfoResponse:
        answer = await DraftServicer.GetModelInfo(self, request, context)
        answer.drafter_offers[0].makes_branches = True
        return answer

    async def answer(
        self, fence: types_pb2.Fence, token_ids: list[int], seed: int, count: int
    ) -> AsyncIterator[draft_pb.ProposeResponse]:
        async for response in super().answer(fence, token_ids, seed, count):
            yield response
            branches = types_pb2.Branches(branches=[types_pb2.Branch(next_token_id=3, token_ids=[4])])
            yield draft_pb.ProposeResponse(fence=response.fence, branches=branches, cached_len=response.cached_len)


@dataclass
class Asked:
    """An opening that has asked for two guesses and two branches, and what it has handed on."""

    opening: DraftOpening
    sent: list[draft_pb.ProposeRequest] = field(default_factory=list)
    handed: list[tuple[int, types_pb2.Branches]] = field(default_factory=list)

    def put(self, *branches: types_pb2.Branch, epoch: int = 1, base_len: int = 2) -> None:
        """Branches come."""
        fence = types_pb2.Fence(session_id=SESSION, epoch=epoch, base_len=base_len)
        self.opening.put(draft_pb.ProposeResponse(fence=fence, branches=types_pb2.Branches(branches=branches)))

    async def fault(self) -> str:
        """The fault that the reader of the next answer finds."""
        with pytest.raises(ProtocolViolation) as found:
            await self.opening.answer(types_pb2.Fence(session_id=SESSION, epoch=1, base_len=2), 0.0)
        return found.value.message


@asynccontextmanager
async def asked(kind: type[DraftServicer] = BranchingDraft, **limits: Any) -> AsyncIterator[Asked]:
    """One that has been asked."""
    async with linked(kind(model_pb.SERVICE_ROLE_DRAFT, MarkovModel())) as link:
        here = Asked(DraftOpening(link, SPEC, TokenLog(PROMPT), SESSION, ALONE))
        here.opening.send = here.sent.append  # type: ignore[method-assign, assignment]
        here.opening.on_branches = lambda base_len, branches, _: here.handed.append((base_len, branches))
        fence, wanted = types_pb2.Fence(session_id=SESSION, epoch=1, base_len=2), {"count": 2, "branch_count": 2}
        here.opening.known_len = 1
        here.opening.ask(fence, GuessRequest(**(wanted | limits)))
        yield here


async def test_branches_are_handed_on_once_and_only_where_they_were_asked_for() -> None:
    """Those of another fence, or that come again, are dropped; so are all where none were asked for."""
    async with asked() as here:
        for epoch, base_len in ((0, 2), (2, 2), (1, 1), (1, 3)):
            here.put(RIGHT, epoch=epoch, base_len=base_len)
        assert here.handed == []
        here.put(RIGHT)
        here.put(RIGHT)
        assert here.handed == [(2, types_pb2.Branches(branches=[RIGHT]))]
        assert here.opening.take_bytes() > 5 * RIGHT.ByteSize()
    async with asked(branch_count=0) as here:
        here.put(RIGHT)
        assert here.handed == []


async def test_a_draft_that_makes_no_branches_is_asked_for_none() -> None:
    """It would refuse that; another replica may have a drafter of the same name that makes some."""
    for kind, count in ((BranchingDraft, 2), (DraftServicer, 0)):
        async with asked(kind, went_on=True) as here:
            [message] = here.sent
            assert (message.advance.branch_count, message.advance.went_on) == (count, count > 0)
            here.put(RIGHT)
            assert len(here.handed) == (count > 0)


BAD = {
    "too many": [types_pb2.Branch(next_token_id=each, token_ids=[1]) for each in range(3)],
    "of one outcome": [RIGHT, RIGHT],
    "too long": [types_pb2.Branch(next_token_id=1, token_ids=[1, 1, 1])],
    "past the proposal": [types_pb2.Branch(accepted_count=3, next_token_id=1, token_ids=[1])],
    "empty": [types_pb2.Branch(next_token_id=1)],
    "outside the vocabulary": [types_pb2.Branch(next_token_id=1, token_ids=[12])],
    "after a token outside": [types_pb2.Branch(next_token_id=12, token_ids=[1])],
    "huge": [types_pb2.Branch(next_token_id=1, token_ids=[1] * 100_000)],
}


@pytest.mark.parametrize("went_on", [False, True])
@pytest.mark.parametrize("name", BAD)
async def test_branches_that_no_draft_may_send_are_its_fault(name: str, went_on: bool) -> None:
    """They reach no target, and whoever waits for the draft's next answer learns it."""
    async with asked(went_on=went_on) as here:
        here.put(*BAD[name])
        assert here.handed == []
        assert "malformed branches: branches.branches" in await here.fault()


async def test_branches_past_the_end_of_a_request_are_the_draft_s_fault() -> None:
    """A target would refuse them, and the session with them."""
    async with asked() as here:
        here.opening._spec = replace(SPEC, max_len=6)
        here.put(RIGHT)
        assert "at most 3 tokens deep here" in await here.fault()


async def test_an_answer_that_nobody_waits_for_proves_a_draft_well() -> None:
    """Where the target has gone on by itself, a session on trial would else keep all others from the draft."""
    async with asked(went_on=True) as here:
        breaker = here.opening.peer.breaker
        for _ in range(9):
            breaker.failed(SESSION, TimeoutError())
        assert breaker.is_open
        fence = types_pb2.Fence(session_id=SESSION, epoch=1, base_len=2)
        here.opening.put(draft_pb.ProposeResponse(fence=fence, proposal=types_pb2.TokenTree(), cached_len=2))
        assert not breaker.is_open
        assert here.opening.cached_len == 2


Change = Callable[[target_pb.VerifyResponse], None]


def goes_on(response: target_pb.VerifyResponse) -> None:
    """Says that it is at the next verdict, and is not."""
    response.verdict.goes_on = True


def of_branch(response: target_pb.VerifyResponse) -> None:
    """Says that its proposal is a branch's, and has none."""
    response.verdict.is_of_branch = True


def malformed(response: target_pb.VerifyResponse) -> None:
    """Has a proposal of a branch that is none."""
    response.verdict.is_of_branch = True
    response.verdict.proposal.token_ids[:] = [99]


@dataclass
class LyingTarget(TargetServicer):
    """A target that never goes on by a branch, whatever it says."""

    lie: Change = goes_on
    steps: int = 0

    def session(self) -> Taking:
        return LyingSession(self)


class LyingSession(MarkovSession):
    """A session that drops branches."""

    async def take(self, request: target_pb.VerifyRequest) -> AsyncIterator[target_pb.VerifyResponse]:
        service = self.service
        assert isinstance(service, LyingTarget)
        if request.HasField("branches"):
            return
        service.steps += 1
        async for response in super().take(request):
            service.lie(response)
            yield response


async def run(target: ServicePeer, *drafts: ServicePeer, then: Callable[[int], None] = lambda _: None) -> list[Round]:
    """A request; with drafts it asks for four guesses and two branches a round. `then` gets the number of each."""
    log, deadline = TokenLog(PROMPT), RoundDeadline(0.05, 0.05)
    verifying = RemoteTargetSession(Replicas([target]), TargetTimeouts(deadline), SPEC, log, SESSION, Placing("hash"))
    planner = RoundPlanner(SpeculationPolicy(), 4 if drafts else 0, 40, max_draft_count=8, branches=2)
    replicas, rounds = Replicas(drafts or [target]), list[Round]()
    drafting = RemoteDraftSession(replicas, DraftDeadline(), SPEC, log, SESSION, warm=False)
    drafting.on_branches = verifying.run_ahead
    async for committed in speculate(log, planner, verifying, drafting):
        rounds.append(committed)
        then(len(rounds))
    return rounds


class RefusingTarget(TargetServicer):
    """A target of another kind, which takes no branches."""

    def session(self) -> Taking:
        return RefusingSession(self)


class RefusingSession(MarkovSession):
    """One of its sessions."""

    async def take(self, request: target_pb.VerifyRequest) -> AsyncIterator[target_pb.VerifyResponse]:
        if request.HasField("branches"):
            raise InvalidRequest("branches.branches.0", "a branch", "none here")
        async for response in super().take(request):
            yield response


async def test_after_a_refusal_of_branches_none_are_asked_for() -> None:
    """The request goes on with guesses, and the draft is not asked for what would be dropped."""
    service, drafting = (
        RefusingTarget(model_pb.SERVICE_ROLE_TARGET, MarkovModel()),
        BranchingDraft(model_pb.SERVICE_ROLE_DRAFT, MarkovModel(noise=0.3)),
    )
    with capture_logs() as lines:
        async with linked(service) as target, linked(drafting) as draft:
            rounds = await run(target, draft)
            plain = await run(target)
    assert sum((each.token_ids for each in rounds), ()) == sum((each.token_ids for each in plain), ())
    [refused] = [line for line in lines if line["event"] == "guesses refused"]
    assert "branches.branches.0" in refused["reason"]
    counts = [
        request.advance.branch_count
        for frame in drafting.frames
        for request in frame.requests
        if request.HasField("advance")
    ]
    # One more may have been asked for while they were refused.
    assert sum(map(bool, counts)) <= 2 < sum(not each for each in counts)
    assert sum(each.draft_count > 0 for each in rounds) > 2


@pytest.mark.parametrize("lie", [goes_on, of_branch])
async def test_a_target_that_says_it_goes_on_and_does_not_changes_no_token(lie: Change) -> None:
    """After its deadline it is asked, and says what plain decoding says."""
    async with linked(TargetServicer(model_pb.SERVICE_ROLE_TARGET, MarkovModel())) as target:
        plain = [each.token_ids for each in await run(target)]
    service = LyingTarget(model_pb.SERVICE_ROLE_TARGET, MarkovModel(), lie=lie)
    async with (
        linked(service) as target,
        linked(BranchingDraft(model_pb.SERVICE_ROLE_DRAFT, MarkovModel(noise=0.3))) as draft,
    ):
        rounds = await run(target, draft)
    assert sum((each.token_ids for each in rounds), ()) == sum(plain, ())
    outcomes = {each.ahead.outcome for each in rounds if each.ahead is not None}
    assert BranchOutcome.MISS in outcomes
    assert BranchOutcome.HIT not in outcomes
    assert service.steps >= len(rounds)


async def test_a_session_that_is_ahead_all_the_time_still_leaves_a_draft_that_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One round begins without a branch, and the next branches are the other draft's."""
    monkeypatch.setattr(draft_move, "LOOK_S", 0.0)
    drafts = [BranchingDraft(model_pb.SERVICE_ROLE_DRAFT, MarkovModel(noise=0.3), instance_id=each) for each in (3, 4)]
    async with AsyncExitStack() as life:
        target = await life.enter_async_context(linked(LyingTarget(model_pb.SERVICE_ROLE_TARGET, MarkovModel())))
        links = [await life.enter_async_context(linked(draft)) for draft in drafts]

        def drain(number: int) -> None:
            """The first draft drains after the third round."""
            links[0].is_draining = number >= 3

        rounds, plain = await run(target, *links, then=drain), await run(target)
    assert sum((each.token_ids for each in rounds), ()) == sum((each.token_ids for each in plain), ())
    assert drafts[0].answers >= 2
    assert drafts[1].answers > 2


async def test_a_target_that_names_a_malformed_branch_is_at_fault() -> None:
    """As with any proposal that it says was its own."""
    service = LyingTarget(model_pb.SERVICE_ROLE_TARGET, MarkovModel(), lie=malformed)
    async with linked(service) as target:
        with pytest.raises(ProtocolViolation, match="malformed proposal of its own"):
            await run(target)
