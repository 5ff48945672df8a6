"""Several samples in one stream: seeds, order, ends and faults."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

import pytest
from support.basics import PATIENCE_S

from gateway.generation.request import sample_seed
from gateway.generation.sample import merged

EventT = TypeVar("EventT")


def test_seeds_are_far_apart_and_the_first_is_the_requests_own() -> None:
    """No sample of a request is a sample of its neighbour, and the seeds that we make are whole in JavaScript."""
    seeds = {(seed, index): sample_seed(seed, index) for seed in range(-50, 50) for index in range(8)}
    assert all(seeds[seed, 0] == seed for seed in range(-50, 50))
    assert len(set(seeds.values())) == len(seeds)
    assert all(0 <= made < 2**53 for (_, index), made in seeds.items() if index)


class Stream:
    """Counts up, and notes that it was closed."""

    def __init__(self, name: str, count: int, error: Exception | None = None) -> None:
        self.name, self.count, self.error = name, count, error
        self.sent = 0
        self.is_closed = False

    async def events(self) -> AsyncGenerator[tuple[str, int], None]:
        """The events, each after a turn of the loop."""
        try:
            for number in range(self.count):
                await asyncio.sleep(0)
                self.sent += 1
                yield self.name, number
            if self.error is not None:
                raise self.error
        finally:
            await asyncio.sleep(0)
            self.is_closed = True


async def each_of(*streams: AsyncGenerator[EventT, None]) -> AsyncGenerator[AsyncGenerator[EventT, None], None]:
    """The streams, one after the other."""
    for stream in streams:
        yield stream


async def test_every_event_comes_once_and_in_its_streams_order() -> None:
    """Streams of different lengths, one of them empty."""
    streams = [Stream("a", 5), Stream("b", 0), Stream("c", 9)]
    events = [event async for event in merged(each_of(*(stream.events() for stream in streams)))]
    for stream in streams:
        assert [number for name, number in events if name == stream.name] == list(range(stream.count))
        assert stream.is_closed


async def test_a_failing_stream_ends_all() -> None:
    """Its error is raised, and the others are closed by then."""
    streams = [Stream("a", 1000), Stream("b", 2, ValueError("broken"))]
    with pytest.raises(ValueError, match="broken"):
        async for _ in merged(each_of(*(stream.events() for stream in streams))):
            pass
    assert streams[0].sent < 1000
    assert all(stream.is_closed for stream in streams)


async def test_leaving_early_closes_all() -> None:
    """A reader that stops after one event leaves nothing open."""
    streams = [Stream("a", 1000), Stream("b", 1000)]
    async with aclosing(merged(each_of(*(stream.events() for stream in streams)))) as events:
        await anext(events)
    assert all(stream.is_closed for stream in streams)


async def test_what_fails_while_it_is_closed_is_not_waited_for() -> None:
    """The errors of streams whose reader has left are not read."""
    closed: list[int] = []

    async def failing(number: int) -> AsyncGenerator[int, None]:
        try:
            while True:
                await asyncio.sleep(0)
                yield number
        finally:
            closed.append(number)
            raise ValueError("broken")

    async with (
        asyncio.timeout(PATIENCE_S),
        aclosing(merged(each_of(*(failing(number) for number in range(4))))) as events,
    ):
        await anext(events)
    assert sorted(closed) == [0, 1, 2, 3]


async def test_a_slow_reader_is_waited_for() -> None:
    """No stream runs far ahead of the reader."""
    streams = [Stream("a", 1000), Stream("b", 1000)]
    async with aclosing(merged(each_of(*(stream.events() for stream in streams)))) as events:
        await anext(events)
        for _ in range(50):
            await asyncio.sleep(0)
        assert sum(stream.sent for stream in streams) <= 5


async def test_a_stream_begins_when_it_comes_and_not_before() -> None:
    """Those that are there run meanwhile, and one that comes late is read to its end."""
    streams, turn = [Stream("a", 3), Stream("b", 2)], asyncio.Event()

    async def coming() -> AsyncGenerator[AsyncGenerator[tuple[str, int], None], None]:
        yield streams[0].events()
        await turn.wait()
        yield streams[1].events()

    async with asyncio.timeout(PATIENCE_S), aclosing(merged(coming())) as events:
        assert [await anext(events) for _ in range(3)] == [("a", 0), ("a", 1), ("a", 2)]
        assert streams[1].sent == 0
        turn.set()
        assert [event async for event in events] == [("b", 0), ("b", 1)]


async def test_leaving_while_a_stream_is_waited_for_closes_all() -> None:
    """The one that waits for it is ended too, and what it raises is raised."""
    stream, closed = Stream("a", 1000), list[bool]()

    async def coming(error: Exception | None) -> AsyncGenerator[AsyncGenerator[tuple[str, int], None], None]:
        try:
            yield stream.events()
            await (asyncio.sleep(0) if error else asyncio.Event().wait())
            raise error or AssertionError
        finally:
            closed.append(True)

    async with asyncio.timeout(PATIENCE_S), aclosing(merged(coming(None))) as events:
        await anext(events)
    assert closed == [stream.is_closed]
    with pytest.raises(ValueError, match="broken"):
        async for _ in merged(coming(ValueError("broken"))):
            pass
    assert closed == [True, stream.is_closed]
