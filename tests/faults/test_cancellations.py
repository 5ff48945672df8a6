"""Many requests whose clients leave at any moment: nothing of them stays anywhere."""

import asyncio
import random
from collections import Counter

import grpc
import pytest
from support.basics import eventually
from support.stack import RunningStack, request_of, running_stack

from outrider.cli.bench.common import OPENINGS
from outrider.v1 import generation_service_pb2 as pb

NUM_REQUESTS = 1000
AT_A_TIME = 16
MAX_TOKENS = 24
LONGEST_S = 0.06
LONG_PROMPT = " ".join(OPENINGS)


async def cancel_at_random(stack: RunningStack, number: int, slots: asyncio.Semaphore) -> str:
    """Begins a request and leaves some time after some message, or its beginning; returns how far it came."""
    chance = random.Random(number)
    text = LONG_PROMPT[: chance.randrange(1, len(LONG_PROMPT))] if chance.random() < 0.06 else OPENINGS[number % 50]
    counts = {} if chance.random() < 0.2 else {"draft_count": chance.choice((0, 2, 5))}
    max_tokens = chance.randrange(1, MAX_TOKENS)
    request = request_of(text=text, seed=number, max_tokens=max_tokens, ignore_eos=True, **counts)
    stage, num_messages = "silent", chance.randrange(4)
    async with slots:
        call = stack.call(request)
        try:
            async with asyncio.timeout(None) as patience:
                for _ in range(num_messages):
                    stage = _stage(await call.read())
                patience.reschedule(asyncio.get_running_loop().time() + LONGEST_S * chance.random())
                while stage != "ended":
                    stage = _stage(await call.read())
        except TimeoutError:
            pass  # it is the client that has enough
        finally:
            call.cancel()
    return stage


def _stage(message: pb.GenerateResponse) -> str:
    """Moments that a message marks."""
    return "speaking" if message is not grpc.aio.EOF and message.HasField("round") else "ended"


def kinds_of_task() -> Counter[str]:
    """How many tasks there are of each kind; gRPC always has one a method, which waits for the next call."""
    return Counter(getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())


@pytest.mark.slow
async def test_a_thousand_requests_cancelled_at_random_moments() -> None:
    """Before their first token, in the middle of their output or after it: no session, block or task is left."""
    async with running_stack() as stack:
        await stack.generate(text=OPENINGS[0], max_tokens=8)
        await stack.quiet()
        before = kinds_of_task()
        slots = asyncio.Semaphore(AT_A_TIME)
        stages = await asyncio.gather(*(cancel_at_random(stack, number, slots) for number in range(NUM_REQUESTS)))
        assert set(stages) == {"silent", "speaking", "ended"}
        await stack.quiet()
        await eventually(lambda: not kinds_of_task() - before)
