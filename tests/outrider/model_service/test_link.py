"""The link of a gateway: many sessions in a frame, what is wrong with one, and what bounds a gateway and its end."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from structlog.testing import capture_logs
from support.basics import PATIENCE_S, check_empty, eventually, held, spec_of
from support.session_clients import TargetClient, channel_to
from support.tiny_models import SETTINGS, write_tiny_model

from outrider.errors import InvalidRequest, NotReady, OutriderError, Overloaded
from outrider.model_service.link import FRAME_BYTES, MAX_OF_SESSION, MAX_PART_TOKENS, MAX_UNFINISHED_FRAMES, OpenParts
from outrider.model_service.server import LoadedModel, RunningModelService, load_model
from outrider.model_service.session_store import (
    MAX_UNSENT,
    MAX_UNSENT_OF_SESSION,
    Outbox,
    Outboxes,
    SessionAnswer,
)
from outrider.rpc.fencing import ComputeTimes, Fence
from outrider.rpc.messages import logprobs_from
from outrider.v1 import target_service_pb2 as target_pb
from outrider.v1 import types_pb2 as pb
from target_service.server import start_with
from target_service.sessions import TargetSessions

SPECS = [spec_of((5, 17, 200, 3, 90, number), 40, seed=number, eos=(), temperature=0.5) for number in range(64)]
LONG = spec_of([number % 251 + 1 for number in range(300)], 400, eos=())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny") / "m", "llama", vocab_size=257, context_len=640)
    return load_model(replace(SETTINGS, model=str(folder), dtype="float32"))


@pytest.fixture
async def service(model: LoadedModel) -> AsyncIterator[RunningModelService]:
    running = await start_with(model, SETTINGS)
    yield running
    await running.stop(0)
    check_empty(running.runner.pool)


@pytest.fixture
async def channel(service: RunningModelService) -> AsyncIterator[grpc.aio.Channel]:
    async with channel_to(service.address) as opened:
        yield opened


@pytest.fixture
def client(channel: grpc.aio.Channel) -> TargetClient:
    return TargetClient(channel)


async def tokens_of(client: TargetClient, requests: Sequence[Message]) -> dict[bytes, int]:
    """Sends a frame and reads the next one: the token of each session in the order of the answers."""
    await client.send(*requests)
    return {answer.fence.session_id: answer.verdict.next_token_id for answer in (await client.link.frame()).responses}


async def test_the_answers_of_a_step_leave_in_one_frame(client: TargetClient) -> None:
    """Opens and then steps of 64 sessions: each frame is answered by one, in which each says what it says alone."""
    alone = []
    for spec in SPECS:
        single = client.beside()
        await single.open(spec)
        first = (await single.verdict())[2]
        await single.step(1, 7)
        alone.append((first, (await single.verdict())[2]))
        await single.close(1)
    clients = [client.beside() for _ in SPECS]
    firsts = await tokens_of(client, [each.opening(spec) for each, spec in zip(clients, SPECS, strict=True)])
    seconds = await tokens_of(client, [each.stepping(1, 7) for each in clients])
    assert list(firsts) == list(seconds) == [each.session_id for each in clients]
    assert list(zip(firsts.values(), seconds.values(), strict=True)) == alone


def _with_fence(client: TargetClient, **fields: Any) -> target_pb.VerifyRequest:
    fence = client.fence(1, 7)
    for name, value in fields.items():
        setattr(fence, name, value)
    return client.request(fence, step=target_pb.TargetStep())


BAD_MESSAGES: dict[str, tuple[Callable[[TargetClient], Message], bool]] = {
    "session id": (lambda client: _with_fence(client, session_id=b"short"), False),
    "epoch": (lambda client: _with_fence(client, epoch=0), False),
    "base_len": (lambda client: _with_fence(client, base_len=641), True),
    "no action": (lambda client: client.request(client.fence(1, 7)), True),
    "field": (
        lambda client: client.request(client.fence(1, 7), step=target_pb.TargetStep(plain_budget=-1)),
        True,
    ),
    "open": (lambda client: client.opening(replace(SPECS[0], max_len=641), epoch=2), True),
    "proposal": (
        lambda client: client.request(
            client.fence(1, 7), step=target_pb.TargetStep(proposal=pb.TokenTree(token_ids=[1, 2], parents=[0, 2]))
        ),
        True,
    ),
    "proposal too deep": (lambda client: client.stepping(1, 7, [1] * 32, 0), True),
    "part": (
        lambda client: client.request(client.fence(2, 7), part=pb.OpenPart(token_ids=[1] * 7)),
        True,
    ),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
async def test_a_bad_message_among_good_ones_harms_no_other_session(
    name: str, client: TargetClient, service: RunningModelService
) -> None:
    """It ends the session that it names, if there is one and the epoch is not over; 64 others say what they would."""
    bad_request, ends_session = BAD_MESSAGES[name]
    clients, bad = [client.beside() for _ in SPECS], client.beside()
    openings = [each.opening(spec) for each, spec in zip(clients, SPECS, strict=True)]
    expected = list((await tokens_of(client, openings)).values())
    await bad.open(replace(SPECS[0], max_len=20))
    await bad.verdict()
    await client.settle(*[each.request(each.fence(1, 1), close=pb.CloseSession()) for each in clients])
    request = bad_request(bad)
    await client.send(*openings[:32], request, *openings[32:])
    tokens = [(await each.verdict())[2] for each in clients]
    assert tokens == expected
    error = await client.link.read(request.fence.session_id)
    assert error.fence == request.fence
    assert error.error.reason == InvalidRequest.reason
    assert (service.table.get(bad.session_id) is None) == ends_session
    seconds = await tokens_of(client, [each.stepping(1, 7) for each in clients])
    assert len(seconds) == 64


async def test_a_bug_ends_the_session_whose_message_met_it(
    client: TargetClient, service: RunningModelService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says is logged and not sent; the messages beside it in the frame are taken."""
    step, other = TargetSessions.step, client.beside()

    def explode(sessions: TargetSessions, fence: Fence, *arguments: Any) -> None:
        if fence.session_id == client.session_id:
            raise KeyError("secret of the session")
        step(sessions, fence, *arguments)

    monkeypatch.setattr(TargetSessions, "step", explode)
    for each in (client, other):
        await each.open(SPECS[0])
        await each.verdict()
    with capture_logs() as logs:
        await client.send(client.stepping(1, 7), other.stepping(1, 7))
        with pytest.raises(OutriderError, match="the message could not be taken"):
            await client.read()
    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["a message failed"]
    assert (await other.verdict())[0] == 7
    assert service.table.get(client.session_id) is None


