"""Tests of the target service over real streams: the embedded target, a server on a free port, messages one by one."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch
from helpers import PATIENCE_S, eventually, spec_of
from session_clients import TargetClient, channel_to
from tiny_models import write_tiny_model
from transformers import AutoModelForCausalLM

from outrider import wire
from outrider.errors import CacheFull, InvalidRequest, OutriderError, ProtocolViolation, Unsupported
from outrider.model_service import LoadedModel, RunningModelService, load_model
from outrider.model_service_flags import ModelServiceSettings
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1 import target_service_pb2 as target_pb
from outrider.v1 import types_pb2 as pb
from target_service.server import start, start_with

MODEL = Path(__file__).resolve().parents[2] / "models" / "target"
SETTINGS = ModelServiceSettings(str(MODEL), kv_tokens=8192)
PROMPT = (0, 401, 913, 260, 555, 12)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(SETTINGS)


@pytest.fixture
async def service(model: LoadedModel) -> AsyncIterator[RunningModelService]:
    running = await start_with(model, SETTINGS)
    yield running
    await running.stop(0)
    pool = running.runner.pool
    pool.check_integrity()
    assert pool.num_free == pool.num_blocks


@pytest.fixture
async def channel(service: RunningModelService) -> AsyncIterator[grpc.aio.Channel]:
    async with channel_to(service.address) as opened:
        yield opened


@pytest.fixture
def client(channel: grpc.aio.Channel) -> TargetClient:
    return TargetClient(channel)


async def test_greedy_tokens_are_those_of_transformers(client: TargetClient) -> None:
    """Open, steps with right and wrong proposals, and unasked verdicts spell what the reference generates."""
    reference = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    output = reference.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=24, eos_token_id=None)
    expected = output[0].tolist()
    tokens = list(PROMPT)
    await client.open(spec_of(PROMPT, len(PROMPT) + 24, eos=()))
    for number in range(24):
        base_len, rows, token = await client.verdict()
        assert base_len == len(tokens)
        tokens += expected[base_len : base_len + len(rows)] + ([token] if token is not None else [])
        if len(tokens) == len(expected):
            break
        proposal = expected[len(tokens) : len(tokens) + number % 4]
        await client.step(1, len(tokens), [*proposal, 3][: len(expected) - len(tokens)])
    assert tokens == expected
    await client.close(1)


async def test_every_answer_says_who_answers_and_what_it_cost(
    client: TargetClient, service: RunningModelService
) -> None:
    """Incarnation, numerics, cached tokens, and times that were measured."""
    await client.open(spec_of(PROMPT))
    response = await client.read()
    assert response.fence.session_id == client.session_id
    assert (response.fence.epoch, response.fence.base_len) == (1, len(PROMPT))
    assert response.fence.instance_id == service.facts.instance_id != 0
    assert response.numerics_id == service.runner.numerics_id
    assert response.cached_len == len(PROMPT)
    assert response.times.forward_count == 1
    assert response.times.compute_us > 0
    assert response.times.queue_us >= 0
    await client.close(1)


async def test_a_close_frees_at_once(client: TargetClient, service: RunningModelService) -> None:
    """When the stream has ended, the blocks are free, even if a job was running."""
    await client.open(spec_of(PROMPT, 900, eos=()), plain_budget=255)
    await client.verdict()
    await client.send(target_pb.VerifyRequest(fence=client.fence(1, 6), close=pb.CloseSession()))
    await client.drain()
    info = await client.info()
    assert (info.session_count, info.free_block_count) == (0, info.block_count)


@pytest.mark.parametrize("end", ["cancel", "half-close"])
async def test_a_broken_stream_leaves_a_lease(
    client: TargetClient, channel: grpc.aio.Channel, service: RunningModelService, end: str
) -> None:
    """Its job stops, its cache stays, and a newer epoch on another stream finds it."""
    await client.open(spec_of(PROMPT, 400, eos=()), plain_budget=200)
    tokens = list(PROMPT)
    for _ in range(3):
        tokens += [(await client.verdict())[2] or 0]
    if end == "cancel":
        client.call.cancel()
    else:
        await client.call.done_writing()
    await eventually(lambda: service.table.num_leased == 1)
    await eventually(lambda: service.worker.num_active == 0)
    again = TargetClient(channel, client.session_id)
    await again.open(spec_of(tokens, 400, eos=(), prompt_len=len(PROMPT)), epoch=2)
    response = await again.read()
    assert response.fence.epoch == 2
    assert service.table.num_leased == 0
    await again.close(2)
    assert len(service.table) == 0


async def test_a_lease_ends_by_itself(model: LoadedModel) -> None:
    """Nobody has to come for the blocks to be freed."""
    running = await start_with(model, replace(SETTINGS, lease_s=0.05))
    async with channel_to(running.address) as channel:
        client = TargetClient(channel)
        await client.open(spec_of(PROMPT))
        await client.verdict()
        client.call.cancel()
        await eventually(lambda: len(running.table) == 0)
        assert running.runner.pool.num_free == running.runner.pool.num_blocks
    await running.stop(0)


async def test_a_stream_that_was_overtaken_does_no_harm(client: TargetClient, channel: grpc.aio.Channel) -> None:
    """Its messages and its end are those of an older epoch."""
    await client.open(spec_of(PROMPT))
    await client.verdict()
    newer = TargetClient(channel, client.session_id)
    await newer.open(spec_of(PROMPT), epoch=2)
    await newer.verdict()
    await client.step(1, 7)
    await client.close(1)
    await newer.step(2, 7)
    assert (await newer.verdict())[0] == 7
    await newer.close(2)


async def test_fencing_over_the_stream(client: TargetClient) -> None:
    """Repeated steps are answered again, stale ones dropped, future ones asked about."""
    await client.open(spec_of(PROMPT, 60, eos=()), epoch=2)
    first = await client.read()
    await client.step(2, 6)
    assert await client.read() == first
    await client.step(1, 7)
    await client.step(2, 50)
    response = await client.read()
    assert (response.WhichOneof("answer"), response.tokens_wanted.known_len) == ("tokens_wanted", 7)
    await client.step(2, 7)
    assert (await client.verdict())[0] == 7
    await client.close(2)


async def test_rollback_over_the_wire(client: TargetClient, service: RunningModelService) -> None:
    """It stops the running job, says so once, and the cache is as if freshly made."""
    gate, entered = threading.Event(), threading.Event()
    await client.open(spec_of(PROMPT, 900, eos=()), plain_budget=200)
    await client.verdict()
    blocked = service.worker.call(lambda: (entered.set(), gate.wait(PATIENCE_S)))
    await asyncio.to_thread(entered.wait, PATIENCE_S)
    rolling = asyncio.ensure_future(client.rollback(2, 7))
    gate.set()
    await blocked
    rolled = await rolling
    assert (rolled.fence.epoch, rolled.fence.base_len, rolled.cached_len, rolled.job_stopped) == (2, 7, 6, True)
    again = await client.rollback(2, 7)
    assert (again.fence, again.cached_len, again.job_stopped) == (rolled.fence, 6, False)
    assert (await client.info()).stopped_job_count == 1
    await assert_like_fresh(client.session_id, service)
    await client.step(2, 7)
    while (response := await client.read()).fence.epoch == 1:
        pass
    assert response.fence.base_len == 7
    await client.close(2)


async def assert_like_fresh(session_id: bytes, service: RunningModelService) -> None:
    """A session's cache is bit for bit that of a prefill of its tokens on a service of its own."""
    held = service.table.get(session_id)
    runner = service.runner
    keys, values = await service.worker.call(lambda: runner.kv_state(held.session))
    fresh_id = os.urandom(16)
    async with channel_to(service.address) as channel:
        client = TargetClient(channel, fresh_id)
        await client.open(spec_of(held.session.token_ids[: keys.shape[1]], 1000))
        await client.verdict()
        fresh = service.table.get(fresh_id)
        fresh_keys, fresh_values = await service.worker.call(lambda: runner.kv_state(fresh.session))
        await client.close(1)
    assert torch.equal(keys, fresh_keys)
    assert torch.equal(values, fresh_values)


