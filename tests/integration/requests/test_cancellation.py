"""Requests that are not wanted any more leave nothing, wherever they were when they were cancelled."""

import asyncio
import random

import pytest
from support.models.tiny_models import TARGET, TRAINED
from support.stack import RunningStack, answers, request_of, running_stack, token_ids

from outrider.cli.bench.common import OPENINGS

AT_A_TIME = 20


async def cancel_somewhere(stack: RunningStack, number: int, slots: asyncio.Semaphore) -> None:
    """Begins a request and cancels it: before its first message, or after as many as the number's own chance says."""
    chance = random.Random(number)
    counts = {"draft_count": chance.choice((0, 2, 5))} if chance.random() < 0.8 else {}
    request = request_of(text=OPENINGS[number % len(OPENINGS)], seed=number, max_tokens=500, ignore_eos=True, **counts)
    async with slots:
        call = stack.call(request)
        for _ in range(chance.randrange(12)):
            await call.read()
        call.cancel()


@pytest.mark.slow
async def test_two_hundred_cancelled_requests_leave_no_block_behind() -> None:
    """Afterwards both services hold no session and no block, and other requests were not disturbed."""
    fields = {"temperature": 0.8, "max_tokens": 48, "draft_count": 4}
    async with running_stack(str(TARGET), str(TRAINED)) as stack:
        undisturbed = token_ids(await answers(stack, OPENINGS[:4], **fields))
        slots = asyncio.Semaphore(AT_A_TIME)
        cancelling = asyncio.gather(*(cancel_somewhere(stack, number, slots) for number in range(200)))
        disturbed = token_ids(await answers(stack, OPENINGS[:4], **fields))
        await cancelling
        assert disturbed == undisturbed
