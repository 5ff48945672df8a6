"""The one call that carries all sessions: what shares a frame, what overtakes what, and whom a fault concerns."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import AsyncExitStack
from itertools import chain, pairwise
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.basics import eventually
from support.services.markov import EOS, NUM_TOKENS, MarkovModel, plain_decoding
from support.services.markov_services import Mischief, TargetServicer, linked

from gateway.rounds.round import LOOKUP, NOTHING, Proposal, TokenLog
from gateway.sessions.link import MAX_UNREAD, PART_TOKENS, TURN_ANSWERS
from gateway.sessions.peer import ServicePeer
from gateway.sessions.replicas import Placing, Replicas
from gateway.sessions.session import TargetTimeouts
from gateway.sessions.target import RemoteTargetSession
from outrider.errors import Overloaded, ProtocolViolation
from outrider.parameters import SamplingParameters, SessionSpec
from outrider.rpc import channels, wire
from outrider.token_tree import TokenTree
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1 import target_service_pb2 as pb
from outrider.v1 import types_pb2

PROMPT, MAX_LEN = (3, 5), 48
NUM_PARTS = 64
LONG_PROMPT = tuple(1 + number % (NUM_TOKENS - 1) for number in range(NUM_PARTS * PART_TOKENS + 7))
# With these a server takes in no more than it has read.
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1000))


def talker() -> MarkovModel:
    """The tiny model, which hardly ever comes to an end."""
    model = MarkovModel()
    for row in model._rows:
        row[EOS] = 1e-9
    return model


def target(**fields: Any) -> TargetServicer:
    """A target of that model with room for long prompts."""
    return TargetServicer(model_pb.SERVICE_ROLE_TARGET, talker(), context_len=1 << 20, block_count=1 << 16, **fields)


class Request:
    """A plain request on one target, with a seed of its own; leaving its context ends the session."""

    def __init__(self, peer: ServicePeer, seed: int, prompt: tuple[int, ...] = PROMPT) -> None:
        self.seed, self.prompt, self.max_len = seed, prompt, len(prompt) + MAX_LEN
        self.session_id = seed.to_bytes(16)
        self.log = TokenLog(prompt)
        self.reopens = 0
        spec = SessionSpec(prompt, len(prompt), SamplingParameters(), seed, self.max_len, frozenset({0}), frozenset())
        self.session = RemoteTargetSession(
            Replicas([peer]), TargetTimeouts(), spec, self.log, self.session_id, Placing("hash")
        )

    async def __aenter__(self) -> "Request":
        await self.session.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.session.__aexit__(*error)

    async def round(self, plain_budget: int = 0) -> None:
        """One plain round."""
        verdict = await self.session.verify(NOTHING, plain_budget)
        self.log.commit(NOTHING, verdict)
        self.reopens += verdict.reopens

    async def run(self) -> None:
        """All rounds, in stretches of unasked tokens, and a look at what was said."""
        while self.log.finish_reason is None:
            await self.round(plain_budget=4)
        assert self.log.tokens() == plain_decoding(talker(), self.prompt, self.seed, self.max_len)


def messages(service: TargetServicer) -> Iterator[tuple[bytes, str, int]]:
    """Session, kind and place of the frame of each message that has come to a service, in order."""
    for place, frame in enumerate(service.frames):
        for message in frame.requests:
            yield message.fence.session_id, message.WhichOneof("action"), place


def kinds(service: TargetServicer, request: Request) -> list[str]:
    """The messages of a request, in order."""
    return [kind for session_id, kind, _ in messages(service) if session_id == request.session_id]


async def test_a_link_says_something_before_there_is_a_session() -> None:
    """Once, because a service keeps no link that says nothing."""
    service = target()
    async with linked(service) as peer:
        await eventually(lambda: service.greetings == 1)
        async with Request(peer, 1) as request:
            await request.round()
        assert service.greetings == 1


async def test_what_is_said_in_one_turn_of_the_loop_leaves_in_one_frame() -> None:
    """Opens, steps and closes of eight sessions are one frame each."""
    service = target()
    async with linked(service) as peer, AsyncExitStack() as life:
        requests = [await life.enter_async_context(Request(peer, seed)) for seed in range(8)]
        for _ in range(2):
            await asyncio.gather(*(request.round() for request in requests))
        await life.aclose()
        await eventually(lambda: service.closed == 8)
        frames = [[message.WhichOneof("action") for message in frame.requests] for frame in service.frames]
        assert frames == [["open"] * 8, ["step"] * 8, ["close"] * 8]


async def test_no_frame_has_more_of_a_session_than_its_service_takes() -> None:
    """A gateway that was held up has many acknowledgements at once; they come in order, and none is refused."""
    service = target()
    async with linked(service) as peer, Request(peer, 1) as request:
        await request.round()
        for base_len in range(3, 3 + 2 * wire.MAX_OF_SESSION + 1):
            fence = types_pb2.Fence(session_id=request.session_id, epoch=1, base_len=base_len)
            peer.link().send(request.session_id, [pb.VerifyRequest(fence=fence, acknowledge=pb.Acknowledge())])
        await eventually(lambda: len(list(messages(service))) == 2 * wire.MAX_OF_SESSION + 2)
        _, *frames = ([message.fence.base_len for message in frame.requests] for frame in service.frames)
    assert [len(frame) for frame in frames] == [wire.MAX_OF_SESSION, wire.MAX_OF_SESSION, 1]
    assert [*chain.from_iterable(frames)] == [*range(3, 3 + 2 * wire.MAX_OF_SESSION + 1)]


async def test_a_target_that_may_go_on_to_the_end_is_not_told_so_again() -> None:
    """A request of 48 tokens in stretches of 15 is an open and four messages that let the target go on."""
    service = target()
    async with linked(service) as peer, Request(peer, 1) as request:
        while request.log.finish_reason is None:
            await request.round(plain_budget=15)
        assert kinds(service, request) == ["open", *["acknowledge"] * 4]


async def test_guesses_for_what_has_been_decided_are_not_sent() -> None:
    """Each would be answered with all that the target has decided since: of a gateway that lags, with more and more."""
    service = target()
    guess = Proposal(TokenTree.chain((1,)), drafter=LOOKUP)
    async with linked(service) as peer, Request(peer, 1) as request:
        await request.round(plain_budget=15)
        mailbox = peer.link()._mailboxes[request.session_id]
        await eventually(lambda: len(mailbox._unread) == 15)
        for _ in range(15):
            request.log.commit(guess, await request.session.verify(guess, 0))
        await request.run()
    assert service.halted == 0


async def test_a_large_frame_is_answered_in_parts() -> None:
    """The first sessions of a frame say what comes next before the last ones have been heard."""
    service = target()
    async with linked(service) as peer, AsyncExitStack() as life:
        requests = [await life.enter_async_context(Request(peer, seed)) for seed in range(2 * TURN_ANSWERS + 3)]

        async def two_rounds(request: Request) -> None:
            for _ in range(2):
                await request.round()

        await eventually(lambda: service.greetings == 1)
        service.reading.clear()
        rounds = asyncio.gather(*map(two_rounds, requests))
        # An answer that comes before the link knows that it has sent the frame would find it still writing.
        await eventually(lambda: peer.link()._has_left)
        service.reading.set()
        await rounds
        counts = [len(frame.requests) for frame in service.frames]
        # What comes while a frame is on its way shares the next one.
        assert counts[:2] == [len(requests), TURN_ANSWERS]
        assert sum(counts) == 2 * len(requests)


@pytest.fixture
def _small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that reads nothing is sent little."""
    options = (*channels.server_options(shares_port=False), *SMALL_WINDOW)
    monkeypatch.setattr(channels, "server_options", lambda shares_port: options)


