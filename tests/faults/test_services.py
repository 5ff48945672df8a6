"""A model service dies, stands still, is drained, moves or is cut off under several requests: no client sees it.

Each fault is done to the target and to the draft alike, with the other one sound. The tokens are those of a run
without faults, every request ends, and afterwards no service holds anything.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest
import pytest_asyncio
from faults.load import REQUESTS, Load, said
from faults.service import KV_TOKENS, LEASE_S, MODELS, Service
from support.basics import eventually, grid
from support.network import ChaosProxy
from support.stack import until_quiet

from draft_service.server import DraftSettings
from draft_service.server import start as start_draft
from gateway.server import RunningGateway
from gateway.server import start as start_gateway
from gateway.sessions.peer import ServicePeer
from gateway.settings import GatewaySettings
from outrider.rpc.channels import open_channel
from target_service.server import TargetSettings
from target_service.server import start as start_target

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

START = {"target": start_target, "draft": start_draft}
SETTINGS = {"target": TargetSettings, "draft": DraftSettings}
# Pings, answers to pings and window updates of a stretch without messages stay below these.
OPEN_BYTES, ANSWER_BYTES = 100, 60
SLICED_TOKENS = 32
Fault = Callable[[Load], Awaitable[None]]


@dataclass
class World:
    """Two processes of one role, of which the second is the spare, a sound service of the other, and the reference."""

    role: str
    first: Service
    spare: Service
    sound_address: str
    reference: Sequence[list[int]]
    running: RunningGateway | None = None

    @asynccontextmanager
    async def gateway(self, *proxies: ChaosProxy) -> AsyncIterator[grpc.aio.Channel]:
        """A channel to a gateway of its own, in this process, that knows the role's services by these proxies."""
        addresses = {self.role: ",".join(proxy.address for proxy in proxies), self.other: self.sound_address}
        settings = GatewaySettings(
            addresses["target"],
            MODELS["target"],
            addresses["draft"],
            listen="127.0.0.1:0",
            rest_listen="",
            draft_deadline_max_s=1.0,
        )
        self.running = await start_gateway(settings)
        # A target that stands still is found out in time for a test.
        self.running.backend.target_timeouts.deadline.min_s = 0.5
        # A gateway serves as soon as any target answers, and the spare may have been the first.
        await eventually(lambda: self._link().info is not None)
        try:
            async with open_channel(self.running.address) as channel:
                yield channel
        finally:
            await self.running.stop(0)

    @property
    def other(self) -> str:
        """The role that nothing happens to."""
        return "draft" if self.role == "target" else "target"

    async def survives(self, fault: Fault, *proxies: ChaosProxy, is_felt: bool = True) -> None:
        """Does a fault to requests in the middle of their output, and checks all that is promised.

        `is_felt` says that requests must have lost a round to it, which shows that the fault really happened.
        """
        try:
            async with self.gateway(*proxies) as channel, Load(channel) as load:
                await load.begun()
                await fault(load)
                answered = await load.token_ids()
        finally:
            await self.mend()
        assert answered == [*self.reference, *self.reference][: len(answered)]
        completions = [request.completion for request in load.requests if request.completion is not None]
        assert len(completions) == len(answered)
        num_reopens = sum(completion.survival.target_reopens for completion in completions)
        num_fallbacks = sum(completion.speculation.fallback_rounds for completion in completions)
        if self.role == "draft":
            assert num_reopens == 0
        if is_felt:
            assert (num_reopens if self.role == "target" else num_fallbacks) > 0
        await self.quiet()

    async def leave_a_message_unanswered(self) -> None:
        """Stops the process and waits until the gateway has sent it something that it will never answer."""
        self.first.signal(signal.SIGSTOP)
        await self._asked()

    async def keep_answers_back(self) -> None:
        """Waits until the process has sent answers that the gateway does not have and waits for.

        What comes unasked may be held before them: how busy the process is.
        """
        self.first.proxy.timeout()
        await self._asked()
        await eventually(lambda: self.first.proxy.held_bytes >= ANSWER_BYTES)

    async def _asked(self) -> None:
        """Waits until the gateway has asked for something more, or has done without what it asked for."""
        before = self.first.proxy.request_bytes
        await eventually(lambda: self.first.proxy.request_bytes >= before + OPEN_BYTES)

    async def given_up(self) -> None:
        """Waits until the gateway does without its first service."""
        link = self._link()
        await eventually(lambda: link.info is None or link.breaker.is_open)

    async def mend(self) -> None:
        """Makes both processes and their connections whole again."""
        await asyncio.gather(self.first.mend(), self.spare.mend())

    async def quiet(self) -> None:
        """Waits until no process holds anything any more."""
        await asyncio.gather(self.first.quiet(), self.spare.quiet())
        async with open_channel(self.sound_address) as channel:
            await until_quiet(channel)

    def _link(self) -> ServicePeer:
        """The gateway's tie to the first process."""
        assert self.running is not None
        replicas = self.running.backend.target if self.role == "target" else self.running.backend.draft
        assert replicas is not None
        return replicas.peers[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["target", *grid("draft")])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """The processes live as long as the tests of their role."""
    role = request.param
    async with AsyncExitStack() as life:
        other = "draft" if role == "target" else "target"
        settings = SETTINGS[other](MODELS[other], "127.0.0.1:0", threads=1, kv_tokens=KV_TOKENS, lease_seconds=LEASE_S)
        sound = await START[other](settings)
        life.push_async_callback(sound.stop, 0)
        first, spare = Service(role), Service(role)
        await asyncio.gather(life.enter_async_context(first), life.enter_async_context(spare))
        world = World(role, first, spare, sound.address, ())
        async with world.gateway(first.proxy) as channel:
            world.reference = await said(channel)
        assert world.reference[:2] == world.reference[2:]
        yield world


