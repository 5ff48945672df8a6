"""Tests of outrider.engine.device_thread: one thread, jobs between steps, and when it is stalled."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import groupby

import pytest
from support.basics import PATIENCE_S, Clock, Counting, Machine, eventually

from outrider.engine.device_thread import DeviceWorker
from outrider.errors import NotReady, OutriderError


@asynccontextmanager
async def working(machine: Machine) -> AsyncIterator[DeviceWorker[Counting]]:
    """A worker that is closed at the end."""
    worker = DeviceWorker[Counting](machine.advance)
    try:
        yield worker
    finally:
        await worker.close()


async def test_everything_runs_on_one_other_thread() -> None:
    """Setup, jobs and steps, and none of it on the loop's thread."""
    machine, seen = Machine(), set[int]()
    worker = DeviceWorker[Counting](machine.advance, setup=lambda: seen.add(threading.get_ident()))
    task = Counting(2)
    worker.submit(task)
    seen.add(await worker.call(threading.get_ident))
    await eventually(lambda: task.done)
    await worker.close()
    assert len(seen | machine.threads) == 1
    assert threading.get_ident() not in seen


async def test_a_job_returns_or_raises_where_it_is_awaited() -> None:
    """The thread goes on after an error."""

    def fail() -> None:
        raise KeyError("lost")

    async with working(Machine()) as worker:
        with pytest.raises(KeyError):
            await worker.call(fail)
        assert await worker.call(lambda: 3) == 3


async def test_tasks_join_the_next_step_and_leave_when_done() -> None:
    """No task waits for another's end."""
    machine = Machine()
    gate = threading.Event()
    first, second = Counting(3, "first"), Counting(1, "second")
    async with working(machine) as worker:
        blocked = worker.call(gate.wait)
        worker.submit(first)
        machine.before_step = lambda: worker.submit(second) if not machine.diary else None
        gate.set()
        await blocked
        await eventually(lambda: first.done and second.done)
    assert machine.diary == [["first"], ["first", "second"], ["first"]]


async def test_a_stopped_task_makes_no_further_step() -> None:
    """A job that stops it runs between two steps."""
    machine = Machine()
    entered, gate = threading.Event(), threading.Event()
    task = Counting(1000)

    def pause() -> None:
        if len(machine.diary) == 2:
            entered.set()
            gate.wait(PATIENCE_S)

    machine.before_step = pause
    async with working(machine) as worker:
        worker.submit(task)
        await asyncio.to_thread(entered.wait, PATIENCE_S)
        stopped = worker.call(lambda: setattr(task, "stopped", True))
        gate.set()
        await stopped
        await eventually(lambda: worker.stalled_us == 0)
        assert (task.made, task.done) == (3, False)


async def test_jobs_run_in_order_even_when_nobody_waits() -> None:
    """A cancelled future takes nothing back: what frees must free."""
    gate, order = threading.Event(), list[int]()
    async with working(Machine()) as worker:
        blocked = worker.call(gate.wait)
        futures = [worker.call(lambda number=number: order.append(number)) for number in range(3)]
        futures[1].cancel()
        gate.set()
        await blocked
        await worker.call(lambda: None)
    assert order == [0, 1, 2]


async def test_closing_fails_what_is_active_and_refuses_what_comes() -> None:
    """No caller waits for ever."""
    machine = Machine()
    task = Counting(10**9)
    worker = DeviceWorker[Counting](machine.advance)
    worker.submit(task)
    await eventually(lambda: task.made > 0)
    await worker.close()
    await worker.close()
    assert isinstance(task.error, NotReady)
    with pytest.raises(NotReady):
        worker.call(lambda: None)


async def test_a_job_that_breaks_its_promise_harms_nobody() -> None:
    """A posted job must not raise; when it does, the thread goes on."""

    def explode() -> None:
        raise RuntimeError("secret of the job")

    async with working(Machine()) as worker:
        worker.post(explode)
        assert await worker.call(lambda: 3) == 3


