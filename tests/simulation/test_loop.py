"""The virtual loop: time, order, hosts, and ends that never come."""

import asyncio

import pytest
from simulation.await_points import AwaitPoints
from simulation.loop import Deadlock, VirtualLoop, context_of, run


def test_time_jumps_to_the_next_timer() -> None:
    """An hour passes at once."""
    loop = VirtualLoop(0)

    async def wait() -> float:
        await asyncio.sleep(3600)
        return loop.time()

    assert 3600 <= run(wait(), loop) < 3600.01


def test_waiting_for_nothing_is_a_deadlock() -> None:
    """A run that nothing can ever end does not hang."""

    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(wait(), VirtualLoop(0))


async def notes(loop: VirtualLoop, frozen: str = "") -> list[str]:
    """What two hosts of three steps each do, in the order in which they do it."""
    done: list[str] = []

    async def steps(host: str) -> None:
        for step in range(3):
            done.append(f"{host}{step}")
            await asyncio.sleep(0)

    tasks = [loop.create_task(steps(host), context=context_of(host)) for host in "ab"]
    loop.freeze(frozen)
    await asyncio.sleep(1)
    done.append("second")
    loop.thaw(frozen)
    await asyncio.wait(tasks)
    return done


def test_hosts_are_interleaved_as_the_seed_says_and_each_keeps_its_order() -> None:
    """One seed gives one order, several give several, and none reorders a host."""
    orders = [run(notes(loop), loop) for loop in (VirtualLoop(seed) for seed in range(20))]
    again = VirtualLoop(3)
    assert run(notes(again), again) == orders[3]
    assert len({tuple(order) for order in orders}) > 5
    for order in orders:
        assert [note for note in order if note[0] == "a"] == ["a0", "a1", "a2"]


def test_a_frozen_host_goes_on_where_it_was() -> None:
    """Nothing happens in it before it is thawed, and then everything does."""
    loop = VirtualLoop(0)
    done = run(notes(loop, frozen="a"), loop)
    assert done.index("second") < done.index("a0")
    assert done[-1] == "a2"


def test_every_await_point_can_be_the_last() -> None:
    """A task is interrupted at just the point that is asked for."""

    async def at(point: int) -> list[int]:
        seen: list[int] = []

        async def steps() -> None:
            for step in range(5):
                seen.append(step)
                await asyncio.sleep(0.1)

        async def whole() -> None:
            await AwaitPoints(steps(), lambda ordinal: task.cancel() and None if ordinal == point else None)

        task = asyncio.ensure_future(whole())
        await asyncio.wait({task})
        assert task.cancelled() == (point < 5)
        return seen

    assert run(at(2), VirtualLoop(0)) == [0, 1, 2]
    assert run(at(9), VirtualLoop(0)) == [0, 1, 2, 3, 4]
