"""Answers on their way from the device thread to one stream of a client."""

import asyncio
from collections import deque
from typing import Any

from outrider.errors import Overloaded

# Eight windows of unasked verdicts: a client that asks for all of them again a few times is still heard.
MAX_UNSENT_ANSWERS = 2048


class Outbox:
    """Answers in order; filled from any thread, emptied on the loop that made it. Owns the sessions of its stream.

    A client that leaves more than `maximum` of them unread is given up: `overflow` has the error then.
    """

    def __init__(self, maximum: int = MAX_UNSENT_ANSWERS) -> None:
        self._loop = asyncio.get_running_loop()
        self._maximum = maximum
        self._items: deque[Any] = deque()
        self._is_waking = False
        self._wanted: asyncio.Future[None] | None = None
        self.overflow: asyncio.Future[Overloaded] = self._loop.create_future()

    def put(self, answer: object) -> None:
        """Adds an answer, the error that ends the stream, or None for its end behind the answers so far."""
        if len(self._items) <= self._maximum:
            self._items.append(answer)
        # One wake serves all that is put before the loop gets to it. A loop that has been closed has no streams left.
        if not self._is_waking and not self._loop.is_closed():
            self._is_waking = True
            self._loop.call_soon_threadsafe(self._wake)

    async def get(self) -> Any:  # noqa: ANN401 - what was put
        """The next answer, None at the end; raises the error that ends the stream."""
        while not self._items:
            self._wanted = self._loop.create_future()
            await self._wanted
        item = self._items.popleft()
        if isinstance(item, Exception):
            raise item
        return item

    def _wake(self) -> None:
        # Before the looking, so that whatever is put from now on wakes again.
        self._is_waking = False
        if len(self._items) > self._maximum and not self.overflow.done():
            message = f"the client has left {self._maximum} answers of this stream unread"
            self.overflow.set_result(Overloaded(message, limit=self._maximum))
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)
