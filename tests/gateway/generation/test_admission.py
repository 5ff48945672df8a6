"""Places, one a sample, and the queue in front of them."""

import asyncio
import random

import pytest
from support.basics import eventually

from gateway.generation.admission import Admission, Reservation
from outrider.errors import NotReady, Overloaded


async def hold(admission: Admission, order: list[str], name: str, leave: asyncio.Event, priority: int = 0) -> None:
    """Takes a place until asked to leave."""
    async with admission.entry(priority):
        order.append(name)
        await leave.wait()


async def take_all(admission: Admission, order: list[str], name: str, count: int, opened: list[Reservation]) -> None:
    """Takes one place after the other until asked to leave; the code that looks at `opened` gives them back."""
    async with admission.entry() as places:
        opened.append(places)
        order.append(name)
        for _ in range(count - 1):
            await admission.take(places)
            order.append(name)
        await eventually(lambda: not places.taken)


async def test_who_waits_longest_comes_first() -> None:
    """One at a time, in the order in which they came."""
    admission, order = Admission(1, 10), list[str]()
    leaves = {name: asyncio.Event() for name in ("first", "second", "third")}
    tasks = []
    for name, leave in leaves.items():
        tasks.append(asyncio.create_task(hold(admission, order, name, leave)))
        await eventually(lambda: admission.waiting + len(order) == len(tasks))
    assert (order, admission.waiting) == (["first"], 2)
    for leave in leaves.values():
        leave.set()
    await asyncio.gather(*tasks)
    assert order == ["first", "second", "third"]
    assert admission.running == admission.waiting == 0


async def test_the_smallest_priority_comes_first() -> None:
    """Order in which requests came; within one priority the earlier is first. None that runs is held up by others."""
    chance, admission, order, leave = random.Random(5), Admission(1, 40), list[str](), asyncio.Event()
    priorities = [0, *(chance.choice((-3, 0, 0, 2, 10)) for _ in range(40))]
    tasks = []
    for number, priority in enumerate(priorities):
        tasks.append(asyncio.create_task(hold(admission, order, str(number), leave, priority)))
        await eventually(lambda: admission.waiting + len(order) == len(tasks))
    assert order == ["0"]
    leave.set()
    await asyncio.gather(*tasks)
    behind = sorted(range(1, 41), key=lambda number: (priorities[number], number))
    assert order == ["0", *map(str, behind)]
    assert behind != sorted(behind)


async def test_further_samples_of_a_request_wait_behind_smaller_priorities() -> None:
    """One that runs already has no right before them, nor does it keep those of its own priority out."""
    admission, order, opened, leave = Admission(1, 3), list[str](), list[Reservation](), asyncio.Event()
    tasks = [asyncio.create_task(take_all(admission, order, "large", 3, opened))]
    await eventually(lambda: order == ["large"])
    for name, priority in (("later", 1), ("equal", 0), ("before", -1)):
        tasks.append(asyncio.create_task(hold(admission, order, name, leave, priority)))
        await eventually(lambda: admission.waiting == len(tasks) - 1)
    leave.set()
    for num_taken in (3, 5):
        admission.give_back(opened[0])
        await eventually(lambda expected=num_taken: len(order) == expected)  # type: ignore[misc]
    admission.give_back(opened[0])
    await asyncio.gather(*tasks)
    assert order == ["large", "before", "large", "equal", "large", "later"]


async def test_samples_of_large_requests_take_turns_with_others() -> None:
    """A request of one sample waits for its turn, not for the hundred samples of those that came before."""
    admission, order, opened = Admission(2, 10), list[str](), list[Reservation]()
    tasks = []
    for name, count in (("large", 50), ("huge", 50), ("small", 1)):
        tasks.append(asyncio.create_task(take_all(admission, order, name, count, opened)))
        await eventually(lambda: "large" in order)
        await asyncio.sleep(0)
    assert order == ["large", "large"]
    for num_taken in range(3, 102):
        admission.give_back(next(places for places in opened if places.taken))
        await eventually(lambda expected=num_taken: len(order) == expected)  # type: ignore[misc]
    assert sorted(order) == 50 * ["huge"] + 50 * ["large"] + ["small"]
    assert "small" in order[:6]
    # As long as both wait, neither gets two places in a row.
    behind = [name for name in order[2:] if name != "small"]
    assert behind[:96:2] == 48 * [behind[0]]
    assert behind[1:96:2] == 48 * [behind[1]]
    while admission.running:
        admission.give_back(next(places for places in opened if places.taken))
    await asyncio.gather(*tasks)