async def test_messages_of_one_session_in_a_frame_are_bounded(client: TargetClient) -> None:
    """As many as are allowed are answered; one more ends the session, and the others of the frame are served."""
    other, ping = client.beside(), client.request(client.fence(1, 7), ping=pb.Ping())
    for each in (client, other):
        await each.open(SPECS[0])
        await each.verdict()
    for num_pings in (MAX_OF_SESSION, MAX_OF_SESSION + 1):
        await client.send(*[ping] * num_pings)
        for _ in range(MAX_OF_SESSION):
            assert (await client.read()).HasField("pong")
    with pytest.raises(Overloaded, match="a frame has more than 16 messages of one session"):
        await client.read()
    assert (await client.info()).session_count == 1
    await other.step(1, 7)
    assert (await other.verdict())[0] == 7


async def test_large_answers_do_not_share_a_frame(client: TargetClient) -> None:
    """What is ready at one time leaves in as few frames as their size allows, in order and whole."""
    spec = replace(spec_of(LONG.token_ids, 400, eos=()), logprob_count=20, prompt_logprobs=True)
    await client.open(spec)
    first = await client.read()
    assert len(logprobs_from(first.verdict.prompt_logprobs)) == 299
    await client.send(*[client.stepping(1, 300)] * 15)
    frames = list[Any]()
    while sum(len(frame.responses) for frame in frames) < 15:
        frames.append(await client.link.frame())
    num_fitting = FRAME_BYTES // first.ByteSize()
    assert 1 < num_fitting < 15
    assert [len(frame.responses) for frame in frames[:-1]] == [num_fitting] * (len(frames) - 1)
    assert all(answer == first for frame in frames for answer in frame.responses)