async def test_killed_before_its_reply_and_started_again_on_its_port(world: World) -> None:
    """The answer that is owed never comes, and a new incarnation without any sessions takes over."""

    async def fault(load: Load) -> None:
        await world.leave_a_message_unanswered()
        await world.first.kill()
        await world.first.start(world.first.address)

    await world.survives(fault, world.first.proxy)


async def test_killed_after_its_reply(world: World) -> None:
    """Answers have left the process and are lost with it; the spare says the same once more."""

    async def fault(load: Load) -> None:
        await world.keep_answers_back()
        await world.first.kill()
        world.first.proxy.upstream = None
        world.first.proxy.reset_peer()

    await world.survives(fault, world.first.proxy, world.spare.proxy)


async def test_started_again_on_another_port(world: World) -> None:
    """The next incarnation listens where only the gateway's second address leads."""
    async with ChaosProxy(None) as second:

        async def fault(load: Load) -> None:
            await world.first.kill()
            world.first.proxy.upstream = None
            second.upstream = await world.first.launch()

        await world.survives(fault, world.first.proxy, second)


async def test_frozen_and_thawed(world: World) -> None:
    """A process that stands still is waited for, and what it then says about old messages does no harm."""

    async def fault(load: Load) -> None:
        await world.leave_a_message_unanswered()
        await world.given_up()
        world.first.signal(signal.SIGCONT)

    await world.survives(fault, world.first.proxy)


async def test_frozen_with_a_spare(world: World) -> None:
    """Requests move to the spare, and end while the first one still stands still."""

    async def fault(load: Load) -> None:
        await world.leave_a_message_unanswered()

    await world.survives(fault, world.first.proxy, world.spare.proxy)


async def test_drained_with_a_spare(world: World) -> None:
    """After a SIGTERM the process ends with 0; requests that run and those that come are served."""

    async def fault(load: Load) -> None:
        world.first.signal(signal.SIGTERM)
        for fields in REQUESTS:
            load.begin(**fields)
        assert await world.first.ended() == 0

    await world.survives(fault, world.first.proxy, world.spare.proxy, is_felt=False)


async def test_replies_that_arrive_after_the_service_was_given_up(world: World) -> None:
    """Requests get through and replies do not, until the gateway has lost its patience; then all come at once."""

    async def fault(load: Load) -> None:
        await world.keep_answers_back()
        await world.given_up()
        world.first.proxy.heal()

    await world.survives(fault, world.first.proxy)


async def test_replies_that_never_arrive(world: World) -> None:
    """A connection that is cut one way sends requests to the spare."""

    async def fault(load: Load) -> None:
        await world.keep_answers_back()

    await world.survives(fault, world.first.proxy, world.spare.proxy)


@pytest.mark.parametrize("num_bytes", [1, 20])
async def test_a_reset_in_the_middle_of_a_message(world: World, num_bytes: int) -> None:
    """Half an answer is none, whether it ends in the head of its frame or after it."""

    async def fault(load: Load) -> None:
        await world.keep_answers_back()
        world.first.proxy.limit_data(num_bytes)
        assert world.first.proxy.has_hit_limit
        world.first.proxy.heal()

    await world.survives(fault, world.first.proxy)


async def test_every_byte_in_a_segment_of_its_own(world: World) -> None:
    """Messages are put together again wherever they are cut."""
    world.first.proxy.slicer(1)
    try:
        async with world.gateway(world.first.proxy) as channel:
            answered = await said(channel, SLICED_TOKENS)
    finally:
        await world.mend()
    assert answered == [token_ids[:SLICED_TOKENS] for token_ids in world.reference]
    await world.quiet()
