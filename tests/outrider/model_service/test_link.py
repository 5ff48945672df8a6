"""The link of a gateway: many sessions in a frame, what is wrong with one, and what bounds a gateway and its end."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from llguidance import LLMatcher
from structlog.testing import capture_logs
from support.basics import PATIENCE_S, check_empty, eventually, held, spec_of
from support.models.tiny_models import SETTINGS, write_tokenizer
from support.services.session_clients import TargetClient, channel_to
from tokenizers import Tokenizer

from outrider.errors import InvalidRequest, NotReady, OutriderError, Overloaded
from outrider.grammar import Grammar, GrammarEngine, GrammarRefused
from outrider.model_service.link import MAX_UNFINISHED_FRAMES
from outrider.model_service.outbox import MAX_UNSENT
from outrider.model_service.server import LoadedModel, RunningModelService
from outrider.rpc.channels import open_link_channel
from outrider.rpc.fencing import Fence
from outrider.rpc.messages.round import logprobs_from
from outrider.rpc.wire import FRAME_BYTES, MAX_OF_SESSION
from outrider.v1 import target_service_pb2 as target_pb
from outrider.v1 import types_pb2 as pb
from target_service.server import start_with
from target_service.sessions import TargetSessions

SPECS = [spec_of((5, 17, 200, 3, 90, number), 40, seed=number, eos=(), temperature=0.5) for number in range(64)]
LONG = spec_of([number % 251 + 1 for number in range(300)], 400, eos=())


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


async def test_a_frame_tells_how_many_sessions_the_service_has(client: TargetClient, channel: grpc.aio.Channel) -> None:
    """Those of other gateways too, and none that was closed or whose link is gone."""
    other = TargetClient(channel)
    others = [other.beside() for _ in range(3)]
    await tokens_of(other, [each.opening(spec) for each, spec in zip(others, SPECS, strict=False)])
    await client.send(client.opening(SPECS[5]))
    assert (await client.link.frame()).session_count == 4
    await others[0].close(1)
    await client.send(client.stepping(1, 7))
    assert (await client.link.frame()).session_count == 3
    other.call.cancel()

    async def count() -> int:
        await client.send(client.request(client.fence(1, 7), ping=pb.Ping()))
        return int((await client.link.frame()).session_count)

    async def is_alone() -> bool:
        return await count() == 1

    await eventually(is_alone)


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
    assert 1 < num_fitting < 8
    sizes = [min(num_fitting, 15 - taken) for taken in range(0, 15, num_fitting)]
    assert [len(frame.responses) for frame in frames] == sizes
    assert all(answer == first for frame in frames for answer in frame.responses)


class Gateway:
    """The other end of a link without gRPC, in the place of its context: it reads only when a test lets it."""

    def __init__(self, service: RunningModelService) -> None:
        self.frames: asyncio.Queue[Message | None] = asyncio.Queue()
        self.num_taken = 0
        self.answers: list[Any] = []
        self.may_read = asyncio.Event()
        self.link = asyncio.ensure_future(service.servicer.Link(self._sent(), self))

    def auth_context(self) -> dict[str, list[bytes]]:
        """It shows no certificate."""
        return {}

    async def send_initial_metadata(self, metadata: Sequence[object]) -> None:
        """There is no reader that would look at it."""

    async def _sent(self) -> AsyncIterator[Message]:
        while (frame := await self.frames.get()) is not None:
            self.num_taken += 1
            yield frame

    async def write(self, frame: target_pb.TargetServiceLinkResponse) -> None:
        """Takes a frame of answers."""
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
    async with held(service):
        gateway.send(client.stepping(1, 7), client.opening(replace(SPECS[0], max_len=641)))
        gateway.frames.put_nowait(None)
        await eventually(lambda: service.worker.num_waiting == 2)
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
    # Each asks for all 256 verdicts again.
    gateway.send(*[client.stepping(1, 6)] * 15)
    await eventually(lambda: service.table.get(client.session_id) is None)
    gateway.send(other.stepping(1, 7))
    gateway.may_read.set()
    await eventually(lambda: [answer.fence for answer in gateway.answers[-1:]] == [other.fence(1, 7)])
    *verdicts, failure, others = gateway.answers
    assert [answer.fence.base_len for answer in verdicts] == [6 + number % 256 for number in range(2048)]
    assert failure.fence.session_id == client.session_id
    assert failure.error.reason == Overloaded.reason
    assert "the session has 2048 answers that its client has not taken" in failure.error.message
    assert (others.HasField("verdict"), len(service.table)) == (True, 1)
    gateway.frames.put_nowait(None)
    await gateway.end()


@pytest.mark.slow
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


async def test_a_link_says_why_it_ends_before_its_first_answers_have_left(service: RunningModelService) -> None:
    """A gateway that reads late finds them, and then what was wrong: bytes that are no frame."""
    pings = [
        target_pb.VerifyRequest(fence=pb.Fence(session_id=os.urandom(16), epoch=1, base_len=1), ping=pb.Ping())
        for _ in range(4000)
    ]
    async with open_link_channel(service.address) as channel, asyncio.timeout(PATIENCE_S):
        call = channel.stream_stream("/outrider.v1.TargetService/Link")()
        await call.write(target_pb.TargetServiceLinkRequest(requests=pings).SerializeToString())
        await call.write(b"\xff")
        num_pongs = 0
        while num_pongs < len(pings):
            num_pongs += len(target_pb.TargetServiceLinkResponse.FromString(await call.read()).responses)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


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
    """At once or at its last close, with a good status; opens are refused, and sessions that are there go on, also when
    they are opened again.
    """
    idle, busy = TargetClient(channel), TargetClient(channel)
    other, late = busy.beside(), busy.beside()
    await idle.settle()
    for each in (busy, other):
        await each.open(SPECS[0])
        await each.verdict()
    for _ in range(2):
        service.servicer.drain(PATIENCE_S)
        await idle.drain()
    await late.open(SPECS[1])
    with pytest.raises(NotReady, match="the service is stopping"):
        await late.read()
    await busy.step(1, 7)
    assert (await busy.verdict())[0] == 7
    await other.close(1)
    await busy.open(SPECS[0], epoch=2)
    await busy.verdict()
    await busy.step(2, 7)
    assert (await busy.verdict())[0] == 7
    await busy.close(2)
    await busy.drain()


class Held(GrammarEngine):
    """Compiles when it is released."""

    def __init__(self, folder: Path) -> None:
        write_tokenizer(folder, 257)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        super().__init__(self.tokenizer.to_str(), 257, {0})
        self.may_compile = threading.Event()

    def get(self, text: str, salt: bytes = b"") -> Grammar:
        """Grammar like that of every engine, later."""
        assert self.may_compile.wait(PATIENCE_S)
        return super().get(text, salt)


@pytest.fixture
async def compiling(model: LoadedModel, tmp_path: Path) -> AsyncIterator[tuple[TargetClient, Held]]:
    """A client of a service, and what compiles there."""
    grammars = Held(tmp_path)
    running = await start_with(replace(model, grammars=grammars), replace(SETTINGS, prefix_cache=False))
    async with channel_to(running.address) as opened:
        yield TargetClient(opened), grammars
        grammars.may_compile.set()
    await running.stop(0)
    check_empty(running.runner.pool)


def opening_under(client: TargetClient, grammar: str, epoch: int = 1) -> Any:
    """An open of a session that ends."""
    request = client.opening(replace(SPECS[0], eos_token_ids=frozenset({0})), epoch=epoch)
    request.open.session.grammar = grammar
    return request


async def test_an_open_with_a_new_grammar_holds_up_nobody_else(compiling: tuple[TargetClient, Held]) -> None:
    """Only what is after it in its own session waits, and comes after it."""
    client, grammars = compiling
    other, third = client.beside(), client.beside()
    text = LLMatcher.grammar_from_regex("[a-c]{30}")
    closing = third.request(third.fence(1, 1), close=pb.CloseSession())
    await client.send(opening_under(client, text), opening_under(third, text), closing, other.opening(SPECS[1]))
    first = await client.link.frame()
    assert [answer.fence.session_id for answer in first.responses] == [other.session_id]
    assert first.session_count == 1
    await client.ping(1, 6)
    assert (await client.read()).WhichOneof("answer") == "pong"
    grammars.may_compile.set()
    assert grammars.tokenizer.id_to_token((await client.verdict())[2]) in "abc"
    await client.send(other.stepping(1, 7))
    # The third one was closed, after its open.
    assert (await client.link.frame()).session_count == 2


async def test_a_grammar_that_cannot_be_compiled_refuses_its_open(compiling: tuple[TargetClient, Held]) -> None:
    """What comes after that is of another epoch, and taken."""
    client, grammars = compiling
    good = LLMatcher.grammar_from_regex("[a-c]{30}")
    await client.send(opening_under(client, "start: nothing"), opening_under(client, good, epoch=2))
    grammars.may_compile.set()
    with pytest.raises(GrammarRefused, match="unknown name"):
        await client.read()
    assert grammars.tokenizer.id_to_token((await client.verdict())[2]) in "abc"


async def test_a_session_that_is_opened_again_has_the_grammar_of_its_last_open(
    compiling: tuple[TargetClient, Held],
) -> None:
    """Nothing is left of the one before, though its tokens stay cached."""
    client, grammars = compiling
    grammars.may_compile.set()
    for epoch, letters in enumerate(("abc", "xyz", "def"), start=1):
        text = LLMatcher.grammar_from_regex(f"[{letters}]{{30}}")
        await client.send(opening_under(client, text, epoch=epoch))
        assert grammars.tokenizer.id_to_token((await client.verdict())[2]) in letters


async def test_a_bug_while_a_grammar_is_compiled_ends_its_session_alone(
    compiling: tuple[TargetClient, Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says is for the log; no caller waits for ever."""
    client, grammars = compiling
    other = client.beside()
    monkeypatch.setattr(grammars, "get", lambda *asked: dict[object, Grammar]()[asked])
    with capture_logs() as logs:
        await client.send(opening_under(client, LLMatcher.grammar_from_regex("a+")), other.opening(SPECS[1]))
        with pytest.raises(OutriderError, match="the grammar could not be compiled"):
            await client.read()
        await other.verdict()
    assert [each["event"] for each in logs if each["log_level"] == "error"] == ["a grammar failed"]