class Gateway:
    """The other end of a link without gRPC, in the place of its context: it reads only when a test lets it."""

    def __init__(self, service: RunningModelService) -> None:
        self.frames: asyncio.Queue[Message | None] = asyncio.Queue()
        self.num_taken = 0
        self.answers: list[Any] = []
        self.may_read = asyncio.Event()
        self.link = asyncio.ensure_future(service.servicer.Link(self._sent(), self))

    async def _sent(self) -> AsyncIterator[Message]:
        while (frame := await self.frames.get()) is not None:
            self.num_taken += 1
            yield frame

    async def write(self, frame: target_pb.TargetServiceLinkResponse) -> None:
        """Takes a frame."""
        await self.may_read.wait()
        self.answers += frame.responses

    def send(self, *requests: Message) -> None:
        """Sends messages in one frame."""
        self.frames.put_nowait(target_pb.TargetServiceLinkRequest(requests=requests))

    async def end(self) -> None:
        """Waits for the end of the link; raises what ended it."""
        await asyncio.wait_for(self.link, PATIENCE_S)


async def test_what_a_message_says_at_once_comes_before_the_end(
    client: TargetClient, service: RunningModelService
) -> None:
    """A gateway that has sent its last frame still gets the answers to it that take no forward."""
    gateway = Gateway(service)
    gateway.may_read.set()
    gateway.send(client.stepping(1, 7), client.opening(replace(SPECS[0], max_len=641)))
    gateway.frames.put_nowait(None)
    await gateway.end()
    assert [answer.WhichOneof("answer") for answer in gateway.answers] == ["tokens_wanted", "error"]


async def test_a_session_whose_answers_pile_up_ends_and_the_link_goes_on(
    client: TargetClient, service: RunningModelService
) -> None:
    """It gets as many as it may have, and then the error; another session of a gateway that reads again is served."""
    gateway, other = Gateway(service), client.beside()
    gateway.may_read.set()
    gateway.send(client.opening(spec_of(SPECS[0].token_ids, 400, eos=()), plain_budget=255), other.opening(SPECS[1]))
    await eventually(lambda: len(gateway.answers) == 257)
    gateway.may_read.clear()
    gateway.answers.clear()
    for _ in range(2):
        # The writer waits with the first answer, and those behind it pile up.
        gateway.send(other.stepping(1, 6), *[client.stepping(1, 6)] * 15)
    await eventually(lambda: service.table.get(client.session_id) is None)
    gateway.send(other.stepping(1, 7))
    gateway.may_read.set()
    await eventually(lambda: any(answer.fence.base_len == 7 for answer in gateway.answers[-1:]))
    assert (gateway.answers[-1].fence.session_id, len(service.table)) == (other.session_id, 1)
    own = [answer for answer in gateway.answers if answer.fence.session_id == client.session_id]
    assert {answer.WhichOneof("answer") for answer in own[:MAX_UNSENT_OF_SESSION]} == {"verdict"}
    errors = [answer.error for answer in own if answer.HasField("error")]
    assert [error.reason for error in errors] == [Overloaded.reason]
    assert f"the session has {MAX_UNSENT_OF_SESSION} answers that its client has not taken" in errors[0].message
    gateway.frames.put_nowait(None)
    await gateway.end()


