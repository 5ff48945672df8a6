"""What must not go wrong while things go wrong: breakers that stay open, faults taken for others, invalid answers."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any, Self

import grpc
import pytest
from support.basics import eventually
from support.services.markov import MarkovModel, plain_decoding
from support.services.markov_services import DraftServicer, MarkovSession, Mischief, Service, TargetServicer, serving

from gateway.rounds.planner import RoundPlanner
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import NOTHING, GuessRequest, TokenLog
from gateway.sessions.draft import RemoteDraftSession
from gateway.sessions.peer import ModelInfo, ServicePeer
from gateway.sessions.replicas import Placing, Replicas
from gateway.sessions.session import DraftDeadline, RoundDeadline, TargetTimeouts
from gateway.sessions.target import RemoteTargetSession
from gateway.speculation import speculate
from outrider.errors import Overloaded, PeerLost, VocabularyMismatch
from outrider.parameters import SamplingParameters, SessionSpec
from outrider.rpc import channels
from outrider.v1 import draft_service_pb2 as draft_pb
from outrider.v1 import draft_service_pb2_grpc, model_service_pb2_grpc, target_service_pb2_grpc
from outrider.v1 import model_service_pb2 as model_pb

PROMPT, SEED, MAX_LEN = (3, 5), 9, 40
SPEC = SessionSpec(PROMPT, len(PROMPT), SamplingParameters(), SEED, MAX_LEN, frozenset({0}), frozenset())
TIMEOUTS = TargetTimeouts(RoundDeadline(0.1, 0.1), rebuild_budget_s=0.5)
GARBAGE = b"\xff\xff\xff"


class Links:
    """Services that tests start and end, and links to them."""

    async def __aenter__(self) -> Self:
        self._all = AsyncExitStack()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._all.aclose()

    async def to(
        self, service: Service, check: Callable[[ModelInfo], None] = lambda info: None
    ) -> tuple[ServicePeer, AsyncExitStack]:
        """A settled link, and the life of its service, which ends when that is closed."""
        life = await self._all.enter_async_context(AsyncExitStack())
        address = await life.enter_async_context(serving(service))
        role = "target" if isinstance(service, TargetServicer) else "draft"
        peer = ServicePeer(role, address, check)
        self._all.push_async_callback(peer.close)
        assert await peer.settled(5)
        return peer, life


def target(**fields: Any) -> TargetServicer:
    """A target of the tiny model."""
    return TargetServicer(model_pb.SERVICE_ROLE_TARGET, MarkovModel(), **fields)


def session(
    links: list[ServicePeer], log: TokenLog | None = None, timeouts: TargetTimeouts = TIMEOUTS
) -> RemoteTargetSession:
    """A session of a request of its own, unless a log is given."""
    return RemoteTargetSession(
        Replicas(links), timeouts, SPEC, log or TokenLog(PROMPT), os.urandom(16), Placing("hash")
    )


async def test_a_trial_ends_with_its_link() -> None:
    """A session that was on trial at a target and goes on at another one does not keep the first from the others."""
    async with Links() as links:
        first = target(instance_id=1, mischief={1: Mischief.BROKEN})
        (peer, _), (spare, spare_life) = await links.to(first), await links.to(target(instance_id=2))
        peer.breaker.failed(b"earlier", PeerLost("hung"))
        async with session([peer, spare]) as moved:
            await moved.verify(NOTHING, 0)
            await eventually(lambda: peer.info is not None)
            await spare_life.aclose()
            async with session([peer, spare]) as other:
                assert (await other.verify(NOTHING, 0)).next_token_id is not None


async def test_a_target_that_works_is_open_to_all() -> None:
    """While the one on trial still waits for its answer, the target is found working, and the others are let in."""
    async with Links() as links:
        slow = target(mischief={1: Mischief.FROZEN})
        peer, _ = await links.to(slow)
        peer.breaker.failed(b"earlier", PeerLost("hung"))
        timeouts = TargetTimeouts(RoundDeadline(0.3, 0.3), rebuild_budget_s=5.0, answer_s=0.5)
        async with session([peer], timeouts=timeouts) as on_trial, session([peer], timeouts=timeouts) as other:
            waiting = asyncio.create_task(on_trial.verify(NOTHING, 0))
            await eventually(lambda: slow.answers == 1)
            await other.verify(NOTHING, 0)
            assert not peer.breaker.is_open
            await waiting


async def test_the_budget_is_for_the_time_without_a_target() -> None:
    """A session that lost its link, and waited for a target that worked until it hung, has its whole budget again."""
    async with Links() as links:
        service = target(mischief={2: Mischief.BROKEN, 3: Mischief.FROZEN})
        peer, _ = await links.to(service)
        log = TokenLog(PROMPT)
        async with session([peer], log) as one:
            log.commit(NOTHING, await one.verify(NOTHING, 0))
            waiting = asyncio.create_task(one.verify(NOTHING, 0))
            await eventually(lambda: service.answers == 3)
            # Longer than the budget, which the broken link has begun.
            asyncio.get_running_loop().call_later(0.7, setattr, service, "stalled_us", 60_000_000)
            await eventually(lambda: peer.breaker.is_open)
            service.stalled_us = 0
            assert (await waiting).reopens == 2


async def test_a_target_that_leaves_a_session_unanswered_was_there_too() -> None:
    """A lost link begins the budget, and a target that works for longer without an answer ends it; the next has one."""
    async with Links() as links:
        service = target(mischief={2: Mischief.BROKEN, 3: Mischief.FROZEN, 4: Mischief.BROKEN})
        peer, _ = await links.to(service)
        log, timeouts = TokenLog(PROMPT), TargetTimeouts(RoundDeadline(0.1, 0.1), rebuild_budget_s=0.5, answer_s=0.7)
        async with session([peer], log, timeouts) as one:
            log.commit(NOTHING, await one.verify(NOTHING, 0))
            assert (await one.verify(NOTHING, 0)).reopens == 3


async def test_a_draft_that_sends_no_valid_message_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounds are plain, and the tokens are those of plain decoding."""

    def add(servicer: DraftServicer, server: grpc.aio.Server) -> None:
        handler = grpc.stream_stream_rpc_method_handler(
            servicer.Link, draft_pb.DraftServiceLinkRequest.FromString, lambda message: GARBAGE
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("outrider.v1.DraftService", {"Link": handler}),)
        )

    monkeypatch.setattr(draft_service_pb2_grpc, "add_DraftServiceServicer_to_server", add)
    async with Links() as links:
        serves = target()
        (peer, _), (draft_link, _) = (
            await links.to(serves),
            await links.to(DraftServicer(model_pb.SERVICE_ROLE_DRAFT, MarkovModel())),
        )
        log = TokenLog(PROMPT)
        draft = RemoteDraftSession(Replicas([draft_link]), DraftDeadline(), SPEC, log, os.urandom(16), warm=True)
        planner = RoundPlanner(SpeculationPolicy(), 4, MAX_LEN, max_draft_count=8)
        rounds = [committed async for committed in speculate(log, planner, session([peer], log), draft)]
        assert log.tokens() == plain_decoding(serves.model, PROMPT, SEED, MAX_LEN)
        assert {committed.draft_count for committed in rounds} == {0}


