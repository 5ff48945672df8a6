"""A target that stays away: requests wait for it as long as they may, and end with one sentence."""

import signal
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from faults.load import REQUESTS, Load, said, until_health
from faults.service import Service
from support.stack import TARGET

from gateway.server import start as start_gateway
from gateway.settings import GatewaySettings
from outrider.errors import PeerLost
from outrider.rpc.channels import open_channel

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

BUDGET_S = 1.5
ENDS = (
    "cannot be reached",
    "does not answer requests",
    f"was lost in the middle of the request, and no target took the request over within {BUDGET_S} seconds",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target() -> AsyncIterator[Service]:
    """The only target."""
    async with Service("target") as service:
        yield service


@pytest_asyncio.fixture(loop_scope="module")
async def channel(target: Service) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a gateway without a draft, which gives a target up soon."""
    settings = GatewaySettings(
        target.proxy.address, TARGET, listen="127.0.0.1:0", rest_listen="", rebuild_budget_seconds=BUDGET_S
    )
    gateway = await start_gateway(settings)
    gateway.backend.target_timeouts.deadline.min_s = 0.5
    try:
        async with open_channel(gateway.address) as channel:
            yield channel
    finally:
        await gateway.stop(0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_target_that_stays_away(target: Service, channel: grpc.aio.Channel, number: signal.Signals) -> None:
    """Requests that run and those that come end UNAVAILABLE, after tokens that were right; health says why."""
    reference = await said(channel)
    async with Load(channel) as load:
        await load.begun()
        target.signal(number)
        await until_health(channel, "NOT_SERVING")
        for fields in REQUESTS[:2]:
            load.begin(**fields)
        ends = await load.ended()
        await until_health(channel, "NOT_SERVING")
    for request, end, token_ids in zip(load.requests, ends, [*reference, *reference], strict=False):
        assert isinstance(end, PeerLost)
        assert end.status == "UNAVAILABLE"
        assert end.message.removeprefix(f"The target service at {target.proxy.address} ") in ENDS
        assert token_ids[: len(request.token_ids)] == request.token_ids
    assert not load.requests[-1].token_ids
    await target.mend()
    await until_health(channel, "SERVING")
    assert await said(channel) == reference
    await target.quiet()