@pytest.mark.usefixtures("_small_window")
async def test_a_step_overtakes_a_long_open() -> None:
    """A long open comes in pieces, one a frame, and what another session has to say does not wait for the last."""
    service = target()
    async with linked(service) as peer, Request(peer, 1) as short, Request(peer, 2, LONG_PROMPT) as long:
        await short.round()
        service.reading.clear()
        opening = asyncio.create_task(long.round())
        await eventually(lambda: "part" in kinds(service, long))
        stepping = asyncio.create_task(short.round())
        await asyncio.sleep(0)
        service.reading.set()
        await asyncio.gather(opening, stepping)
        assert kinds(service, long) == [*["part"] * NUM_PARTS, "open"]
        assert [kind for _, kind, _ in messages(service)].index("step") < NUM_PARTS
        for frame in service.frames:
            assert sum(message.fence.session_id == long.session_id for message in frame.requests) <= 1
        parts = [message.part for frame in service.frames for message in frame.requests if message.HasField("part")]
        assert {len(part.token_ids) for part in parts} == {PART_TOKENS}
        assert [part.start for part in parts] == list(range(0, NUM_PARTS * PART_TOKENS, PART_TOKENS))
        assert tuple(service.opens[-1].token_ids) == LONG_PROMPT
        for request in (short, long):
            assert request.log.tokens()[-1] == service.model.draw(request.log.tokens()[:-1], request.seed)


