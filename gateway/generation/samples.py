"""Several samples of one request: a seed for each, and their events in one stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

EventT = TypeVar("EventT")


@dataclass(frozen=True, slots=True)
class Ended:
    """Says that a stream has no more events, and why if it failed."""

    error: Exception | None = None


async def merged(streams: Sequence[AsyncGenerator[EventT, None]]) -> AsyncGenerator[EventT, None]:
    """Yields the events of all streams as they come, each stream's in its order, until all have ended.

    No stream runs more than an event or two ahead of the reader. What one raises ends all of them, and is raised; all
    are closed before this generator is.
    """
    events: asyncio.Queue[EventT | Ended] = asyncio.Queue(maxsize=1)
    turn = asyncio.Lock()
    tasks = [asyncio.create_task(_pump(stream, events, turn)) for stream in streams]
    num_running = len(tasks)
    try:
        while num_running:
            event = await events.get()
            if not isinstance(event, Ended):
                yield event
            elif event.error is not None:
                raise event.error
            else:
                num_running -= 1
    finally:
        for task in tasks:
            task.cancel()
        # A task that is cancelled still closes its stream, which tells the services.
        await asyncio.wait(tasks)


async def _pump(
    stream: AsyncGenerator[EventT, None], events: asyncio.Queue[EventT | Ended], turn: asyncio.Lock
) -> None:
    ended = Ended()
    try:
        async with aclosing(stream):
            async for event in stream:
                # A full queue lets whoever comes just in time go before those who wait; a lock does not.
                async with turn:
                    await events.put(event)
    except Exception as error:  # noqa: BLE001 - it is raised where the events are read
        ended = Ended(error)
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        # Nobody reads any more, and a full queue would be waited for without end.
        return
    async with turn:
        await events.put(ended)
