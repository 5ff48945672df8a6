"""A target of which nothing comes: how often it is asked before it is lost, and who goes where meanwhile."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterable, MutableMapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from faults.service import Service
from structlog.testing import capture_logs
from support.basics import eventually

from gateway.rounds.round import NOTHING, TokenLog
from gateway.sessions.peer import ServicePeer
from gateway.sessions.placement import PlaceWish, PromptPrefix
from gateway.sessions.replicas import Placing, Targets
from gateway.sessions.session import TargetTimeouts
from gateway.sessions.target import RemoteTargetSession
from outrider.parameters import SamplingParameters, SessionSpec

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

PROMPT, MAX_LEN = tuple(range(40, 48)), 32
SPEC = SessionSpec(PROMPT, len(PROMPT), SamplingParameters(), 9, MAX_LEN, frozenset(), frozenset())
ASKED, LOST = "service does not answer", "target session lost"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services() -> AsyncIterator[Sequence[Service]]:
    """Two targets."""
    async with Service("target") as first, Service("target") as second:
        yield first, second


@asynccontextmanager
async def links_to(services: Iterable[Service]) -> AsyncIterator[list[ServicePeer]]:
    """A link to each that has heard its load; in the end the services are whole again."""
    async with AsyncExitStack() as life:
        peers = []
        for service in services:
            life.push_async_callback(service.mend)
            peers.append(ServicePeer("target", service.proxy.address, lambda info: None))
            life.push_async_callback(peers[-1].close)
        await eventually(lambda: all(peer.load is not None for peer in peers))
        yield peers


def stop(service: Service) -> None:
    """The process stands still."""
    service.signal(signal.SIGSTOP)


def cut(service: Service) -> None:
    """What it says does not arrive any more; what it is told does."""
    service.proxy.timeout()


async def said(
    peers: Sequence[ServicePeer], fault: Callable[[], object] = lambda: None
) -> tuple[tuple[int, ...], int, list[MutableMapping[str, Any]]]:
    """Tokens of a session that begins at the first of the links, after three rounds of which a fault happens; how often
    it was opened again, and what was logged.
    """
    log, reopens, targets = TokenLog(PROMPT), 0, Targets(peers)
    placing = Placing(peers[0].present().model_hash, peer=peers[0])
    with capture_logs() as logs:
        async with RemoteTargetSession(targets, TargetTimeouts(), SPEC, log, b"i" * 16, placing) as session:
            while log.finish_reason is None:
                if len(log) == len(PROMPT) + 3:
                    fault()
                verdict = await session.verify(NOTHING, 0)
                reopens += verdict.reopens
                log.commit(NOTHING, verdict)
    return log.tokens(), reopens, [line for line in logs if line["event"] in {ASKED, LOST}]


@pytest.mark.parametrize("break_", [stop, cut])
async def test_a_session_leaves_a_silent_target_after_one_question(
    services: Sequence[Service], break_: Callable[[Service], None]
) -> None:
    """Where another one is there that speaks; the tokens are those of a run without faults."""
    async with links_to(services) as peers:
        right, _, _ = await said(peers)
        tokens, reopens, logs = await said(peers, lambda: break_(services[0]))
        assert (tokens, reopens) == (right, 1)
        assert [line["event"] for line in logs] == [ASKED, LOST]


@pytest.mark.parametrize("num_links", [1, 2])
async def test_where_all_are_silent_a_target_is_asked_once_more(services: Sequence[Service], num_links: int) -> None:
    """The gateway may be cut off itself, and no other place is any better; the session goes on when they speak."""
    async with links_to(services[:num_links]) as peers:
        right, _, _ = await said(peers)
        running = asyncio.create_task(said(peers, lambda: [stop(each) for each in services]))
        await eventually(lambda: peers[0].breaker.is_open)
        for service in services:
            service.signal(signal.SIGCONT)
        tokens, reopens, logs = await running
        assert tokens == right
        assert reopens >= 1
        assert [line["event"] for line in logs][:3] == [ASKED, ASKED, LOST]


async def test_a_target_that_stands_still_for_a_moment_keeps_its_sessions(services: Sequence[Service]) -> None:
    """It is asked, and goes on before its time is over."""
    async with links_to(services) as peers:
        right, _, _ = await said(peers)
        running = asyncio.create_task(said(peers, lambda: stop(services[0])))
        await eventually(lambda: peers[0].probe.is_silent)
        services[0].signal(signal.SIGCONT)
        assert await running == (right, 0, [])


async def test_new_sessions_avoid_a_target_as_long_as_it_is_silent(services: Sequence[Service]) -> None:
    """Before any round of theirs is late: its load comes each second, and then does not."""

    def chosen() -> set[object]:
        wishes = (PlaceWish(100, prefix=PromptPrefix(bytes([number]))) for number in range(64))
        return {targets.pick(b"", wish=wish) for wish in wishes}

    async with links_to(services) as peers:
        targets = Targets(peers)
        assert chosen() == set(peers)
        stop(services[0])
        await eventually(lambda: peers[0].is_silent)
        assert chosen() == {peers[1]}
        services[0].signal(signal.SIGCONT)
        await eventually(lambda: not peers[0].is_silent)
        assert chosen() == set(peers)