async def test_a_handshake_that_is_no_valid_message_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link says why the service does not fit, and tries again when it was away."""
    answers = [GARBAGE]

    def add(servicer: TargetServicer, server: grpc.aio.Server) -> None:
        handler = grpc.unary_unary_rpc_method_handler(
            servicer.GetModelInfo,
            model_pb.GetModelInfoRequest.FromString,
            lambda message: answers.pop() if answers else message.SerializeToString(),
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("outrider.v1.ModelService", {"GetModelInfo": handler}),)
        )

    monkeypatch.setattr(model_service_pb2_grpc, "add_ModelServiceServicer_to_server", add)
    async with Links() as links:
        peer, life = await links.to(target())
        assert "message that is not valid" in str(peer.mismatch)
        await life.aclose()
        async with serving(target(), peer.address):
            await eventually(lambda: peer.info is not None)


async def test_a_drain_lets_a_slow_round_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that takes no new calls is not taken for one that hangs: its sessions go on."""
    begun, may_end = asyncio.Event(), asyncio.Event()
    verdict = MarkovSession.verdict

    async def slow(self: MarkovSession, *arguments: Any) -> AsyncIterator[object]:
        begun.set()
        await may_end.wait()
        async for response in verdict(self, *arguments):
            yield response

    monkeypatch.setattr(MarkovSession, "verdict", slow)
    service = target()
    running = await channels.serve(
        "127.0.0.1:0",
        {
            "model": lambda server: model_service_pb2_grpc.add_ModelServiceServicer_to_server(service, server),
            "target": lambda server: target_service_pb2_grpc.add_TargetServiceServicer_to_server(service, server),
        },
    )
    peer = ServicePeer("target", running.address, lambda info: None)
    assert await peer.settled(5)

    async def takes_no_calls() -> bool:
        return await peer.probe.stalled_s(peer.link()) is None

    async with session([peer]) as slow_session:
        round_ = asyncio.create_task(slow_session.verify(NOTHING, 0))
        await begun.wait()
        stopping = asyncio.create_task(running.stop(20))
        # Several deadlines pass, each with a look at the target.
        await eventually(takes_no_calls)
        asyncio.get_running_loop().call_later(0.35, may_end.set)
        assert (await round_).reopens == 0
    await peer.close()
    await stopping


