"""What bounds clients of a target service: links, and rollbacks that wait."""

import asyncio
import threading

import grpc
import pytest
from support.basics import PATIENCE_S, eventually, spec_of
from support.models.tiny_models import PROMPT, SETTINGS
from support.services.session_clients import TargetClient, channel_to

from outrider.errors import Overloaded
from outrider.model_service import link, servicer
from outrider.model_service.server import LoadedModel, RunningModelService
from target_service.server import start_with


async def block(service: RunningModelService) -> tuple["asyncio.Future[object]", threading.Event]:
    """Holds the device until the event is set; the future is done then."""
    gate, entered = threading.Event(), threading.Event()
    blocked = service.worker.call(lambda: (entered.set(), gate.wait(PATIENCE_S)))
    await asyncio.to_thread(entered.wait, PATIENCE_S)
    return blocked, gate


async def test_links_are_bounded(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many is refused by name where all have sessions, and one that ends makes room."""
    monkeypatch.setattr(link, "MAX_LINKS", 2)
    running = await start_with(model, SETTINGS)
    async with channel_to(running.address) as channel:
        clients = [TargetClient(channel) for _ in range(2)]
        for client in clients:
            await client.open(spec_of(PROMPT))
            await client.verdict()
        late = TargetClient(channel)
        with pytest.raises(Overloaded, match="2 gateways have a link already, with sessions"):
            await late.read()
        assert await late.call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await clients[0].close(1)
        await clients[0].call.done_writing()
        await clients[0].drain()
        again = TargetClient(channel)
        await again.open(spec_of(PROMPT))
        await again.verdict()
        for client in (again, clients[1]):
            await client.close(1)
    await running.stop(0)


async def test_links_without_a_session_keep_nobody_out(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they have said: the one that has been silent longest ends, and learns why; a session keeps its link,
    however long it is silent.
    """
    monkeypatch.setattr(link, "MAX_LINKS", 5)
    running = await start_with(model, SETTINGS)
    async with channel_to(running.address) as channel:
        served = TargetClient(channel)
        await served.open(spec_of(PROMPT))
        await served.verdict()
        idle = [TargetClient(channel) for _ in range(4)]
        for each in (*idle, idle[0]):
            await each.ping(1, 1)
            await each.read()
        newcomer = TargetClient(channel)
        await newcomer.open(spec_of(PROMPT))
        await newcomer.verdict()
        with pytest.raises(Overloaded, match="needs the place of this link, which is the idlest of 5"):
            await idle[1].read()
        assert await idle[1].call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        for each in (idle[0], *idle[2:]):
            await each.ping(1, 1)
            await each.read()
        for each in (served, newcomer):
            await each.close(1)
        for each in (idle[0], *idle[2:]):
            each.call.cancel()
    await running.stop(0)


async def test_a_service_full_of_idle_links_lets_a_gateway_in(model: LoadedModel) -> None:
    """As many as there may be have said one thing each, and wait."""
    running = await start_with(model, SETTINGS)
    async with channel_to(running.address) as channel:
        idle = [TargetClient(channel) for _ in range(link.MAX_LINKS)]
        for each in idle:
            await each.ping(1, 1)
        for each in idle:
            await each.read()
        newcomer = TargetClient(channel)
        await newcomer.open(spec_of(PROMPT))
        await newcomer.verdict()
        await newcomer.close(1)
        for each in idle:
            each.call.cancel()
    await running.stop(0)


async def test_links_that_say_nothing_do_not_stay(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each learns why, and they lock no gateway out; one that has said something may be idle from then on, as
    long as no other needs its place.
    """
    monkeypatch.setattr(link, "MAX_LINKS", 5)
    running = await start_with(model, SETTINGS)
    async with channel_to(running.address) as channel:
        idle = TargetClient(channel)
        await idle.ping(1, 1)
        await idle.read()
        # Not before: however slow the machine is, the others have said nothing.
        monkeypatch.setattr(link, "FIRST_FRAME_S", 0.05)
        for _ in range(3):
            silent = [TargetClient(channel) for _ in range(4)]
            for each in silent:
                with pytest.raises(link.SilentLink, match=r"nothing has come on this link for 0\.05 s"):
                    await each.link.frame()
                assert await each.call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await idle.ping(1, 1)
        await idle.read()
        idle.call.cancel()
    await running.stop(0)


async def test_rollbacks_that_wait_are_bounded(
    client: TargetClient, service: RunningModelService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that does not come round to them refuses further ones at once."""
    monkeypatch.setattr(servicer, "MAX_WAITING_JOBS", 3)
    blocked, gate = await block(service)
    waiting = [asyncio.ensure_future(client.rollback(epoch, 1)) for epoch in (1, 2, 3)]
    await eventually(lambda: service.worker.num_waiting == 3)
    with pytest.raises(Overloaded, match="3 jobs wait for the device already"):
        await client.rollback(4, 1)
    gate.set()
    await blocked
    assert [rolled.cached_len for rolled in await asyncio.gather(*waiting)] == [0, 0, 0]
