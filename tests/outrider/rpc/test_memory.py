"""A budget of memory is never exceeded, is given in order, and none of it is lost, whatever leaves meanwhile."""

import asyncio
from random import Random

import pytest
from support.basics import eventually

from outrider.errors import Overloaded
from outrider.rpc.memory import SHORT_BYTES, STRANGERS, Memory

LONG = SHORT_BYTES + 1


async def test_a_budget_is_never_exceeded_and_comes_back() -> None:
    """However many take a part, and leave in the middle of their wait."""
    memory, chance, most = Memory(20 * LONG, wait_s=60), Random(1), 0

    async def hold(number: int) -> None:
        nonlocal most
        with memory.share(("", "a", "b")[number % 3]) as share:
            await share.take(chance.choice((1, 100, LONG, 3 * LONG)))
            most = max(most, memory.held)
            for _ in range(chance.randint(0, 5)):
                await asyncio.sleep(0)

    async def leave(number: int) -> None:
        task = asyncio.create_task(hold(number))
        for _ in range(chance.randint(0, 20)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})

    await asyncio.gather(*(leave(number) if number % 4 == 0 else hold(number) for number in range(400)))
    assert 10 * LONG < most <= memory.limit
    assert memory.held == 0


async def test_who_waits_is_served_in_order_and_not_for_ever() -> None:
    """A long one does not starve because of smaller ones that come later; where nothing comes free it learns so."""
    memory, order = Memory(8 * LONG, wait_s=60), list[int]()

    async def hold(number: int, num_bytes: int) -> None:
        with memory.share() as share:
            await share.take(num_bytes)
            order.append(number)

    with memory.share() as first:
        await first.take(6 * LONG)
        waiting = [asyncio.create_task(hold(1, 3 * LONG)), asyncio.create_task(hold(2, LONG))]
        await asyncio.sleep(0)
        await hold(3, 10)
        assert order == [3]
    await asyncio.gather(*waiting)
    assert order == [3, 1, 2]
    impatient = Memory(100, wait_s=0)
    with impatient.share() as all_of_it, impatient.share() as more:
        await all_of_it.take(100)
        with pytest.raises(Overloaded, match="requests hold 100 of 100 bytes, and 1 more did not come free within 0 s"):
            await more.take(1)


async def test_one_holder_leaves_half_to_the_others() -> None:
    """As long as it has more than one request; and the last eighth is for those that hold little."""
    memory = Memory(16 * LONG, wait_s=60)
    with memory.share("a") as one, memory.share("a") as two, memory.share("b") as three, memory.share("b") as four:
        await one.take(7 * LONG)
        waiting = asyncio.create_task(two.take(2 * LONG))
        await asyncio.sleep(0)
        # A share that waits for itself is in no other's way.
        await three.take(7 * LONG)
        await four.take(100)
        assert not waiting.done()
        one.give_back()
        await eventually(waiting.done)
    assert memory.held == 0


async def test_who_reads_is_hurried_by_those_it_keeps_waiting() -> None:
    """Alone it has all its time; then the rest of its hurried time, be it there before the others or after them."""
    memory, ended = Memory(16 * LONG, wait_s=60), list[str]()

    async def read(whose: str, num_bytes: int, hurried_s: float) -> None:
        with memory.share(whose) as share:
            await share.take(num_bytes)
            with pytest.raises(TimeoutError):
                async with memory.reading(share, 3600, hurried_s):
                    await asyncio.Event().wait()
            ended.append(whose)

    silent = [asyncio.create_task(read(whose, 7 * LONG, 0.01)) for whose in ("a", "b")]
    await eventually(lambda: memory.held == 14 * LONG)
    assert not ended
    with memory.share("c") as share:
        await share.take(2 * LONG)
        await asyncio.gather(*silent)
        # One that waits for the half of its own name hurries no other's reader.
        slow = asyncio.create_task(read("d", LONG, 0.01))
        first, second = (asyncio.create_task(read("e", 7 * LONG, 0.01)) for _ in range(2))
        await asyncio.gather(first)
        assert not slow.done()
        last = asyncio.create_task(read("f", 7 * LONG, 0.01))
        await asyncio.gather(slow, second)
        assert not last.done()
        last.cancel()
        await asyncio.wait({last})
    assert ended[:3] == ["a", "b", "e"]
    assert memory.held == 0


async def test_strangers_come_last() -> None:
    """Those who are known pass them."""
    memory, order = Memory(16 * LONG, wait_s=60), list[str]()

    async def hold(name: str, whose: str) -> None:
        with memory.share(whose) as share:
            await share.take(13 * LONG)
            order.append(name)

    with memory.share() as first:
        await first.take(2 * LONG)
        names = {"old": STRANGERS, "new": STRANGERS, "known": "a", "nameless": ""}
        waiting = [asyncio.create_task(hold(*each)) for each in names.items()]
        await asyncio.sleep(0)
        assert not order
    await asyncio.gather(*waiting)
    assert order == ["known", "nameless", "old", "new"]
