"""A session's stream without gRPC: order, ends, and what bounds a client that does not read or stop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from support.basics import PATIENCE_S

from outrider.errors import InvalidRequest, NotReady, Overloaded
from outrider.model_service.session_store import Outbox
from outrider.model_service.session_stream import MAX_UNFINISHED_JOBS, SessionStream


class SlowDevice:
    """A device that runs its jobs when a test says so."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []
        self.came = asyncio.Event()

    def post(self, job: Callable[[], None]) -> None:
        """Queues."""
        self.jobs.append(job)
        self.came.set()

    def call(self, fn: Callable[[], Any]) -> "asyncio.Future[Any]":
        """Queues, with a result."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.post(lambda: None if future.done() else future.set_result(fn()))
        return future

    def run(self) -> None:
        """Runs what is queued."""
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job()

    async def keep_running(self) -> None:
        """Runs whatever comes."""
        while True:
            await self.came.wait()
            self.came.clear()
            self.run()


class NoLeases:
    """A table that holds nothing."""

    lease_s = 60.0

    def leave(self, session_id: bytes, owner: object, lease_s: float) -> bool:
        """Nobody is there."""
        return False

    def sweep(self) -> int:
        """Nothing ends."""
        return 0


async def test_answers_come_in_order_from_any_thread() -> None:
    """Those of another thread wake the loop, and none is lost between two looks."""
    outbox = Outbox()
    thread = threading.Thread(target=lambda: [outbox.put(number) for number in [*range(2000), None]])
    thread.start()
    got = []
    async with asyncio.timeout(PATIENCE_S):
        while (answer := await outbox.get()) is not None:
            got.append(answer)
    thread.join()
    assert got == list(range(2000))
    assert not outbox.overflow.done()


async def test_an_outbox_is_bounded() -> None:
    """What is put into a full one is dropped, and the stream learns that it overflowed."""
    outbox = Outbox(maximum=3)
    for number in range(100):
        outbox.put(number)
    error = await asyncio.wait_for(outbox.overflow, PATIENCE_S)
    assert isinstance(error, Overloaded)
    assert str(error) == "the client has left 3 answers of this stream unread"
    assert [await outbox.get() for _ in range(4)] == [0, 1, 2, 3]


class Harness:
    """A stream between a device and a client that a test plays."""

    def __init__(self) -> None:
        self.device = SlowDevice()
        self.stream = SessionStream(self.device, NoLeases())
        self.requests: asyncio.Queue[Callable[[], None] | None] = asyncio.Queue()
        self.written: list[int] = []
        self.readable = asyncio.Event()
        self.readable.set()

    async def read(self) -> AsyncIterator[Callable[[], None]]:
        """What the client sends, to its end."""
        while (job := await self.requests.get()) is not None:
            yield job

    async def write(self, answer: int) -> None:
        """The client reads only when it wants."""
        await self.readable.wait()
        self.written.append(answer)

    async def handle(self, job: Callable[[], None]) -> bool:
        """Every request is a job."""
        await self.stream.hand_over(job)
        return True

    async def carry(self) -> None:
        """Carries the stream to its end, with a device that runs what comes."""
        running = asyncio.create_task(self.device.keep_running())
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self.stream.carry(self.read(), self.write, self.handle)
        finally:
            running.cancel()

    def send(self, *jobs: Callable[[], None] | None) -> None:
        """Sends jobs; None ends the sending."""
        for job in jobs:
            self.requests.put_nowait(job)


async def test_a_job_answers_before_the_end_of_its_stream() -> None:
    """A client that has sent its last message still gets what that message says at once."""
    harness = Harness()
    harness.send(lambda: harness.stream.outbox.put(7), None)
    await harness.carry()
    assert harness.written == [7]


async def test_behind_a_failed_job_nothing_has_an_effect() -> None:
    """The error comes behind earlier answers, and later messages of the stream are not looked at."""
    harness, effects = Harness(), list[str]()

    def fail() -> None:
        raise InvalidRequest("step", 1, "2")

    harness.send(lambda: harness.stream.outbox.put(7), fail, lambda: effects.append("late"), None)
    with pytest.raises(InvalidRequest):
        await harness.carry()
    assert (harness.written, effects) == ([7], [])


async def test_a_client_that_does_not_read_is_given_up() -> None:
    """Even while the write to it is blocked for ever; its stream ends with the reason."""
    harness = Harness()
    harness.readable.clear()

    def flood() -> None:
        for number in range(5000):
            harness.stream.outbox.put(number)

    harness.send(flood)
    with pytest.raises(Overloaded, match="answers of this stream unread"):
        await harness.carry()
    assert harness.written == []


async def test_a_client_cannot_fill_the_queue_of_the_device() -> None:
    """A stream whose jobs are not finished takes no further message."""
    harness, done = Harness(), list[int]()
    harness.send(*(lambda number=number: done.append(number) for number in range(100)))
    harness.send(None)
    carrying = asyncio.create_task(harness.stream.carry(harness.read(), harness.write, harness.handle))
    lengths = []
    while len(done) < 100:
        async with asyncio.timeout(PATIENCE_S):
            await harness.device.came.wait()
        harness.device.came.clear()
        # The reader goes on until it has to wait for the device.
        for _ in range(200):
            await asyncio.sleep(0)
        lengths.append(len(harness.device.jobs))
        harness.device.run()
    while not carrying.done():
        harness.device.run()
        await asyncio.sleep(0)
    assert done == list(range(100))
    assert max(lengths) == MAX_UNFINISHED_JOBS


async def test_a_stopped_device_ends_the_stream() -> None:
    """With the sentence of the service that is stopping."""
    harness = Harness()

    def refuse(job: Callable[[], None]) -> None:
        raise NotReady("the service is stopping")

    harness.device.post = refuse  # type: ignore[method-assign]
    harness.send(lambda: None)
    with pytest.raises(NotReady):
        await harness.carry()