@pytest.mark.usefixtures("_small_window")
async def test_a_session_that_ends_says_no_more_of_its_open() -> None:
    """The close takes the place of all pieces that have not left; others are as before."""
    service = target()
    async with linked(service) as peer, Request(peer, 1) as short:
        await short.round()
        service.reading.clear()
        async with Request(peer, 2, LONG_PROMPT) as leaving:
            opening = asyncio.create_task(leaving.round())
            await eventually(lambda: "part" in kinds(service, leaving))
            opening.cancel()
            await asyncio.wait({opening})
        service.reading.set()
        await short.round()
        await eventually(lambda: kinds(service, leaving)[-1] == "close")
        assert 0 < kinds(service, leaving).count("part") < NUM_PARTS
        assert "open" not in kinds(service, leaving)
        assert len(service.opens) == 1
        await short.run()


async def test_answers_without_end_harm_one_session() -> None:
    """The session whose service floods it ends with a sentence; sixteen others run to the tokens of plain decoding."""
    service = target(mischief={1: Mischief.FLOOD})
    async with linked(service) as peer, AsyncExitStack() as life:
        flooded, *others = [await life.enter_async_context(Request(peer, seed)) for seed in range(17)]
        await flooded.round()
        mailbox = peer.link()._mailboxes[flooded.session_id]
        await eventually(lambda: len(mailbox._unread) == MAX_UNREAD)
        await asyncio.gather(*(request.run() for request in others))
        assert len(mailbox._unread) == MAX_UNREAD
        with pytest.raises(ProtocolViolation, match="sent 1024 answers that nobody has asked for"):
            await flooded.round()
        assert service.links == 1


async def test_a_broken_link_is_opened_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a pause; all its sessions go on there, each opened once more, to the tokens of plain decoding."""
    monkeypatch.setattr("gateway.sessions.peer.BACKOFF_S", (600.0, 600.0))
    service = target(mischief={60: Mischief.BROKEN})
    async with linked(service) as peer, AsyncExitStack() as life:
        requests = [await life.enter_async_context(Request(peer, seed)) for seed in range(16)]
        first = peer.link()
        await asyncio.gather(*(request.round() for request in requests))
        await asyncio.gather(*(request.run() for request in requests))
        assert [request.reopens for request in requests] == [1] * 16
        assert (service.links, len(service.opens)) == (2, 32)
        # What a session says late about the first one is no news.
        peer.report_lost(first)
        assert peer.info is not None


async def test_a_broken_link_keeps_nothing_of_its_sessions() -> None:
    """All raise the same end of it, which is known as long as the service is away; at most the last one is in there."""
    service = target(mischief={60: Mischief.BROKEN})
    async with linked(service) as peer:
        first = peer.link()
        async with AsyncExitStack() as life:
            requests = [await life.enter_async_context(Request(peer, seed)) for seed in range(16)]
            await asyncio.gather(*(request.run() for request in requests))
            assert [request.reopens for request in requests] == [1] * 16
            sessions = [weakref.ref(request.session) for request in requests]
        del requests
        # What ended a moment ago leaves with the tasks that carried it.
        await asyncio.sleep(0)
        gc.collect()
        assert first.end is not None
        assert sum(session() is not None for session in sessions) <= 1


class GivingUp(TargetServicer):
    """A target that ends its first link with a word of its own, when it is asked something."""

    async def Link(self, frames: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """Reads one frame."""
        if self.links:
            await super().Link(frames, context)
        else:
            self.links += 1
            await anext(frames)
            raise Overloaded("the gateway leaves its answers unread")


async def test_a_link_that_its_service_ends_is_lost_for_no_session() -> None:
    """What a service says about the link is no session's fault, so that they go on elsewhere, or here."""
    service = GivingUp(model_pb.SERVICE_ROLE_TARGET, talker())
    async with linked(service) as peer, AsyncExitStack() as life:
        requests = [await life.enter_async_context(Request(peer, seed)) for seed in range(4)]
        link = peer.link()
        await asyncio.gather(*(request.run() for request in requests))
        assert "ended the link: the gateway leaves its answers unread" in str(link.end)
        assert [request.reopens for request in requests] == [1] * 4


