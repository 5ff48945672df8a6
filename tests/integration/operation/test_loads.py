"""Loads of real services in real gateways: what waits, who owns it, and a target that drains while it is in use."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest
from support.basics import eventually
from support.stack import PATIENT, TARGET, HaltedTarget, RunningStack, running_stack

from gateway.server import RunningGateway
from gateway.server import start as start_gateway
from gateway.sessions.peer import ServicePeer
from gateway.settings import GatewaySettings
from outrider.errors import PeerLost
from target_service.server import start as start_target

LONG = [number % 4000 + 1 for number in range(700)]
ASKED = {"token_ids": LONG, "max_tokens": 24, "seed": 5, "temperature": 0.8, "draft_count": 4, "ignore_eos": True}


def target_of(gateway: RunningGateway, number: int = 0) -> ServicePeer:
    """A gateway's peer for a target."""
    return gateway.backend.target.peers[number]


@asynccontextmanager
async def another_gateway(stack: RunningStack) -> AsyncIterator[RunningGateway]:
    """A second gateway before the same services."""
    settings = GatewaySettings(
        stack.target.address, TARGET, stack.draft.address, listen="127.0.0.1:0", rest_listen="", **PATIENT
    )
    gateway = await start_gateway(settings)
    try:
        yield gateway
    finally:
        await gateway.stop(0)


async def test_gateways_hear_of_a_prompt_that_waits_and_whose_it_is() -> None:
    """Each of them, the idle one too; draft and target say both what room there is; no token is another for it."""
    async with running_stack(gateway=PATIENT) as stack, another_gateway(stack) as other:
        assert stack.gateway is not None
        plain = await stack.generate(**{**ASKED, "draft_count": 0})
        halted = HaltedTarget(stack)
        answer = asyncio.create_task(stack.generate(**{**ASKED, "cache_salt": "another"}))

        def waiting(gateway: RunningGateway) -> tuple[int, int, int] | None:
            load = target_of(gateway).load
            return load and (load.waiting_tokens, load.own_waiting_tokens, load.owner_count)

        await eventually(lambda: waiting(stack.gateway) == (699, 699, 1))  # type: ignore[arg-type]
        await eventually(lambda: waiting(other) == (699, 0, 2))
        halted.let_go()
        assert (await answer).token_ids == plain.token_ids
        await eventually(lambda: waiting(stack.gateway) == (0, 0, 1))  # type: ignore[arg-type]
        assert stack.gateway.backend.draft is not None
        for service, peer in (
            (stack.target, target_of(stack.gateway)),
            (stack.draft, stack.gateway.backend.draft.peers[0]),
        ):
            await eventually(lambda peer=peer, service=service: free_share(peer, service) == 1.0)
            assert peer.load is not None
            assert min(peer.load.step_us, peer.load.prefill_us_per_token) > 0


def free_share(peer: ServicePeer, service: object) -> float:
    """Share of a service's blocks that are free, as the gateway knows it; 0 while it does not."""
    return peer.load.free_blocks / service.runner.pool.num_blocks if peer.load else 0.0  # type: ignore[attr-defined]


async def test_no_session_goes_to_a_target_that_drains() -> None:
    """What runs there ends there, what comes goes to the other at once, and /ready and the metrics name it."""
    async with AsyncExitStack() as life:
        stack = await life.enter_async_context(running_stack(gateway=PATIENT))
        spare = await start_target(stack.target_settings)
        life.push_async_callback(spare.stop, 0)
        addresses = f"{stack.target.address},{spare.address}"
        settings = GatewaySettings(addresses, TARGET, listen="127.0.0.1:0", rest_listen="127.0.0.1:0", **PATIENT)
        gateway = await start_gateway(settings)
        life.push_async_callback(gateway.stop, 0)
        assert stack.gateway is not None
        await eventually(lambda: gateway.backend.target.peers[1].info is not None)
        first_gateway, stack.gateway = stack.gateway, gateway
        targets = stack.target, spare
        halted = [HaltedTarget(stack, 6, each) for each in targets]
        running = asyncio.create_task(stack.generate(**ASKED))
        await eventually(lambda: any(len(each.table) for each in targets))
        # Either of them is as good.
        used = 0 if len(stack.target.table) else 1
        await halted[used].make()
        targets[used].servicer.drain(600.0)
        await eventually(lambda: target_of(gateway, used).is_draining)
        halted[1 - used].let_go()
        later = await stack.generate(**ASKED)
        halted[used].let_go()
        ended = await running
        assert ended.token_ids == later.token_ids
        assert sum(each.facts.target_reopens for each in (*ended.rounds, *later.rounds)) == 0
        await eventually(lambda: len(targets[1 - used].table) == 0)
        stack.gateway = first_gateway


@pytest.mark.slow
async def test_a_gateway_whose_only_target_drains_is_not_ready() -> None:
    """Requests that run go on; a new one is refused with the reason, and health says so before."""
    # What a new request waits for, a target that comes instead, does not come here.
    settings = {**PATIENT, "rest_listen": "127.0.0.1:0", "rebuild_budget_seconds": 0.5}
    async with running_stack(gateway=settings) as stack:
        assert stack.gateway is not None
        plain = await stack.generate(**ASKED)
        halted = HaltedTarget(stack, 6)
        running = asyncio.create_task(stack.generate(**ASKED))
        await halted.make()
        stack.target.servicer.drain(600.0)
        await eventually(lambda: target_of(stack.gateway).is_draining)  # type: ignore[arg-type]
        async with httpx.AsyncClient(base_url=f"http://{stack.gateway.rest_address}") as http:
            assert (await http.get("/ready")).status_code == 503
            metrics = (await http.get("/metrics")).text
        label = f'{{address="{stack.target.address}",service="target"}}'
        assert f"outrider_service_draining{label} 1.0" in metrics
        assert f"outrider_service_backlog_seconds{label} 0.0" in metrics
        with pytest.raises(PeerLost, match="is stopping, and takes no new requests"):
            await stack.generate(**ASKED)
        halted.let_go()
        assert (await running).token_ids == plain.token_ids
