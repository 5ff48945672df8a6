"""What a service says of its load over real links: to which gateways, how often, and what it counts."""

from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest
from support.basics import eventually, held, spec_of
from support.services.session_clients import TargetClient

from outrider.engine.runner import ForwardCounts
from outrider.model_service import load
from outrider.model_service.server import RunningModelService
from outrider.v1 import target_service_pb2 as target_pb
from outrider.v1 import types_pb2 as pb

LONG = spec_of([number % 251 + 1 for number in range(300)], 400, eos=())
SHORT = spec_of([number % 241 + 1 for number in range(100)], 400, eos=())


class Reading(TargetClient):
    """A session of a gateway that reads loads."""

    async def begin_reading(self) -> pb.ServiceLoad:
        """Says so; the first load."""
        await self.link.call.write(target_pb.TargetServiceLinkRequest(reads_load=True))
        return (await self.link.frame()).load  # type: ignore[no-any-return]

    async def pong(self) -> target_pb.TargetServiceLinkResponse:
        """The frame that answers a ping."""
        await self.ping(1, 1)
        frame = await self.link.frame()
        assert [answer.WhichOneof("answer") for answer in frame.responses] == ["pong"]
        return frame  # type: ignore[no-any-return]


@pytest.fixture
def clock(service: RunningModelService) -> list[float]:
    """The service's clock for its loads, which stands still until a test moves it on."""
    now = [100.0]
    service.servicer.load.clock = lambda: now[0]
    return now


async def test_an_idle_link_hears_the_load_again_and_again(
    channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once when its gateway says that it reads it, and from then on, in frames of their own."""
    monkeypatch.setattr(load, "HEARTBEAT_S", load.LEAST_S)
    client = Reading(channel)
    assert (await client.begin_reading()).owner_count == 1
    for _ in range(3):
        frame = await client.link.frame()
        assert (frame.HasField("load"), len(frame.responses)) == (True, 0)


async def test_a_gateway_that_does_not_read_loads_gets_none(
    channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No frame of its own, which old gateways would count as a fault, and nothing in any other frame."""
    monkeypatch.setattr(load, "HEARTBEAT_S", load.LEAST_S)
    old, client = Reading(channel), Reading(channel)
    await old.open(SHORT)
    frames = [await old.link.frame()]
    await client.begin_reading()
    for base_len in range(100, 104):
        # As long as this one waits, the other one would have had its turn.
        await client.link.frame()
        await old.step(1, base_len + 1)
        frames.append(await old.link.frame())
    assert [(len(frame.responses), frame.HasField("load")) for frame in frames] == [(1, False)] * 5


async def test_loads_of_a_link_are_fifty_milliseconds_apart(channel: grpc.aio.Channel, clock: list[float]) -> None:
    """However many frames there are in between; each link has a time of its own."""
    client, other = Reading(channel), Reading(channel)
    await client.begin_reading()
    assert [(await client.pong()).HasField("load") for _ in range(20)] == [False] * 20
    clock[0] += 0.049
    await other.begin_reading()
    assert not (await client.pong()).HasField("load")
    clock[0] += 0.002
    assert not (await other.pong()).HasField("load")
    assert [(await client.pong()).HasField("load") for _ in range(3)] == [True, False, False]


async def test_links_hear_of_their_own_tokens_and_of_all(
    channel: grpc.aio.Channel, service: RunningModelService, clock: list[float]
) -> None:
    """All of a prompt that waits but its last token; a link without any counts among those that would share."""
    first, second, idle = Reading(channel), Reading(channel), Reading(channel)
    for each in (first, second, idle):
        assert (await each.begin_reading()).waiting_tokens == 0

    async def figures() -> list[tuple[int, int, int]]:
        clock[0] += 0.1
        loads = [(await each.pong()).load for each in (first, second, idle)]
        return [(each.waiting_tokens, each.own_waiting_tokens, each.owner_count) for each in loads]

    async with held(service) as device:
        for each, spec in ((first, LONG), (second, SHORT)):
            await each.open(spec)
        await eventually(lambda: service.worker.num_waiting == 2)
        await device.run_jobs()
        assert await figures() == [(398, 299, 2), (398, 99, 2), (398, 0, 3)]
    for each in (first, second):
        await each.verdict()
    assert await figures() == [(0, 0, 1)] * 3


async def test_a_load_says_what_steps_cost_and_what_room_there_is(
    channel: grpc.aio.Channel, service: RunningModelService, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last forward; what reading costs is known when many tokens were read at once, and not from few rows."""
    # Tests before this one had the same model.
    service.runner.forward_counts = ForwardCounts()
    facts = service.servicer.load._facts
    monkeypatch.setattr(service.servicer.load, "_facts", replace(facts, row_costs={1: 8_000, 8: 8_400}))
    client = Reading(channel)
    before, pool = await client.begin_reading(), service.runner.pool
    assert (before.step_us, before.step_rows, before.prefill_us_per_token) == (0, 0, 0)
    assert (before.free_blocks, before.cached_blocks) == (pool.num_blocks, 0)
    await client.open(LONG)
    await client.verdict()
    clock[0] += 0.1
    reading = (await client.pong()).load
    assert reading.step_rows == 300
    assert reading.prefill_us_per_token == pytest.approx(reading.step_us / 300, rel=0.01)
    assert reading.free_blocks == pool.num_blocks - -(-300 // pool.block_size)
    await client.step(1, 301)
    await client.verdict()
    clock[0] += 0.1
    stepping = (await client.pong()).load
    assert stepping.step_rows == 1
    assert stepping.prefill_us_per_token == reading.prefill_us_per_token


async def test_a_service_that_drains_says_so_at_once(
    channel: grpc.aio.Channel, service: RunningModelService, clock: list[float]
) -> None:
    """On links with sessions, without waiting for an answer, and how long it has; of several calls the least counts."""
    client = Reading(channel)
    assert not (await client.begin_reading()).is_draining
    await client.open(SHORT)
    await client.verdict()
    drain: Callable[[float], None] = service.servicer.drain
    for grace_s, left_ms in ((100.0, 100_000), (10.0, 10_000), (60.0, 10_000)):
        drain(grace_s)
        frame = await client.link.frame()
        assert (len(frame.responses), frame.load.is_draining, frame.load.drain_left_ms) == (0, True, left_ms)
    clock[0] += 0.5
    assert (await client.pong()).load.drain_left_ms == 9_500
    await client.close(1)
    await client.drain()
