"""What a gateway hears of a service's load: what it believes, for how long, and where no new session goes for it."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.basics import eventually
from support.services.markov import MarkovModel, plain_decoding
from support.services.markov_services import DraftServicer, Service, TargetServicer, linked

from gateway.rounds.round import NOTHING, FallbackReason, TokenLog
from gateway.sessions.draft import RemoteDraftSession
from gateway.sessions.peer import LOAD_S, MAX_UNASKED, SILENT_S
from gateway.sessions.placement import PlaceWish, PromptPrefix
from gateway.sessions.replicas import Need, Placing, Replicas, Targets
from gateway.sessions.session import DraftDeadline, TargetTimeouts
from gateway.sessions.target import RemoteTargetSession
from outrider.errors import PeerLost
from outrider.estimates.timing import ServiceLoad
from outrider.parameters import SamplingParameters, SessionSpec
from outrider.rpc.breaker import BREAKERS
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1 import types_pb2

PROMPT, SEED, MAX_LEN = (3, 5), 9, 40
SPEC = SessionSpec(PROMPT, len(PROMPT), SamplingParameters(), SEED, MAX_LEN, frozenset({0}), frozenset())
SAID = ServiceLoad(500, 200, 3, 40, 12, 8_100, 64, 25.5)


class InTurn:
    """A call into which several write, each when the one before has written."""

    def __init__(self, context: Any) -> None:
        self._context, self._turn = context, asyncio.Lock()

    async def write(self, frame: Any) -> None:
        """Writes a frame."""
        async with self._turn:
            await self._context.write(frame)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class Laden:
    """Lets a service say a load whenever a test wants, in a frame of its own."""

    context: Any = None
    reads_load: bool = False
    num_asked: int = 0
    session_count: int = 0

    async def Link(self, frames: AsyncIterator[Any], context: Any) -> None:  # noqa: N802
        """Any link, and whether its gateway reads loads."""
        self.context = InTurn(context)
        await super().Link(self._noted(frames), self.context)  # type: ignore[misc]

    async def _noted(self, frames: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for frame in frames:
            self.reads_load |= frame.reads_load
            self.num_asked += getattr(frame, "wants_prefixes", False)
            yield frame

    async def say(self, **fields: Any) -> None:
        """Says a load."""
        frame = self.frame([])  # type: ignore[attr-defined]
        frame.session_count = self.session_count
        said = {name: value for name, value in asdict(SAID).items() if name != "came_s"} | fields
        frame.load.CopyFrom(types_pb2.ServiceLoad(**said))
        await self.context.write(frame)


class LadenTarget(Laden, TargetServicer):
    """A target that says loads."""


class LadenDraft(Laden, DraftServicer):
    """A draft that says loads."""


def target(**fields: Any) -> LadenTarget:
    return LadenTarget(role=model_pb.SERVICE_ROLE_TARGET, model=MarkovModel(), **fields)


def draft(**fields: Any) -> LadenDraft:
    return LadenDraft(role=model_pb.SERVICE_ROLE_DRAFT, model=MarkovModel(), **fields)


async def ready(service: Laden) -> None:
    """Waits until the service has a link to say something on."""
    await eventually(lambda: service.reads_load)


class Plain:
    """A plain request to whichever target there is."""

    def __init__(self, replicas: Replicas) -> None:
        self.log = TokenLog(PROMPT)
        self.reopens = 0
        self.session = RemoteTargetSession(
            replicas, TargetTimeouts(rebuild_budget_s=0.2), SPEC, self.log, b"i" * 16, Placing("hash")
        )

    async def round(self) -> None:
        """One round."""
        verdict = await self.session.verify(NOTHING, 0)
        self.log.commit(NOTHING, verdict)
        self.reopens += verdict.reopens

    async def run(self) -> None:
        """All rounds that are left, to the tokens of plain decoding."""
        while self.log.finish_reason is None:
            await self.round()
        assert self.log.tokens() == plain_decoding(MarkovModel(), PROMPT, SEED, MAX_LEN)


@pytest.mark.parametrize("make", [target, draft])
async def test_a_load_is_known_until_it_is_old(make: Any) -> None:
    """As it was said, with the time at which it came; before the first one, and three seconds later, it is unknown."""
    service = make()
    async with linked(service) as peer:
        await ready(service)
        assert peer.load is None
        before_s = asyncio.get_running_loop().time()
        await service.say()
        await eventually(lambda: peer.load is not None)
        heard = peer.load
        assert replace(heard, came_s=0.0) == SAID
        # Figures are served by a thread.
        assert await asyncio.to_thread(lambda: peer.load) == heard
        assert before_s <= heard.came_s <= asyncio.get_running_loop().time()
        peer.said = replace(heard, came_s=heard.came_s - LOAD_S)
        assert peer.load is None
        await service.say(waiting_tokens=200)
        await eventually(lambda: peer.load is not None)
        assert peer.load.waiting_tokens == 200


LIES: dict[str, Any] = {
    "waiting_tokens": -1,
    "own_waiting_tokens": 501,
    "owner_count": 0,
    "free_blocks": 65,
    "cached_blocks": 41,
    "step_us": -1,
    "step_rows": -1,
    "prefill_us_per_token": math.nan,
    "drain_left_ms": -1,
}
MORE_LIES = [("waiting_tokens", 1 << 62), ("owner_count", 1 << 30), ("prefill_us_per_token", math.inf)]


@pytest.mark.parametrize(("name", "value"), [*LIES.items(), *MORE_LIES])
async def test_a_load_that_cannot_be_is_a_fault_and_harms_no_request(name: str, value: float) -> None:
    """It is unknown until a right one comes; sessions go on where they are, and the log says once what was wrong."""
    service = target()
    async with linked(service) as peer:
        await ready(service)
        request = Plain(Targets([peer]))
        async with request.session:
            await request.round()
            with capture_logs() as logs:
                for _ in range(2):
                    await service.say(**{name: value, "is_draining": True})
                await eventually(lambda: peer.faults == 2)
            assert [line["reason"].split()[0] for line in logs] == [f"load.{name}"]
            assert (peer.load, peer.is_draining) == (None, False)
            await request.run()
        assert (request.reopens, service.links) == (0, 1)
        await service.say()
        await eventually(lambda: peer.load is not None)


async def test_cached_prefixes_that_cannot_be_are_a_fault_and_harm_no_request() -> None:
    """The target is asked to say all again, unless it never got it right; sessions go on, and the log says it once."""
    service = target()
    async with linked(service) as peer:
        await ready(service)
        request = Plain(Targets([peer]))

        async def say(number: int, *added: int, **more: Any) -> None:
            await service.say(prefixes=types_pb2.PrefixNews(number=number, added=added, **more))

        async with request.session:
            await request.round()
            assert service.num_asked == 1
            await say(0, 1, 2)
            await eventually(lambda: peer.book.pushed.names == {1, 2})
            with capture_logs() as logs:
                await say(2, 3)
                await eventually(lambda: (peer.faults, service.num_asked) == (1, 2))
                # What it said before it knew is no fault, and a load beside it counts.
                await say(3, 4)
                await say(0, 1, has_more=True)
                await say(5)
                await eventually(lambda: peer.faults == 2)
            assert ["load.prefixes.number" in line["reason"] for line in logs] == [True]
            assert (peer.book.pushed.names, peer.load is None) == (set(), False)
            await request.run()
            assert service.num_asked == 2
            await say(0, 7)
            await eventually(lambda: peer.book.pushed.names == {7})
        assert (request.reopens, service.links) == (0, 1)


async def test_what_is_cached_is_known_of_one_incarnation() -> None:
    """Another one at the same address has none of it; a link that breaks and is begun again changes nothing yet."""
    service = target()
    async with linked(service) as peer:
        await ready(service)
        await service.say(prefixes=types_pb2.PrefixNews(added=[1, 2]))
        await eventually(lambda: peer.book.pushed.names == {1, 2})
        link = peer.link()
        peer.report_lost(link)
        await eventually(lambda: peer.info is not None)
        assert peer.book.pushed.names == {1, 2}
        service.instance_id = 2
        peer.report_lost(link)
        await eventually(lambda: peer.info is not None and peer.link() is not link)
        assert (peer.book.pushed.names, peer.book.pushed.is_known) == (set(), False)
        await eventually(lambda: service.num_asked == 2)


async def test_loads_come_unasked_and_no_more_of_them_than_there_can_be() -> None:
    """One each second is no fault of a draft, however long its link is idle; without a pause between them they are."""
    service = draft()
    async with linked(service) as peer:
        await ready(service)
        link, clock = peer.link(), [asyncio.get_running_loop().time()]
        link._clock_s = lambda: clock[0]
        most = int(MAX_UNASKED["draft"])
        for number in range(4 * most - 1):
            clock[0] += number < 3 * most
            await service.say(waiting_tokens=1000 + number)
            await eventually(lambda number=number: peer.said is not None and peer.said.waiting_tokens == 1000 + number)
        assert link.end is None
        await service.say()  # No more than this one: a write into a call that has ended fails.
        await eventually(lambda: link.end is not None)
        assert "went on answering without being asked" in str(link.end)
        await eventually(lambda: peer.faults == 1)


async def test_a_load_is_no_answer() -> None:
    """It does not show that a message has arrived, so a link that says nothing else is silent."""
    service = draft()
    async with linked(service) as peer:
        await ready(service)
        heard_s = peer.link().heard_s
        await service.say()
        await eventually(lambda: peer.load is not None)
        assert peer.link().heard_s == heard_s < peer.link().spoke_s


async def test_no_new_session_goes_to_a_target_whose_loads_have_stopped() -> None:
    """A link that has never brought one may be idle for as long as it likes. One that is known to hang is worse."""
    services = [target(), target(instance_id=2)]
    async with AsyncExitStack() as life:
        first, second = peers = [await life.enter_async_context(linked(each)) for each in services]

        def chosen() -> set[object]:
            prefixes = [PromptPrefix(bytes([number])) for number in range(64)]
            return {Targets(peers).pick(b"", wish=PlaceWish(100, prefix=each)) for each in prefixes}

        for service, peer in zip(services, peers, strict=True):
            await ready(service)
            assert not peer.is_silent
            peer.link().spoke_s -= SILENT_S
            assert chosen() == set(peers)
        for service in services:
            await service.say()
        await eventually(lambda: first.said is not None and second.said is not None)
        assert chosen() == {first, second}
        first.link().spoke_s -= SILENT_S
        assert (first.is_silent, second.is_silent) == (True, False)
        assert chosen() == {second}
        second.breaker.failed(b"", PeerLost("hung"))
        assert chosen() == {first}


async def test_a_target_that_drains_gets_no_new_session_and_keeps_those_that_go_nowhere_else() -> None:
    """The next one goes to the spare, without an open that is refused; the one that runs ends where it began, since the
    spare has other numerics.
    """
    first, spare = target(), target(instance_id=2, numerics_id="other")
    async with AsyncExitStack() as life:
        peers = [await life.enter_async_context(linked(each)) for each in (first, spare)]
        targets = Targets(peers)
        await ready(first)
        running, later = Plain(targets), Plain(targets)
        async with running.session:
            await running.round()
            await first.say(is_draining=True, drain_left_ms=5_000)
            await eventually(lambda: peers[0].is_draining)
            assert targets.left_out == [f"{peers[0]} is stopping, and takes no new requests"]
            async with later.session:
                await later.run()
            await running.run()
        assert (running.reopens, later.reopens) == (0, 0)
        assert (len(first.opens), len(spare.opens)) == (1, 1)


async def test_where_all_targets_drain_there_is_none_for_new_sessions() -> None:
    """And the reason says so, until one is there that does not: another incarnation at the same address, too."""
    service = target()
    async with linked(service) as peer:
        targets, need = Targets([peer]), Need("hash", MAX_LEN)
        await ready(service)
        assert targets.pick(b"", need) is peer
        await service.say(is_draining=True)
        await eventually(lambda: peer.is_draining)
        assert (targets.pick(b"", need), targets.info, targets.state) == (None, None, "absent")
        with pytest.raises(PeerLost, match="is stopping, and takes no new requests"):
            targets.present()
        with pytest.raises(PeerLost, match="is stopping, and takes no new requests"):
            await targets.wait(b"", need, 0.0, placing=Placing("hash"))
        service.instance_id = 2
        peer.report_lost(peer.link())
        await eventually(lambda: targets.pick(b"", need) is peer)
        assert (peer.load, targets.left_out) == (None, [])


async def test_a_draft_that_drains_is_not_asked() -> None:
    """Another one is, and without another there are no guesses."""
    services: list[Service] = [draft(), draft()]
    async with AsyncExitStack() as life:
        peers = [await life.enter_async_context(linked(each)) for each in services]
        drafts = Replicas(peers)
        for service, expected in zip(services, (peers[1], None), strict=True):
            assert isinstance(service, Laden)
            await ready(service)
            await service.say(is_draining=True)
            await eventually(lambda expected=expected: drafts.pick(b"") is expected)


async def test_a_session_goes_to_where_others_wait_less() -> None:
    """Whatever the prompt: what other gateways have waiting there is waited for, and it changes with the next load."""
    service, other = target(), target(instance_id=2)
    async with linked(service) as peer, linked(other) as idle:
        targets, wish = Targets([peer, idle]), PlaceWish(100)
        await ready(service)
        await ready(other)
        for waits, free in (((5_000, 0), idle), ((0, 5_000), peer)):
            for each, num_tokens in zip((service, other), waits, strict=True):
                await each.say(waiting_tokens=num_tokens, own_waiting_tokens=0, owner_count=2 if num_tokens else 1)
            for link, num_tokens in zip((peer, idle), waits, strict=True):
                await eventually(lambda: link.load is not None and link.load.waiting_tokens == num_tokens)  # noqa: B023
            for number in range(32):
                named = replace(wish, prefix=PromptPrefix(number.to_bytes(16)))
                assert targets.pick(b"", None, wish=named) is free


async def test_an_empty_service_holds_nothing_whatever_it_said_last() -> None:
    """Blocks of sessions that have ended since count as free; while there are some, those that it said do."""
    service = target()
    async with linked(service) as peer:
        await ready(service)
        await service.say(free_blocks=16)
        await eventually(lambda: peer.load is not None)
        empty = peer.figures(PlaceWish(100))
        assert (empty.free_tokens, empty.cache_share) == (peer.present().kv_tokens, 0.0)
        request = Plain(Replicas([peer]))
        async with request.session:
            await request.round()
            await service.say(free_blocks=16)
            await eventually(lambda: peer.figures(PlaceWish(100)).free_tokens == 16 * peer.present().block_size)


async def test_a_draft_that_drains_is_no_hope_where_the_other_one_is_on_trial() -> None:
    """No round asks then, so that no service is blamed for what nothing asked it."""
    services = [draft(), draft(instance_id=2)]
    async with AsyncExitStack() as life:
        peers = [await life.enter_async_context(linked(each)) for each in services]
        deadline, log = DraftDeadline(), TokenLog(PROMPT)
        session = RemoteDraftSession(Replicas(peers), deadline, SPEC, log, b"i" * 16, warm=False)
        for _ in range(BREAKERS["draft"][0]):
            peers[0].breaker.failed(b"earlier", PeerLost("hung"))
        peers[0].breaker.enter(b"another")
        assert session.outlook.obstacle is None
        await ready(services[1])
        await services[1].say(is_draining=True)
        await eventually(lambda: peers[1].is_draining)
        assert session.outlook.obstacle is FallbackReason.DRAFT_LOST


@pytest.mark.parametrize("block_count", [0, 64])
async def test_a_cache_without_room_is_the_last_choice_and_no_fault(block_count: int) -> None:
    """Sessions go there where there is no other place, whatever so small a cache is good for."""
    services = [draft(block_count=block_count), draft(instance_id=2)]
    async with AsyncExitStack() as life:
        peers = [await life.enter_async_context(linked(each)) for each in services]
        await ready(services[0])
        services[0].session_count = 1
        await services[0].say(free_blocks=0, cached_blocks=0)
        await eventually(lambda: peers[0].load is not None)
        assert Replicas(peers).pick(b"") is peers[1]
        assert Replicas(peers[:1]).pick(b"") is peers[0]


async def test_sessions_of_other_gateways_count_where_this_one_has_none() -> None:
    """Loads say how many there are; a link without answers is not taken for an empty service."""
    service = target()
    async with linked(service) as peer:
        await ready(service)
        service.session_count = 7
        await service.say(free_blocks=16)
        await eventually(lambda: peer.load is not None)
        known = peer.figures(PlaceWish(100))
        assert (known.session_count, known.free_tokens) == (7, 16 * peer.present().block_size)
        peer.link().spoke_s -= LOAD_S
        assert peer.figures(PlaceWish(100)).session_count == 0


async def test_a_look_is_one_choice_also_while_a_target_is_on_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all that are open are full the first of the line looks for all, however many wait."""
    services = [target(), target(instance_id=2)]
    async with AsyncExitStack() as life:
        peers = [await life.enter_async_context(linked(each)) for each in services]
        targets, looks = Targets(peers), list[object]()
        for service in services:
            await ready(service)
            service.session_count = 1
            await service.say(free_blocks=0, cached_blocks=0)
        await eventually(lambda: all(peer.load for peer in peers))
        peers[0].breaker.failed(b"hung", PeerLost("hung"))
        peers[0].breaker.enter(b"hung")
        look = targets._look
        monkeypatch.setattr(targets, "_look", lambda *asked: looks.append(asked) or look(*asked))
        need, wish = Need("hash", MAX_LEN), PlaceWish(MAX_LEN)
        waiting = [asyncio.create_task(targets.place(Placing("hash"), need, wish)) for _ in range(8)]
        await eventually(lambda: len(targets.room) == len(waiting))
        looks.clear()
        targets.room._call()
        assert len(looks) == 1
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
