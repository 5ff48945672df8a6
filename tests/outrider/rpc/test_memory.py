"""A budget of memory is never exceeded, is given in order, and none of it is lost, whatever leaves meanwhile."""

import asyncio
from random import Random

import pytest
from support.basics import eventually

from outrider.errors import Overloaded
from outrider.rpc.memory import SHORT_BYTES, Memory

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