async def test_eight_sessions_at_once_say_what_they_say_alone(channel: grpc.aio.Channel) -> None:
    """Whoever shares a batch, at whatever point of its answer, changes nothing."""
    specs = [spec_of((*PROMPT, 20 + n), 30 + 3 * n, seed=n, eos=(), temperature=0.15 * n) for n in range(8)]

    async def tokens(number: int) -> list[int | None]:
        client = TargetClient(channel)
        await client.open(specs[number], plain_budget=100)
        found = [(await client.verdict())[2] for _ in range(specs[number].max_len - len(PROMPT) - 1)]
        await client.close(1)
        return found

    alone = [await tokens(number) for number in range(8)]
    assert await asyncio.gather(*(tokens(number) for number in range(8))) == alone


async def test_a_long_prompt_does_not_hold_up_the_others(client: TargetClient, channel: grpc.aio.Channel) -> None:
    """It is read in chunks, between which the others go on; its answer is whole."""
    other = TargetClient(channel)
    await other.open(spec_of(PROMPT, 900, eos=()), plain_budget=200)
    await client.open(spec_of([n % 4000 + 1 for n in range(900)], 1000))
    response = await client.read()
    assert (response.fence.base_len, response.cached_len) == (900, 900)
    assert response.times.forward_count >= 2
    await client.close(1)
    await other.close(1)


