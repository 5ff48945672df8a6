"""Tests of the target service over real links: links that break, leases, and who is evicted for want of room."""

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from support.basics import check_empty, eventually, spec_of
from support.models.tiny_models import PROMPT, SETTINGS, write_tiny_model
from support.services.session_clients import TargetClient, channel_to

from outrider.errors import PromptTooLong
from outrider.model_service.server import LoadedModel, RunningModelService
from target_service.server import TargetSettings, start, start_with


@pytest.mark.parametrize("end", ["cancel", "half-close"])
async def test_a_broken_link_leaves_a_lease(
    client: TargetClient, channel: grpc.aio.Channel, service: RunningModelService, end: str
) -> None:
    """Its job stops, its cache stays, and a newer epoch on another link finds it."""
    await client.open(spec_of(PROMPT, 400, eos=()), plain_budget=200)
    tokens = list(PROMPT)
    for _ in range(3):
        tokens += [(await client.verdict())[2] or 0]
    if end == "cancel":
        client.call.cancel()
    else:
        await client.call.done_writing()
    await eventually(lambda: service.table.num_leased == 1)
    await eventually(lambda: service.worker.stalled_us == 0)
    again = TargetClient(channel, client.session_id)
    await again.open(spec_of(tokens, 400, eos=(), prompt_len=len(PROMPT)), epoch=2)
    response = await again.read()
    assert response.fence.epoch == 2
    assert service.table.num_leased == 0
    await again.close(2)
    assert len(service.table) == 0


async def test_a_lease_ends_by_itself(model: LoadedModel) -> None:
    """Its blocks come free by themselves; GetModelInfo counts it apart from evictions; more stops change nothing."""
    running = await start_with(model, replace(SETTINGS, lease_seconds=0.05))
    async with channel_to(running.address) as channel:
        client = TargetClient(channel)
        await client.open(spec_of(PROMPT))
        await client.verdict()
        client.call.cancel()
        await eventually(lambda: running.table.num_expired == 1)
        info = await TargetClient(channel).info()
        assert (info.expired_lease_count, info.evicted_session_count, info.preemption_count) == (1, 0, 0)
        assert info.stalled_us >= 0
        assert len(running.table) == 0
        check_empty(running.runner.pool)
    await asyncio.gather(running.stop(30), running.stop(0))
    await running.stop(0)


async def test_a_link_that_was_overtaken_does_no_harm(client: TargetClient, channel: grpc.aio.Channel) -> None:
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


async def test_a_full_pool_ends_no_session(tmp_path: Path) -> None:
    """What was leased is evicted first; then the sessions take turns, and only what never fits is refused."""
    folder = write_tiny_model(tmp_path / "tiny", "llama", vocab_size=257)
    running = await start(TargetSettings(str(folder), "127.0.0.1:0", dtype="float32", threads=1, kv_tokens=96))
    async with channel_to(running.address) as channel:
        leased = TargetClient(channel)
        first = TargetClient(channel)
        second, third = first.beside(), first.beside()
        await leased.open(spec_of(range(1, 48), 96, eos=()))
        await leased.verdict()
        leased.call.cancel()
        await eventually(lambda: running.table.num_leased == 1)
        await first.open(spec_of(range(61, 121), 96, eos=()))
        await first.verdict()
        assert len(running.table) == 1
        await second.open(spec_of(range(121, 181), 96, eos=()))
        for step in range(3):
            assert (await second.verdict())[0] == 60 + step
            await first.step(1, 61 + step)
            assert (await first.verdict())[0] == 61 + step
            await second.step(1, 61 + step)
        await third.open(spec_of(range(1, 61), 97, eos=()))
        with pytest.raises(PromptTooLong, match="up to 97 tokens does not fit"):
            await third.read()
        await second.verdict()
        await first.close(1)
        await second.close(1)
        assert running.runner.pool.num_free == running.runner.pool.num_blocks
    await running.stop(0)