async def test_requests_and_samples_are_bounded_whatever_comes() -> None:
    """Samples that run never exceed the places, nor requests that have some or wait the places and the queue; at the
    end nothing is held.
    """
    chance, admission, opened, served, refused = random.Random(7), Admission(4, 3), list[Reservation](), [0], [0]

    async def sample(places: Reservation) -> None:
        for _ in range(chance.randrange(3, 8)):
            await asyncio.sleep(0)
        admission.give_back(places)

    async def request() -> None:
        try:
            async with admission.entry(chance.choice((-1, 0, 0, 4))) as places, asyncio.TaskGroup() as group:
                opened.append(places)
                group.create_task(sample(places))
                for _ in range(chance.choice((0, 0, 1, 9))):
                    await admission.take(places)
                    group.create_task(sample(places))
            served[0] += 1
        except Overloaded:
            refused[0] += 1

    tasks = []
    for _ in range(600):
        tasks.append(asyncio.create_task(request()))
        for _ in range(chance.randrange(6)):
            await asyncio.sleep(0)
            assert sum(len(places.taken) for places in opened) <= admission.running <= 4
            assert admission.waiting + sum(bool(places.taken) for places in opened) <= 4 + 3
        if chance.random() < 0.1:
            chance.choice(tasks).cancel()
    await asyncio.wait(tasks)
    assert admission.running == admission.waiting == 0
    assert min(served[0], refused[0]) > 50


async def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    """No request waits beyond a full queue, and the error names a number of seconds."""
    admission, leave = Admission(1, 1), asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, [], str(each), leave)) for each in range(2)]
    await eventually(lambda: admission.waiting == 1)
    with pytest.raises(Overloaded, match="1 of 1 places are taken and 1 requests wait") as refused:
        admission.check()
    assert 1 <= int(refused.value.metadata["retry_after_s"]) <= 60
    leave.set()
    await asyncio.gather(*tasks)
    admission.check()


async def test_a_burst_of_requests_is_told_a_time_that_fits() -> None:
    """Nine turns of 0.3 s and not a second, when all there was before came alone; and more, as they take longer."""
    now_s = [0.0]
    admission, leave = Admission(8, 8, lambda: now_s[0]), asyncio.Event()
    for _ in range(60):
        async with admission.entry():
            now_s[0] += 0.3
    tasks = [asyncio.create_task(hold(admission, [], str(each), leave)) for each in range(16)]
    await eventually(lambda: admission.waiting == 8)
    assert admission.retry_after_s() == 3
    now_s[0] += 16
    assert admission.retry_after_s() == 18
    leave.set()
    await asyncio.gather(*tasks)


async def test_the_time_to_come_again_counts_those_who_go_before() -> None:
    """A full queue is full for all, but who has a smaller priority than all in it has a place next."""
    now_s = [0.0]
    admission, leave = Admission(1, 6, lambda: now_s[0]), asyncio.Event()
    running = asyncio.create_task(hold(admission, [], "running", leave))
    await eventually(lambda: admission.running == 1)
    waiting = [asyncio.create_task(hold(admission, [], "", leave, priority)) for priority in (0, 5, 0, 5, 0, 5)]
    await eventually(lambda: admission.waiting == 6)
    now_s[0] += 4
    assert [admission.retry_after_s(priority) for priority in (-1, 0, 4, 5, 6)] == [4, 16, 16, 28, 28]
    for priority, expected in ((-1, "4"), (0, "16"), (5, "28")):
        with pytest.raises(Overloaded) as refused, admission.arrival(priority):
            pytest.fail("one came in")
        assert refused.value.metadata["retry_after_s"] == expected
    leave.set()
    await asyncio.gather(running, *waiting)


