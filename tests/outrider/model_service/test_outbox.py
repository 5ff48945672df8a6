"""Tests of outrider.model_service.outbox: answers that wait on a link."""

import asyncio
import threading

from support.basics import PATIENCE_S

from outrider.errors import OutriderError, Overloaded
from outrider.estimates.timing import ComputeTimes
from outrider.model_service.outbox import MAX_UNSENT, MAX_UNSENT_OF_SESSION, Outbox, Outboxes, SessionAnswer
from outrider.rpc.fencing import Fence


def _answer(session_id: bytes, number: int, error: OutriderError | None = None) -> SessionAnswer[None]:
    return SessionAnswer(Fence(session_id, 1, number), None, 0, 0, ComputeTimes(), error)


async def test_answers_come_in_order_from_any_thread() -> None:
    """Those of another thread wake the loop where it rests, and none is lost between two looks."""
    outboxes = Outboxes()
    outbox: Outbox = Outbox(outboxes)

    def fill() -> None:
        for number in range(2000):
            outbox.put(_answer(bytes(16), number))
            if number % 3 == 0:
                outboxes.flush()
        outbox.end()
        outboxes.flush()

    thread = threading.Thread(target=fill)
    thread.start()
    got = list[int]()
    async with asyncio.timeout(PATIENCE_S):
        while answers := await outbox.take():
            got += [answer.fence.base_len for answer in answers]
    thread.join()
    assert got == list(range(2000))
    assert not outbox.overflow.done()


async def test_nobody_is_woken_before_the_device_rests() -> None:
    """So all of a step is taken at once; a pong does not wait, and takes with it what is there."""
    outboxes = Outboxes()
    outbox: Outbox = Outbox(outboxes)
    taking = asyncio.ensure_future(outbox.take())
    await asyncio.sleep(0)
    for number in range(5):
        outbox.put(_answer(bytes(16), number))
        await asyncio.sleep(0)
    assert not taking.done()
    outboxes.flush()
    assert [answer.fence.base_len for answer in await asyncio.wait_for(taking, PATIENCE_S)] == [0, 1, 2, 3, 4]
    taking = asyncio.ensure_future(outbox.take())
    await asyncio.sleep(0)
    outbox.put(_answer(bytes(16), 5))
    outbox.pong(Fence(bytes(16), 1, 9))
    assert [answer.fence.base_len for answer in await asyncio.wait_for(taking, PATIENCE_S)] == [5, 9]


async def test_an_outbox_is_bounded() -> None:
    """What one session or all have too much is dropped; the session is named once, the link in an error."""
    outbox: Outbox = Outbox(Outboxes())
    for number in range(MAX_UNSENT_OF_SESSION + 9):
        outbox.put(_answer(b"flooded", number))
    outbox.put(_answer(b"flooded", 0, Overloaded("why")))
    outbox.put(_answer(b"other", 0))
    assert (outbox.take_flooded(), outbox.take_flooded()) == ({b"flooded"}, set())
    answers = await outbox.take()
    assert [answer.fence.base_len for answer in answers[:-2]] == list(range(MAX_UNSENT_OF_SESSION))
    assert [answer.error is None for answer in answers[-2:]] == [False, True]
    for number in range(MAX_UNSENT + 9):
        outbox.put(_answer(number.to_bytes(16), number))
    outbox.flush()
    error = await asyncio.wait_for(outbox.overflow, PATIENCE_S)
    assert str(error) == f"the client has left {MAX_UNSENT} answers of this link unread"
    assert len(await outbox.take()) == MAX_UNSENT + 1


async def test_a_nudge_lets_go_of_who_waits_for_answers() -> None:
    """With what there is, which may be nothing; that is no end, after which nothing else comes."""
    outboxes = Outboxes()
    outbox: Outbox = Outbox(outboxes)
    taking = asyncio.ensure_future(outbox.take())
    await asyncio.sleep(0)
    outbox.nudge()
    assert await asyncio.wait_for(taking, PATIENCE_S) == []
    outbox.put(_answer(bytes(16), 5))
    outbox.nudge()
    outbox.end()
    answers = await asyncio.wait_for(outbox.take(), PATIENCE_S)
    assert [answer.fence.base_len for answer in answers or ()] == [5]
    assert [await asyncio.wait_for(outbox.take(), PATIENCE_S) for _ in range(2)] == [None, None]