def fenced(session_id: bytes = bytes(16), epoch: int = 1, base_len: int = 6) -> pb.Fence:
    """A fence that fits PROMPT, unless told otherwise."""
    return pb.Fence(session_id=session_id, epoch=epoch, base_len=base_len)


def opening(fence: pb.Fence | None = None, **step: object) -> target_pb.VerifyRequest:
    """An open of PROMPT."""
    session = wire.open_message(spec_of(PROMPT), PROMPT)
    return target_pb.VerifyRequest(
        fence=fence or fenced(), open=target_pb.TargetOpen(session=session, step=target_pb.TargetStep(**step))
    )


def changed(change: Callable[[pb.OpenSession], None]) -> target_pb.VerifyRequest:
    """An open with another session message."""
    request = opening()
    change(request.open.session)
    return request


BAD_MESSAGES = {
    "session id": opening(fenced(session_id=bytes(3))),
    "epoch": opening(fenced(epoch=0)),
    "base_len 0": opening(fenced(base_len=0)),
    "base_len past the context": opening(fenced(base_len=1025)),
    "base_len not that of the tokens": opening(fenced(base_len=7)),
    "no action": target_pb.VerifyRequest(fence=fenced()),
    "step first": target_pb.VerifyRequest(fence=fenced(), step=target_pb.TargetStep()),
    "acknowledge first": target_pb.VerifyRequest(fence=fenced(), acknowledge=target_pb.Acknowledge()),
    "close first": target_pb.VerifyRequest(fence=fenced(), close=pb.CloseSession()),
    "token id": changed(lambda session: session.token_ids.__setitem__(2, 4096)),
    "max_len past the context": changed(lambda session: setattr(session, "max_len", 1025)),
    "max_len reached": changed(lambda session: setattr(session, "max_len", 6)),
    "rule": changed(lambda session: setattr(session, "rule", pb.ACCEPTANCE_RULE_BLOCK)),
    "log-probabilities": changed(lambda session: setattr(session, "logprob_count", 1)),
    "temperature": changed(lambda session: setattr(session.sampling, "temperature", -1.0)),
    "proposed token id": opening(proposal=pb.TokenTree(token_ids=[4096])),
    "parent": opening(proposal=pb.TokenTree(token_ids=[1, 2], parents=[0, 2])),
    "rows": opening(proposal=pb.TokenTree(token_ids=[1] * 33)),
    "depth": changed(lambda session: setattr(session, "max_len", 8)),
    "distributions": opening(proposal=pb.TokenTree(token_ids=[1], distributions=[pb.DraftDistribution()])),
    "plain budget": opening(plain_budget=4097),
}
BAD_MESSAGES["depth"].open.step.proposal.token_ids.extend([1, 2, 3])