async def test_a_link_that_ends_while_a_grammar_is_compiled_leaves_nothing(
    compiling: tuple[TargetClient, Held],
) -> None:
    """Its sessions were never opened."""
    client, grammars = compiling
    other = TargetClient(client.channel)
    await client.send(opening_under(client, LLMatcher.grammar_from_regex("a+")))
    await client.ping(1, 6)
    await client.read()
    client.call.cancel()
    grammars.may_compile.set()
    await other.send(other.opening(SPECS[1]))
    assert (await other.link.frame()).session_count == 1


@pytest.mark.slow
async def test_a_sweep_that_fails_is_made_again(
    client: TargetClient, service: RunningModelService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a link leaves is freed in the end, health is red until then, and the fault is counted."""
    sweep, faults = service.table.sweep, iter([RuntimeError("a bug")] * 3)

    def failing() -> float | None:
        if fault := next(faults, None):
            raise fault
        return sweep()

    monkeypatch.setattr(service.table, "lease_s", 0.3)
    monkeypatch.setattr(service.table, "sweep", failing)
    await client.open(SPECS[0])
    await client.verdict()
    client.call.cancel()
    async with channel_to(service.address) as channel:
        health, asked = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
        status = health_pb2.HealthCheckResponse

        async def is_(wanted: int) -> bool:
            return bool((await health.Check(asked)).status == wanted)

        await eventually(lambda: is_(status.NOT_SERVING))
        await eventually(lambda: len(service.table) == 0)
        await eventually(lambda: is_(status.SERVING))
    [family] = service.servicer.upkeep.collect()
    assert [(sample.labels["work"], sample.value) for sample in family.samples] == [("sweep of leases", 3)]
