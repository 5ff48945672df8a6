"""Tests of outrider.engine.device_thread: a step that raises ends those tasks that are at fault, and no others."""

from collections.abc import Callable, Sequence

import pytest
from structlog.testing import capture_logs
from support.basics import Clock, Counting, Machine, eventually

from outrider.engine.device_thread import DeviceWorker, own_fault
from outrider.errors import NotReady


async def run_all(advance: Callable[[Sequence[Counting]], bool], tasks: Sequence[Counting]) -> list[str]:
    """Begins tasks in one batch and waits until all have ended; returns what was logged."""
    worker = DeviceWorker[Counting](advance)
    with capture_logs() as logs:
        await worker.call(lambda: [worker.submit(task) for task in tasks])
        await eventually(lambda: all(task.done for task in tasks))
        # The thread must not be in the middle of logging when the capture ends.
        await worker.call(lambda: None)
    await worker.close()
    return [line["event"] for line in logs]


@pytest.mark.parametrize("culprits", [{"b"}, {"a", "c"}, {"a", "b", "c"}])
async def test_only_those_fail_whose_own_step_fails(culprits: set[str]) -> None:
    """The error names no Python text; the others make each of their steps once, as if they had been alone."""
    machine = Machine()

    def advance(tasks: Sequence[Counting]) -> bool:
        if any(task.name in culprits for task in tasks):
            raise RuntimeError("secret of the device")
        return machine.advance(tasks)

    tasks = [Counting(3, name) for name in "abc"]
    logged = await run_all(advance, tasks)
    assert logged == ["a batch failed", *["a step failed"] * len(culprits)]
    for task in tasks:
        failed = task.name in culprits
        assert task.made == (0 if failed else 3)
        assert str(task.error) == ("the computation of a step failed" if failed else "None")


async def test_a_batch_that_was_too_much_at_once_fails_nobody() -> None:
    """Each step is made in parts, and each failed batch is logged once."""
    machine = Machine()

    def advance(tasks: Sequence[Counting]) -> bool:
        if len(tasks) > 1:
            raise MemoryError
        return machine.advance(tasks)

    tasks = [Counting(2, "a"), Counting(3, "b")]
    assert await run_all(advance, tasks) == ["a batch failed"] * 2
    assert machine.diary == [["a"], ["b"], ["a"], ["b"], ["b"]]
    assert [task.error for task in tasks] == [None, None]


async def test_who_ends_in_a_failing_batch_is_not_advanced_alone() -> None:
    """A task that failed before the batch did, or that was stopped, is over."""
    machine = Machine()
    failed, stopped, other = Counting(1, "failed"), Counting(1, "stopped"), Counting(1, "other")

    def advance(tasks: Sequence[Counting]) -> bool:
        if len(tasks) > 1:
            failed.fail(NotReady("for a reason of its own"))
            stopped.stopped = True
            raise RuntimeError("secret of the device")
        return machine.advance(tasks)

    worker = DeviceWorker[Counting](advance)
    await worker.call(lambda: [worker.submit(task) for task in (failed, stopped, other)])
    await eventually(lambda: other.done)
    await worker.close()
    assert machine.diary == [["other"]]
    assert str(failed.error) == "for a reason of its own"
    assert (stopped.error, other.error) == (None, None)


async def test_a_step_of_many_parts_is_no_stall() -> None:
    """What counts is when the last part was finished."""
    clock, stalled_us = Clock(), list[int]()

    def advance(tasks: Sequence[Counting]) -> bool:
        clock.now_ns += 9_000
        if len(tasks) > 1:
            raise MemoryError
        stalled_us.append(worker.stalled_us)
        tasks[0].done = True
        return True

    worker, tasks = DeviceWorker[Counting](advance, clock_ns=clock), [Counting(1), Counting(1), Counting(1)]
    await worker.call(lambda: [worker.submit(task) for task in tasks])
    await eventually(lambda: all(task.done for task in tasks))
    await worker.close()
    assert stalled_us == [9, 9, 9]


def test_a_fault_of_its_own_ends_one_task() -> None:
    """Unless it has ended already: then there is no caller to inform."""
    running, done = Counting(1), Counting(1, done=True)
    for task in (running, done):
        with own_fault(task):
            raise KeyError("secret of a task")
    assert (running.done, str(running.error)) == (True, "the computation of a step failed")
    assert done.error is None
