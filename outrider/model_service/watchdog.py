"""Ends a process whose device hangs.

A thread that hangs in C cannot be interrupted, and its process still answers pings and calls. So the process says that
it is not well, and ends; its supervisor starts another. Progress is what counts, never the length of a queue.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from outrider.errors import OutriderError

log = structlog.get_logger()

# Time for the health service to inform those who watch it.
LAST_WORDS_S = 1.0
LOOK_S = 1.0


async def watch(
    stalled_us: Callable[[], int],
    limit_s: float,
    say_unwell: Callable[[], Awaitable[None]],
    end: Callable[[int], object],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Gives a device up that has finished nothing for limit_s: turns health red by `say_unwell`, then calls `end`.

    One whose thread has died is noticed within LOOK_S. `end` gets the exit code, and does not return in a real process.
    """
    while (time_left_s := limit_s - stalled_us() / 1e6) > 0:
        await sleep(min(time_left_s, LOOK_S))
    log.error("the device has stalled", stalled_s=stalled_us() / 1e6, limit_s=limit_s)
    try:
        await say_unwell()
    except Exception:
        # It ends all the same.
        log.exception("health was not told")
    await sleep(LAST_WORDS_S)
    end(OutriderError.exit_code)
