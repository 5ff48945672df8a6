"""A gateway that dies or is asked to stop while requests run: what its clients see, and what the services keep."""

import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc
import pytest
from faults.load import Load, said
from faults.service import KV_TOKENS, LEASE_S, MODELS, Process, launch_of
from support.basics import check_empty, eventually
from support.network import ChaosProxy
from support.stack import request_of, until_quiet

from draft_service.server import DraftSettings
from draft_service.server import start as start_draft
from outrider.errors import PeerLost
from outrider.model_service.server import RunningModelService
from outrider.rpc.channels import open_channel
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub
from target_service.server import TargetSettings
from target_service.server import start as start_target

pytestmark = pytest.mark.slow


@dataclass
class World:
    """A gateway as a process, in front of services in this one."""

    services: tuple[RunningModelService, RunningModelService]
    to_target: ChaosProxy
    gateway: Process
    channel: grpc.aio.Channel

    async def quiet(self) -> None:
        """Waits until the services hold nothing any more, and checks their pools."""
        for service in self.services:
            async with open_channel(service.address) as channel:
                await until_quiet(channel)
            await service.worker.call(lambda pool=service.runner.pool: check_empty(pool))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """The stack of a test."""
    async with AsyncExitStack() as life:
        started = []
        for role, start, kind in (("target", start_target, TargetSettings), ("draft", start_draft, DraftSettings)):
            settings = kind(MODELS[role], "127.0.0.1:0", threads=1, kv_tokens=KV_TOKENS, lease_seconds=LEASE_S)
            started.append(await start(settings))
            life.push_async_callback(started[-1].stop, 0)
        target, draft = started
        proxy = await life.enter_async_context(ChaosProxy(target.address))
        flags = {"target": proxy.address, "draft": draft.address, "tokenizer": MODELS["target"]}
        gateway = await life.enter_async_context(Process(launch_of("gateway", **flags)))
        channel = await life.enter_async_context(open_channel(gateway.address))
        yield World((target, draft), proxy, gateway, channel)


async def test_killed_under_load(world: World) -> None:
    """Every client learns that its request is lost, and both services free everything when the leases end."""
    async with Load(world.channel) as load:
        await load.begun()
        await world.gateway.kill()
        ends = await load.ended()
    assert all(isinstance(end, PeerLost) for end in ends)
    await world.quiet()


async def test_drained_under_load(world: World) -> None:
    """Requests that run say the same as ever, those that come are turned away UNAVAILABLE, and the exit code is 0."""
    reference = await said(world.channel)
    stub = GenerationServiceStub(world.channel)

    async def is_refused() -> bool:
        """Whether a call is turned away; one that arrives in the very instant of the end is cancelled by gRPC itself.

        The request is a wrong one, because a right one might still be let in and would wait with the others.
        """
        call = stub.Generate(request_of(text=""))
        return await call.code() is grpc.StatusCode.UNAVAILABLE

    async with Load(world.channel) as load:
        await load.begun()
        world.to_target.timeout()
        world.gateway.signal(signal.SIGTERM)
        await eventually(is_refused)
        world.to_target.heal()
        assert await load.token_ids() == reference
        assert await world.gateway.ended() == 0
    await world.quiet()