async def test_a_draft_that_refuses_is_not_lost() -> None:
    """An overloaded draft goes on serving others: neither the link nor the breaker takes its refusals for a loss."""
    async with Links() as links:
        draft = DraftServicer(model_pb.SERVICE_ROLE_DRAFT, MarkovModel())

        async def refuse(*_: object) -> AsyncIterator[object]:
            raise Overloaded("as many sessions as this service takes")
            yield

        draft.answer = refuse  # type: ignore[method-assign, assignment]
        peer, _ = await links.to(draft)
        for _ in range(3):
            one = RemoteDraftSession(
                Replicas([peer]), DraftDeadline(), SPEC, TokenLog(PROMPT), os.urandom(16), warm=False
            )
            async with one:
                assert (await one.propose(GuessRequest(count=4))).fallback_reason is not None
            assert peer.info is not None
            assert not peer.breaker.is_open


async def test_a_spare_without_room_is_not_asked() -> None:
    """A request that has begun is never refused for its length in the middle."""
    async with Links() as links:
        small = target(instance_id=2, context_len=MAX_LEN - 1)
        (peer, life), (spare, _) = await links.to(target(instance_id=1)), await links.to(small)
        async with session([peer, spare], log := TokenLog(PROMPT)) as one:
            log.commit(NOTHING, await one.verify(NOTHING, 0))
            await life.aclose()
            with pytest.raises(PeerLost, match="none has room for the 40 tokens of the request"):
                await one.verify(NOTHING, 0)
        assert small.answers == 0


async def test_a_repair_that_is_interrupted_leaves_no_session() -> None:
    """The close carries the newest epoch, though the session was opened in an older one."""
    async with Links() as links:
        service = target()
        peer, _ = await links.to(service)
        log = TokenLog(PROMPT)
        async with session([peer], log) as one:
            service.drift = 1
            log.commit(NOTHING, await one.verify(NOTHING, 0))
            service.frozen = True
            repairing = asyncio.create_task(one.verify(NOTHING, 0))
            await eventually(lambda: one._epoch == 2)
            repairing.cancel()
            await asyncio.wait({repairing})
        await eventually(lambda: service.closed == 1)
        assert service.last_closed_epoch == 2


async def test_a_rollback_that_is_refused_costs_no_request() -> None:
    """The session is opened again all the same."""
    async with Links() as links:
        service = target()
        peer, _ = await links.to(service)

        async def refuse(*_: object) -> object:
            raise Overloaded("too many jobs wait for the device")

        service.Rollback = refuse  # type: ignore[method-assign, assignment]
        log = TokenLog(PROMPT)
        async with session([peer], log) as one:
            service.drift = 1
            log.commit(NOTHING, await one.verify(NOTHING, 0))
            service.drift = 0
            verdict = await one.verify(NOTHING, 0)
            assert (verdict.reopens, verdict.drift_repairs) == (1, 1)


async def test_a_session_begins_while_the_handshake_with_its_target_is_repeated() -> None:
    """A loss that another session reports in the meantime is no reason to fail."""
    async with Links() as links:
        peer, _ = await links.to(target())
        peer.report_lost(peer.link())
        async with session([peer]) as one:
            await one.verify(NOTHING, 0)


async def test_a_misfit_ends_with_its_service() -> None:
    """When the wrong model is gone, requests wait for the right one."""
    async with Links() as links:
        fits = False

        def check(info: ModelInfo) -> None:
            if not fits:
                raise VocabularyMismatch("another vocabulary")

        peer, life = await links.to(target(), check)
        with pytest.raises(VocabularyMismatch):
            await Replicas([peer]).after_handshake(5)
        await life.aclose()
        await eventually(lambda: peer.mismatch is None)
        waiting = asyncio.create_task(Replicas([peer]).after_handshake(20))
        fits = True
        async with serving(target(instance_id=2), peer.address):
            assert (await waiting).instance_id == 2