@pytest.mark.parametrize("piece", ["job", "step"])
async def test_a_device_that_finishes_nothing_is_stalled(piece: str) -> None:
    """For as long as the job or step under way takes, whatever waits after it; idleness is no stall."""
    clock, machine = Clock(), Machine()
    entered, gate = threading.Event(), threading.Event()
    worker, task = DeviceWorker[Counting](machine.advance, clock_ns=clock), Counting(1)

    def pause() -> None:
        entered.set()
        gate.wait(PATIENCE_S)

    def is_idle() -> bool:
        clock.now_ns += 5_000_000
        return worker.stalled_us == 0

    await worker.call(lambda: None)
    await eventually(is_idle)
    if piece == "job":
        worker.post(pause)
    else:
        machine.before_step = pause
        worker.submit(task)
    await asyncio.to_thread(entered.wait, PATIENCE_S)
    waiting = worker.call(lambda: None)
    clock.now_ns += 7_000
    assert worker.stalled_us == 7
    gate.set()
    await waiting
    await eventually(is_idle)
    await worker.close()


async def test_a_thread_that_does_not_begin_is_stalled() -> None:
    """What waits for it may wait for ever, and somebody has to notice."""
    clock, gate = Clock(), threading.Event()
    worker = DeviceWorker[Counting](Machine().advance, setup=lambda: gate.wait(PATIENCE_S), clock_ns=clock)
    assert worker.stalled_us == 0
    worker.post(lambda: None)
    clock.now_ns += 3_000
    assert worker.stalled_us == 3
    gate.set()
    await worker.close()


async def test_tasks_that_cannot_step_wait_for_a_job() -> None:
    """They are asked again and again, and after every job; the device is not stalled, and nothing is lost."""
    machine, has_room = Machine(), threading.Event()
    num_refused = []

    def advance(tasks: Sequence[Counting]) -> bool:
        if not has_room.is_set():
            num_refused.append(len(tasks))
            return False
        return machine.advance(tasks)

    worker, task = DeviceWorker[Counting](advance), Counting(3)
    worker.submit(task)
    await eventually(lambda: len(num_refused) > 2)
    await worker.call(has_room.set)
    await eventually(lambda: task.done)
    assert task.made == 3
    await worker.close()


async def test_it_rests_behind_the_jobs_and_behind_each_step() -> None:
    """Not between the jobs that waited together, so that what all of them have to say leaves at once, as of a step."""
    diary, gate, task = list[str](), threading.Event(), Counting(2)
    machine = Machine()
    worker = DeviceWorker[Counting](machine.advance, rest=lambda: diary.append("rest"))

    def begin_step() -> None:
        diary.append("step")
        # What comes meanwhile does not hold up what the step has to say.
        worker.post(partial(diary.append, f"job of step {task.made}"))

    machine.before_step = begin_step
    blocked = worker.call(gate.wait)
    for number in range(3):
        worker.post(partial(diary.append, f"job {number}"))
    worker.submit(task)
    gate.set()
    await blocked
    await eventually(lambda: task.done)
    await worker.close()
    order = [entry for entry, _ in groupby(diary)]
    first, second = (["step", "rest", f"job of step {number}", "rest"] for number in range(2))
    assert order == ["job 0", "job 1", "job 2", "rest", *first, *second]


async def test_it_rests_behind_what_its_end_has_to_say() -> None:
    """Tasks that fail because it is closed are heard of."""
    diary = list[str]()

    class Saying(Counting):
        def fail(self, error: OutriderError) -> None:
            super().fail(error)
            diary.append("failed")

    machine, task = Machine(), Saying(10**9)
    worker = DeviceWorker[Counting](machine.advance, rest=lambda: diary.append("rest"))
    worker.submit(task)
    await eventually(lambda: task.made > 0)
    await worker.close()
    assert diary[-2:] == ["failed", "rest"]
