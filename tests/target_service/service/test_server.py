"""Tests of the target service over real links: the embedded target, a server on a free port, messages one by one."""

import asyncio
import os
import threading

import grpc
import pytest
import torch
from support.basics import PATIENCE_S, eventually, spec_of
from support.models.engine_cases import kv_state
from support.models.tiny_models import PROMPT, TARGET
from support.services.session_clients import TargetClient, channel_to
from transformers import AutoModelForCausalLM

from outrider.errors import OutriderError
from outrider.model_service.server import RunningModelService
from outrider.v1 import model_service_pb2 as model_pb


async def test_greedy_tokens_are_those_of_transformers(client: TargetClient) -> None:
    """Open, steps with right and wrong proposals, and unasked verdicts spell what the reference generates."""
    reference = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
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
    frame = await client.link.frame()
    assert frame.instance_id == service.facts.instance_id != 0
    assert frame.numerics_id == service.runner.numerics_id
    [response] = frame.responses
    assert response.fence == client.fence(1, len(PROMPT))
    assert response.cached_len == len(PROMPT)
    assert (response.times.forward_count, response.times.row_count) == (1, len(PROMPT))
    assert response.times.compute_us > 0
    assert response.times.queue_us >= 0
    await client.close(1)


async def test_a_close_frees_at_once(client: TargetClient) -> None:
    """After it the blocks are free, even if a job was running; the link goes on."""
    await client.open(spec_of(PROMPT, 900, eos=()), plain_budget=255)
    await client.verdict()
    await client.close(1, 6)
    info = await client.info()
    assert (info.session_count, info.free_block_count, info.leased_session_count) == (0, info.block_count, 0)
    after = client.beside()
    await after.open(spec_of(PROMPT))
    await after.verdict()
    await after.close(1)


async def test_fencing_over_the_link(client: TargetClient) -> None:
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
    await eventually(lambda: service.worker.num_waiting == 1)
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
    keys, values = await service.worker.call(lambda: kv_state(runner, held.session))
    fresh_id = os.urandom(16)
    async with channel_to(service.address) as channel:
        client = TargetClient(channel, fresh_id)
        await client.open(spec_of(held.session.token_ids[: keys.shape[1]], 1000))
        await client.verdict()
        fresh = service.table.get(fresh_id)
        fresh_keys, fresh_values = await service.worker.call(lambda: kv_state(runner, fresh.session))
        await client.close(1)
    assert torch.equal(keys, fresh_keys)
    assert torch.equal(values, fresh_values)


@pytest.mark.slow
@pytest.mark.parametrize("shares_link", [False, True])
async def test_eight_sessions_at_once_say_what_they_say_alone(channel: grpc.aio.Channel, shares_link: bool) -> None:
    """A session that shares a batch, at whatever point of its answer, changes nothing; nor does who shares a link."""
    shared = TargetClient(channel)
    specs = [spec_of((*PROMPT, 20 + n), 30 + 3 * n, seed=n, eos=(), temperature=0.15 * n) for n in range(8)]

    async def tokens(number: int) -> list[int | None]:
        client = shared.beside() if shares_link else TargetClient(channel)
        await client.open(specs[number], plain_budget=100)
        found = [(await client.verdict())[2] for _ in range(specs[number].max_len - len(PROMPT) - 1)]
        await client.close(1)
        return found

    alone = [await tokens(number) for number in range(8)]
    assert await asyncio.gather(*(tokens(number) for number in range(8))) == alone


@pytest.mark.slow
async def test_a_long_prompt_does_not_hold_up_the_others(client: TargetClient) -> None:
    """It is read in chunks, between which the others go on; its answer is whole."""
    other = client.beside()
    await other.open(spec_of(PROMPT, 900, eos=()), plain_budget=200)
    await client.open(spec_of([n % 4000 + 1 for n in range(900)], 1000))
    response = await client.read()
    assert (response.fence.base_len, response.cached_len) == (900, 900)
    assert response.times.forward_count >= 2
    await client.close(1)
    await other.close(1)


@pytest.mark.slow
async def test_a_failing_step_ends_its_session_and_the_link_goes_on(
    client: TargetClient, service: RunningModelService, monkeypatch: pytest.MonkeyPatch
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
    assert len(service.table) == 0
    after = client.beside()
    await after.open(spec_of(PROMPT))
    await after.verdict()
    await after.close(1)
    assert len(service.table) == 0


async def test_model_info_describes_the_service(client: TargetClient, service: RunningModelService) -> None:
    """Everything that a gateway greets it for."""
    info = await client.info()
    assert (info.protocol_version, info.role) == (3, model_pb.SERVICE_ROLE_TARGET)
    assert (info.model_name, info.weight_dtype, info.device, info.thread_count) == ("target", "bfloat16", "cpu", 1)
    assert (info.context_len, info.vocabulary_size, len(info.vocabulary_digests)) == (4096, 4096, 4)
    assert (list(info.eos_token_ids), list(info.drafters)) == ([0], [])
    assert (info.max_draft_count, info.unacknowledged_window) == (64, 256)
    assert (info.block_size, info.block_count, info.free_block_count) == (16, 512, 512)
    assert info.parameter_count == 11_015_040
    assert info.weight_bytes == sum(p.numel() * (4 if p.ndim == 1 else 2) for p in reference_parameters())
    assert info.model_hash == service.runner.identity.model_hash


def reference_parameters() -> list[torch.nn.Parameter]:
    """Parameters of the embedded target, as transformers counts them."""
    return list(AutoModelForCausalLM.from_pretrained(TARGET).parameters())