async def test_a_gateway_that_does_not_read_is_given_up(client: TargetClient, service: RunningModelService) -> None:
    """Even while the write to it is blocked for ever: its link ends with the reason, its sessions are on leases."""
    gateway = Gateway(service)
    gateway.send(*[each.opening(spec) for each, spec in zip((client, client.beside()), SPECS, strict=False)])
    await eventually(lambda: service.worker.call(lambda: [len(each.verdicts) for each in service.table] == [1, 1]))
    ids = (pb.Fence(session_id=os.urandom(16), epoch=1, base_len=1) for _ in range(MAX_UNSENT + 1))
    gateway.send(*[target_pb.VerifyRequest(fence=fence, ping=pb.Ping()) for fence in ids])
    with pytest.raises(Overloaded, match=f"the client has left {MAX_UNSENT} answers of this link unread"):
        await gateway.end()
    assert (gateway.answers, len(service.table), service.table.num_leased) == ([], 2, 2)
    await client.open(SPECS[0], epoch=2)
    assert (await client.verdict())[0] == 6
    assert service.table.num_leased == 1


async def test_a_gateway_cannot_fill_the_queue_of_the_device(service: RunningModelService) -> None:
    """No further frame is taken from a link of which so many wait for the device; it goes on with the device."""
    gateway = Gateway(service)
    gateway.may_read.set()
    async with held(service):
        for _ in range(40):
            gateway.send()
        # The reader goes on until it has to wait for the device.
        for _ in range(200):
            await asyncio.sleep(0)
        assert gateway.num_taken == MAX_UNFINISHED_FRAMES
        assert service.worker.num_waiting == MAX_UNFINISHED_FRAMES
    await eventually(lambda: gateway.num_taken == 40)
    gateway.frames.put_nowait(None)
    await gateway.end()


async def test_a_stopped_device_ends_the_link(client: TargetClient, service: RunningModelService) -> None:
    """With the sentence of the service that is stopping."""
    await service.stop(0)
    gateway = Gateway(service)
    gateway.send(client.opening(SPECS[0]))
    with pytest.raises(NotReady, match="the service is stopping"):
        await gateway.end()


async def test_an_open_in_parts_is_an_open(client: TargetClient) -> None:
    """Whatever comes between them, and if some come again: the verdict is that of the same open in one piece."""
    whole, parted = client.beside(), client.beside()
    await whole.open(LONG)
    expected = (await whole.read()).verdict
    parts = [parted.request(parted.fence(1, 300), part=_part(start, 100)) for start in (0, 100)]
    await parted.send(*parts, whole.stepping(1, 301), parts[1])
    await whole.verdict()
    await parted.open(LONG, part_len=200)
    assert (await parted.read()).verdict == expected
    await parted.part(2, 300, 0, LONG.token_ids[:100])
    await parted.part(2, 300, 0, LONG.token_ids[:250])
    await parted.open(LONG, epoch=2, part_len=250)
    again = (await parted.read()).verdict
    assert (again.next_token_id, list(again.accepted_rows)) == (expected.next_token_id, [])


def _part(start: int, length: int) -> pb.OpenPart:
    return pb.OpenPart(start=start, token_ids=LONG.token_ids[start : start + length])


@pytest.mark.parametrize(
    "before",
    [
        [],
        [_part(0, 100)],
        [_part(0, 100), _part(150, 50)],
        [_part(100, 100)],
        [_part(0, 100), _part(100, 100), _part(200, 50)],
        [_part(0, 100), _part(100, 100), pb.CloseSession()],
    ],
    ids=["none", "the last", "a gap", "the first", "too many", "closed"],
)
async def test_an_open_whose_parts_are_not_all_there_asks_for_tokens(
    client: TargetClient, before: Sequence[pb.OpenPart | pb.CloseSession]
) -> None:
    """Nothing is held then, and what came of them is forgotten."""
    for message in before:
        action = {"close": message} if isinstance(message, pb.CloseSession) else {"part": message}
        await client.send(client.request(client.fence(1, 300), **action))
    for part_len in (200, 100):
        await client.open(LONG, part_len=part_len)
        response = await client.read()
        assert (response.WhichOneof("answer"), response.tokens_wanted.known_len) == ("tokens_wanted", 0)
    assert (await client.info()).session_count == 0
    await client.open(LONG, epoch=2)
    assert (await client.verdict())[0] == 300


