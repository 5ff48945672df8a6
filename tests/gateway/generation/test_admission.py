"""Places and the queue in front of them."""

import asyncio

import pytest
from support.basics import eventually

from gateway.generation.frontend import Admission
from outrider.errors import InvalidRequest, NotReady, Overloaded


async def hold(admission: Admission, sample_count: int, order: list[str], name: str, leave: asyncio.Event) -> None:
    """Takes places until told to leave."""
    async with admission.place(sample_count):
        order.append(name)
        await leave.wait()


async def test_who_waits_longest_comes_first() -> None:
    """A large request is not overtaken by small ones that would fit, so that it gets its turn."""
    admission, order = Admission(4, 10), list[str]()
    leaves = {name: asyncio.Event() for name in ("first", "large", "small")}
    tasks = []
    for name, sample_count in (("first", 3), ("large", 4), ("small", 1)):
        tasks.append(asyncio.create_task(hold(admission, sample_count, order, name, leaves[name])))
        await eventually(lambda: admission.waiting + len(order) == len(tasks))
    assert order == ["first"]
    assert admission.waiting == 2
    for each in leaves.values():
        each.set()
    await asyncio.gather(*tasks)
    assert order == ["first", "large", "small"]
    assert admission.running == admission.waiting == 0


async def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    """Nobody behind a full queue waits, and the error names a number of seconds."""
    admission, leave = Admission(1, 1), asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, 1, [], str(each), leave)) for each in range(2)]
    await eventually(lambda: admission.waiting == 1)
    with pytest.raises(Overloaded, match="1 of 1 places are taken and 1 requests wait") as refused:
        admission.check(1)
    assert 1 <= int(refused.value.metadata["retry_after_s"]) <= 60
    leave.set()
    await asyncio.gather(*tasks)
    admission.check(1)


async def test_who_is_looked_at_is_counted_too() -> None:
    """The target may be away for long, and whoever waits for it holds a whole request."""
    admission = Admission(1, 1)
    with admission.arrival(1):
        with admission.arrival(1), pytest.raises(Overloaded, match="2 requests are looked at"), admission.arrival(1):
            pytest.fail("a third one came in")
        with admission.arrival(1):
            assert admission.running == admission.waiting == 0


def test_more_than_there_are_places_is_the_callers_fault() -> None:
    """Such a request would wait for ever."""
    with pytest.raises(InvalidRequest, match="sample_count is 3, but must be at most 2"):
        Admission(2, 5).check(3)


@pytest.mark.parametrize("turn_comes_first", [False, True])
async def test_who_leaves_the_queue_takes_nothing_along(*, turn_comes_first: bool) -> None:
    """Even when its turn comes in the very moment in which it leaves."""
    admission, leave = Admission(1, 5), asyncio.Event()
    async with admission.place(1):
        waiter = asyncio.create_task(hold(admission, 1, [], "waiter", leave))
        behind = asyncio.create_task(hold(admission, 1, [], "behind", leave))
        await eventually(lambda: admission.waiting == 2)
        if not turn_comes_first:
            waiter.cancel()
    # Leaving a place does not let another task run, so this comes right behind its turn.
    waiter.cancel()
    leave.set()
    await asyncio.wait({waiter, behind})
    assert waiter.cancelled()
    assert behind.exception() is None
    assert admission.running == admission.waiting == 0


async def test_a_closed_queue_turns_away_and_lets_those_who_run_end() -> None:
    """Whoever waits, comes, or has just been given places, which it keeps."""
    admission, leave, order = Admission(1, 3), asyncio.Event(), list[str]()
    tasks = [asyncio.create_task(hold(admission, 1, order, name, leave)) for name in "abc"]
    await eventually(lambda: admission.waiting == 2)
    admission.close()
    outcomes = asyncio.gather(*tasks, return_exceptions=True)
    await eventually(lambda: tasks[1].done() and tasks[2].done())
    assert (order, admission.running, admission.waiting) == (["a"], 1, 0)
    with pytest.raises(NotReady, match="stopping"):
        admission.check(1)
    leave.set()
    first, *others = await outcomes
    assert first is None
    assert [type(each) for each in others] == [NotReady, NotReady]
    assert admission.running == 0


async def test_places_given_in_the_moment_of_closing_are_kept() -> None:
    """They were promised, and nobody else could have them."""
    admission, leaves, order = Admission(1, 1), [asyncio.Event(), asyncio.Event()], list[str]()
    tasks = [asyncio.create_task(hold(admission, 1, order, name, leaves[int(name)])) for name in "01"]
    await eventually(lambda: admission.waiting == 1)
    leaves[0].set()
    await eventually(lambda: admission.waiting == 0)
    admission.close()
    leaves[1].set()
    await asyncio.gather(*tasks)
    assert order == ["0", "1"]
