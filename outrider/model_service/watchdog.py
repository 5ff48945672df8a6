"""Ends a process whose device hangs.

A thread that hangs in C cannot be interrupted, and its process still answers pings and calls. So the process says that
it is not well, and ends; its supervisor starts another. Progress is what counts, never the length of a queue.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from outrider.errors import OutriderError

log = structlog.get_logger()

# Time for the health service to tell those who watch it.
LAST_WORDS_S = 1.0


def wait_s(stalled_us: int, limit_s: float) -> float:
    """How long nobody needs to look again; 0 when a device that has finished nothing for stalled_us is given up."""
    return max(0.0, limit_s - stalled_us / 1e6)


class Watchdog:
    """Looks no more often than it has to: a device that is well now cannot be stalled before the limit has passed."""

    def __init__(
        self,
        stalled_us: Callable[[], int],
        limit_s: float,
        say_unwell: Callable[[], Awaitable[None]],
        end: Callable[[int], object],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`say_unwell` turns health red; `end` is called with the exit code, and does not return in a real process."""
        self._stalled_us = stalled_us
        self._limit_s = limit_s
        self._say_unwell = say_unwell
        self._end = end
        self._sleep = sleep

    async def watch(self) -> None:
        """Returns only when the device has been given up and `end` has returned."""
        while (time_left_s := wait_s(self._stalled_us(), self._limit_s)) > 0:
            await self._sleep(time_left_s)
        log.error("the device has stalled", stalled_s=self._stalled_us() / 1e6, limit_s=self._limit_s)
        await self._say_unwell()
        await self._sleep(LAST_WORDS_S)
        self._end(OutriderError.exit_code)