@pytest.mark.parametrize("name", BAD_MESSAGES)
async def test_bad_messages_end_their_own_stream_only(
    name: str, client: TargetClient, channel: grpc.aio.Channel
) -> None:
    """INVALID_ARGUMENT with field, value and limit; a session on another stream goes on."""
    other = TargetClient(channel)
    await other.open(spec_of(PROMPT))
    await other.verdict()
    await client.send(BAD_MESSAGES[name])
    with pytest.raises((InvalidRequest, Unsupported)) as caught:
        await client.read()
    assert caught.value.metadata.keys() >= {"field"}
    assert await client.call.code() == grpc.StatusCode.INVALID_ARGUMENT
    await other.step(1, 7)
    await other.verdict()
    await other.close(1)
    assert (await other.info()).session_count == 0


async def test_one_stream_carries_one_session(client: TargetClient) -> None:
    """A message about another session ends it."""
    await client.open(spec_of(PROMPT))
    await client.verdict()
    await client.send(opening(fenced(session_id=bytes(range(16)))))
    with pytest.raises(InvalidRequest, match="session_id"):
        await client.read()


async def test_a_step_after_the_end_is_a_violation(client: TargetClient) -> None:
    """A finished request takes no more steps, though its last verdict is repeated."""
    await client.open(spec_of(PROMPT, 7))
    last = await client.read()
    assert last.verdict.finish_reason == pb.FINISH_REASON_LENGTH
    await client.step(1, 6)
    assert await client.read() == last
    await client.step(1, 7)
    with pytest.raises(ProtocolViolation):
        await client.read()


async def test_a_full_pool_fails_one_session(model: LoadedModel, tmp_path: Path) -> None:
    """The stream ends with CacheFull, the sessions beside it go on, and what was leased was evicted first."""
    folder = write_tiny_model(tmp_path / "tiny", "llama", vocab_size=257)
    running = await start(ModelServiceSettings(str(folder), dtype="float32", kv_tokens=96))
    async with channel_to(running.address) as channel:
        leased, first, second = (TargetClient(channel) for _ in range(3))
        await leased.open(spec_of(range(1, 48), 100, eos=()))
        await leased.verdict()
        leased.call.cancel()
        await eventually(lambda: running.table.num_leased == 1)
        await first.open(spec_of(range(1, 61), 100, eos=()))
        await first.verdict()
        assert len(running.table) == 1
        await second.open(spec_of(range(1, 61), 100, eos=()))
        with pytest.raises(CacheFull):
            await second.read()
        await first.step(1, 61)
        await first.verdict()
        await first.close(1)
        assert running.runner.pool.num_free == running.runner.pool.num_blocks
    await running.stop(0)


async def test_a_failing_batch_ends_its_streams_and_the_service_goes_on(
    client: TargetClient, channel: grpc.aio.Channel, service: RunningModelService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No Python text leaves, nothing stays held, and the next session is served."""

    def explode(_feeds: object) -> None:
        raise RuntimeError("secret of the device")

    with monkeypatch.context() as patch:
        patch.setattr(service.runner, "forward", explode)
        await client.open(spec_of(PROMPT))
        with pytest.raises(OutriderError) as caught:
            await client.read()
    assert "secret" not in str(caught.value)
    after = TargetClient(channel)
    await after.open(spec_of(PROMPT))
    await after.verdict()
    await after.close(1)
    assert len(service.table) == 0


async def test_model_info_describes_the_service(client: TargetClient, service: RunningModelService) -> None:
    """Everything that a gateway greets it for."""
    info = await client.info()
    assert (info.protocol_version, info.role) == (1, model_pb.SERVICE_ROLE_TARGET)
    assert (info.model_name, info.weight_dtype, info.device, info.thread_count) == ("target", "bfloat16", "cpu", 1)
    assert (info.context_len, info.vocabulary_size, len(info.vocabulary_digests)) == (1024, 4096, 4)
    assert (list(info.eos_token_ids), list(info.drafters)) == ([0], [])
    assert (info.max_draft_count, info.unacknowledged_window) == (32, 256)
    assert (info.block_size, info.block_count, info.free_block_count) == (16, 512, 512)
    assert info.parameter_count == 11_015_040
    assert info.weight_bytes == sum(p.numel() * (4 if p.ndim == 1 else 2) for p in reference_parameters())
    assert info.model_hash == service.runner.model_hash


def reference_parameters() -> list[torch.nn.Parameter]:
    """Parameters of the embedded target, as transformers counts them."""
    return list(AutoModelForCausalLM.from_pretrained(MODEL).parameters())