async def test_requests_that_end_together_shared_their_time() -> None:
    """Although the last of them ends alone, when it would look like the only one."""
    now_s = [0.0]
    admission = Admission(8, 8, lambda: now_s[0])
    for _ in range(10):
        leave = asyncio.Event()
        tasks = [asyncio.create_task(hold(admission, [], str(each), leave)) for each in range(8)]
        await eventually(lambda: admission.running == 8)
        now_s[0] += 15
        leave.set()
        await asyncio.gather(*tasks)
    assert admission.retry_after_s() <= 3


async def test_a_request_that_runs_and_waits_for_more_leaves_the_queue_to_others() -> None:
    """It counts as waiting only while none of its samples runs."""
    admission, order, opened, leave = Admission(1, 1), list[str](), list[Reservation](), asyncio.Event()
    large = asyncio.create_task(take_all(admission, order, "large", 3, opened))
    await eventually(lambda: order == ["large"])
    assert admission.waiting == 0
    small = asyncio.create_task(hold(admission, order, "small", leave))
    await eventually(lambda: admission.waiting == 1)
    admission.give_back(opened[0])
    await eventually(lambda: order == ["large", "large"])
    admission.give_back(opened[0])
    await eventually(lambda: order == ["large", "large", "small"])
    with pytest.raises(Overloaded, match="1 of 1 places are taken and 1 requests wait"):
        admission.check()
    leave.set()
    await eventually(lambda: len(order) == 4)
    admission.give_back(opened[0])
    await asyncio.gather(large, small)


async def test_who_is_looked_at_is_counted_too() -> None:
    """The target may be away for long, and a client that waits for it holds a whole request."""
    admission = Admission(1, 1)
    with admission.arrival():
        with admission.arrival(), pytest.raises(Overloaded, match="2 requests are looked at"), admission.arrival():
            pytest.fail("a third one came in")
        with admission.arrival():
            assert admission.running == admission.waiting == 0


@pytest.mark.parametrize("turn_comes_first", [False, True])
async def test_who_leaves_the_queue_takes_nothing_along(*, turn_comes_first: bool) -> None:
    """Even when its turn comes in the very moment in which it leaves."""
    admission, leave = Admission(1, 5), asyncio.Event()
    async with admission.entry():
        waiter = asyncio.create_task(hold(admission, [], "waiter", leave))
        behind = asyncio.create_task(hold(admission, [], "behind", leave))
        await eventually(lambda: admission.waiting == 2)
        if not turn_comes_first:
            waiter.cancel()
    # Leaving a place does not let another task run, so this comes right after its turn.
    waiter.cancel()
    leave.set()
    await asyncio.wait({waiter, behind})
    assert waiter.cancelled()
    assert behind.exception() is None
    assert admission.running == admission.waiting == 0


async def test_a_closed_queue_turns_away_and_lets_those_who_run_end() -> None:
    """Requests that wait or come go elsewhere; those that have begun keep their places, and get the further ones."""
    admission, leave, order, opened = Admission(1, 3), asyncio.Event(), list[str](), list[Reservation]()
    running = asyncio.create_task(take_all(admission, order, "a", 2, opened))
    waiting = [asyncio.create_task(hold(admission, order, name, leave)) for name in "bc"]
    await eventually(lambda: admission.waiting == 2)
    admission.close()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in outcomes] == [NotReady, NotReady]
    assert (order, admission.running, admission.waiting) == (["a"], 1, 0)
    with pytest.raises(NotReady, match="stopping"):
        admission.check()
    admission.give_back(opened[0])
    await eventually(lambda: order == ["a", "a"])
    admission.give_back(opened[0])
    await running
    assert admission.running == 0


async def test_places_given_in_the_moment_of_closing_are_kept() -> None:
    """They were promised, and no other request could have them."""
    admission, leaves, order = Admission(1, 1), [asyncio.Event(), asyncio.Event()], list[str]()
    tasks = [asyncio.create_task(hold(admission, order, name, leaves[int(name)])) for name in "01"]
    await eventually(lambda: admission.waiting == 1)
    leaves[0].set()
    await eventually(lambda: admission.waiting == 0)
    admission.close()
    leaves[1].set()
    await asyncio.gather(*tasks)
    assert order == ["0", "1"]