async def test_parts_belong_to_their_fence_and_link(client: TargetClient, channel: grpc.aio.Channel) -> None:
    """Those of another epoch, length, session or link are not those of an open."""
    await client.part(1, 300, 0, LONG.token_ids[:100])
    stranger = TargetClient(channel, client.session_id)
    for opener, spec, epoch in (
        (client.beside(), LONG, 1),
        (stranger, LONG, 1),
        (client, replace(LONG, token_ids=LONG.token_ids[:299], prompt_len=299), 1),
    ):
        await opener.open(spec, epoch=epoch, part_len=100)
        assert (await opener.read()).HasField("tokens_wanted")
    await client.part(1, 300, 0, LONG.token_ids[:100])
    await client.open(LONG, epoch=2, part_len=100)
    assert (await client.read()).HasField("tokens_wanted")
    await client.part(3, 300, 0, LONG.token_ids[:100])
    await client.open(LONG, epoch=3, part_len=100)
    assert (await client.verdict())[0] == 300


async def test_a_part_with_too_many_tokens_is_refused(client: TargetClient) -> None:
    """By field, value and limit, and the parts before it are forgotten; another open in parts goes on."""
    other = client.beside()
    for each in (client, other):
        await each.part(1, 300, 0, LONG.token_ids[:200])
    await client.part(1, 300, 200, LONG.token_ids[200:])
    message = "part.token_ids is '300 tokens', but must be fewer than base_len 300 tokens, with those before"
    with pytest.raises(InvalidRequest, match=message):
        await client.read()
    await client.open(LONG, part_len=200)
    assert (await client.read()).HasField("tokens_wanted")
    await other.open(LONG, part_len=200)
    assert (await other.verdict())[0] == 300


def test_the_tokens_of_parts_are_bounded() -> None:
    """Of all opens of a link; a session that is refused has none, and what is taken or forgotten makes room."""
    parts, length = OpenParts(), MAX_PART_TOKENS // 4
    fences = [Fence(bytes([number] * 16), 1, MAX_PART_TOKENS) for number in range(6)]
    quarter = pb.OpenPart(token_ids=range(length))
    # The first comes again, and takes no more room for it.
    for fence in (*fences[:4], fences[0]):
        parts.add(fence, quarter)
    for fence, start in ((fences[4], 0), (fences[0], length)):
        with pytest.raises(Overloaded, match=f"opens on their way have {MAX_PART_TOKENS} tokens") as caught:
            parts.add(fence, pb.OpenPart(start=start, token_ids=[1]))
        assert caught.value.metadata == {"limit": str(MAX_PART_TOKENS)}
        assert parts.take(fence) == ()
    parts.forget(fences[1].session_id)
    assert len(parts.take(fences[2])) == length
    for fence in (fences[0], fences[4], fences[5]):
        parts.add(fence, quarter)
    with pytest.raises(Overloaded):
        parts.add(fences[1], pb.OpenPart(token_ids=[1]))


async def test_a_link_that_breaks_leaves_all_its_sessions_to_the_next_one(
    client: TargetClient, channel: grpc.aio.Channel, service: RunningModelService
) -> None:
    """Their jobs stop and their leases begin; a new link takes them up, and only what is not cached is computed."""
    clients = [client.beside() for _ in range(3)]
    specs = [spec_of([number + 1, *LONG.token_ids[1:100]], 400, eos=()) for number in range(3)]
    for each, spec in zip(clients, specs, strict=True):
        await each.open(spec)
        await each.verdict()
    await clients[0].step(1, 101, plain_budget=255)
    await clients[0].verdict()
    client.call.cancel()
    await eventually(lambda: service.table.num_leased == 3)
    assert all(state.task is None for state in service.table)
    num_rows = service.runner.forward_counts.num_rows
    again = [TargetClient(channel, clients[0].session_id)]
    again += [again[0].beside(each.session_id) for each in clients[1:]]
    longer = [
        replace(spec, token_ids=(*spec.token_ids, service.table.get(each.session_id).session.token_ids[100]))
        for each, spec in zip(clients, specs, strict=True)
    ]
    await again[0].send(*[each.opening(spec, epoch=2) for each, spec in zip(again, longer, strict=True)])
    assert [(await each.verdict())[0] for each in again] == [101] * 3
    assert service.runner.forward_counts.num_rows - num_rows == 3
    assert (len(service.table), service.table.num_leased) == (3, 0)