class Full(TargetServicer):
    """A target that takes no links until it has room."""

    has_room = False

    async def Link(self, frames: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """Refuses links until it has room."""
        if self.has_room:
            await super().Link(frames, context)
        else:
            self.links += 1
            raise Overloaded("256 gateways have a link already", limit=256)


async def test_a_link_that_always_ends_is_opened_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that is full is not asked without end, and found when it has room."""
    service = Full(model_pb.SERVICE_ROLE_TARGET, talker())
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(pause_s: float) -> None:
        if asyncio.current_task() is peer._monitor:
            pauses.append(pause_s)
        await sleep(0 if pause_s > 0.1 else pause_s)

    monkeypatch.setattr("gateway.sessions.peer.random.uniform", lambda low, high: high)
    async with linked(service) as peer, Request(peer, 1) as request:
        monkeypatch.setattr("gateway.sessions.peer.asyncio.sleep", note)
        pauses.clear()
        await eventually(lambda: len(pauses) > 6)
        assert pauses[-1] == 2.0
        assert all(later in {2.0, 2 * earlier} for earlier, later in pairwise(pauses) if earlier)
        service.has_room = True
        await request.run()


async def test_answers_to_sessions_that_have_ended_are_dropped() -> None:
    """The link keeps nothing of them, and no other session gets them."""
    service = target()
    async with linked(service) as peer, Request(peer, 1) as going:
        async with Request(peer, 2) as ended:
            await ended.round()
        await going.round()
        await eventually(lambda: service.closed == 1)
        assert service.link is not None
        fence = types_pb2.Fence(session_id=ended.session_id, epoch=1, base_len=len(PROMPT) + 1)
        for _ in range(100):
            await service.link.unsent.put(pb.VerifyResponse(fence=fence, verdict=pb.Verdict(next_token_id=1)))
        await going.run()
        assert list(peer.link()._mailboxes) == [going.session_id]
        assert service.links == 1


async def test_a_frame_of_another_incarnation_ends_the_link() -> None:
    """Its answers are not taken; after a handshake with the service that is there, the session goes on."""
    service = target()
    async with linked(service) as peer, Request(peer, 1) as request:
        await request.round()
        first = peer.link()
        service.instance_id = 2
        await request.round()
        assert "is another one than the handshake was made with" in str(first.end)
        assert (request.reopens, service.links) == (1, 2)
        assert peer.present().instance_id == 2
        await request.run()


async def test_a_gateway_that_closes_says_its_last_words() -> None:
    """Sessions that end with it are closed by a message, though no task waits for each of them."""
    service = target()
    async with linked(service) as peer, AsyncExitStack() as life:
        requests = [await life.enter_async_context(Request(peer, seed)) for seed in range(64)]
        await asyncio.gather(*(request.round() for request in requests))
        link = peer.link()
        service.reading.clear()
        await requests[0].round()
        await life.aclose()
        closing = asyncio.create_task(peer.close())
        await eventually(lambda: link._is_closing)
        assert service.closed == 0
        service.reading.set()
        await closing
        assert (service.closed, service.sessions) == (64, 0)


class Broken:
    """Stands where a mailbox stands, and takes nothing."""

    def put(self, _message: object) -> None:
        raise RuntimeError("a bug")

    def wake(self) -> None:
        """There is no listener at the address."""


@pytest.mark.slow
@pytest.mark.parametrize("side", ["reader", "writer"])
async def test_a_fault_of_this_side_ends_the_link_and_no_request(side: str) -> None:
    """The link is begun again, and the sessions on it are opened there; the log says that it was our fault."""
    async with AsyncExitStack() as life:
        peer = await life.enter_async_context(linked(target()))
        request = await life.enter_async_context(Request(peer, 1))
        with capture_logs() as logs:
            await request.round()
            before = peer.link()
            if side == "writer":
                before._outgoing.append((b"", object(), 0))  # type: ignore[arg-type]
            else:
                other = await life.enter_async_context(Request(peer, 2))
                before._mailboxes = {name: Broken() for name in (request.session_id, other.session_id)}  # type: ignore[misc]
            await request.run()
        assert request.reopens == 1
        assert peer.link() is not before
        assert "link failed" in [line["event"] for line in logs]