async def test_a_draining_service_ends_each_link_when_it_has_no_session(
    channel: grpc.aio.Channel, service: RunningModelService
) -> None:
    """At once or at its last close, with a good status; opens are refused, and sessions that are open go on."""
    idle, busy = TargetClient(channel), TargetClient(channel)
    other, late = busy.beside(), busy.beside()
    await idle.settle()
    for each in (busy, other):
        await each.open(SPECS[0])
        await each.verdict()
    for _ in range(2):
        service.servicer.drain()
        await idle.drain()
    await late.open(SPECS[1])
    with pytest.raises(NotReady, match="the service is stopping"):
        await late.read()
    await busy.step(1, 7)
    assert (await busy.verdict())[0] == 7
    await other.close(1)
    await busy.step(1, 8)
    assert (await busy.verdict())[0] == 8
    await busy.close(1)
    await busy.drain()


def _answer(session_id: bytes, number: int, error: OutriderError | None = None) -> SessionAnswer[None]:
    return SessionAnswer(Fence(session_id, 1, number), None, 0, 0, ComputeTimes(), error)


async def test_answers_come_in_order_from_any_thread() -> None:
    """Those of another thread wake the loop where it rests, and none is lost between two looks."""
    outboxes = Outboxes()
    outbox: Outbox = Outbox(outboxes)

    def fill() -> None:
        for number in range(2000):
            outbox.put(_answer(bytes(16), number))
            if number % 3 == 0:
                outboxes.flush()
        outbox.end()
        outboxes.flush()

    thread = threading.Thread(target=fill)
    thread.start()
    got = list[int]()
    async with asyncio.timeout(PATIENCE_S):
        while answers := await outbox.take():
            got += [answer.fence.base_len for answer in answers]
    thread.join()
    assert got == list(range(2000))
    assert not outbox.overflow.done()


async def test_nobody_is_woken_before_the_device_rests() -> None:
    """So all of a step is taken at once; a pong does not wait, and takes with it what is there."""
    outboxes = Outboxes()
    outbox: Outbox = Outbox(outboxes)
    taking = asyncio.ensure_future(outbox.take())
    await asyncio.sleep(0)
    for number in range(5):
        outbox.put(_answer(bytes(16), number))
        await asyncio.sleep(0)
    assert not taking.done()
    outboxes.flush()
    assert [answer.fence.base_len for answer in await asyncio.wait_for(taking, PATIENCE_S)] == [0, 1, 2, 3, 4]
    taking = asyncio.ensure_future(outbox.take())
    await asyncio.sleep(0)
    outbox.pong(Fence(bytes(16), 1, 9))
    assert [answer.fence.base_len for answer in await asyncio.wait_for(taking, PATIENCE_S)] == [9]


async def test_an_outbox_is_bounded() -> None:
    """What one session or all have too much is dropped; the session is told once, the link in an error."""
    outbox: Outbox = Outbox(Outboxes())
    for number in range(MAX_UNSENT_OF_SESSION + 9):
        outbox.put(_answer(b"flooded", number))
    outbox.put(_answer(b"flooded", 0, Overloaded("why")))
    outbox.put(_answer(b"other", 0))
    assert (outbox.take_flooded(), outbox.take_flooded()) == ({b"flooded"}, set())
    answers = await outbox.take()
    assert [answer.fence.base_len for answer in answers[:-2]] == list(range(MAX_UNSENT_OF_SESSION))
    assert [answer.error is None for answer in answers[-2:]] == [False, True]
    for number in range(MAX_UNSENT + 9):
        outbox.put(_answer(number.to_bytes(16), number))
    outbox.flush()
    error = await asyncio.wait_for(outbox.overflow, PATIENCE_S)
    assert str(error) == f"the client has left {MAX_UNSENT} answers of this link unread"
    assert len(await outbox.take()) == MAX_UNSENT + 1
