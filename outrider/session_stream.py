"""One session's stream on the server's side: requests are read while answers are computed. Knows no messages.

Reading and writing are separate, because a newer epoch or a close has to be seen while a job runs. A stream ends when
its client ends it, when a request says so, or with the first error; a client that cancels while nothing is under way
looks like one that has ended its stream, so nothing may depend on which it was.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Generic, Protocol, TypeVar

from outrider.errors import InvalidRequest, NotReady
from outrider.fencing import Fence

AnswerT = TypeVar("AnswerT")
RequestT = TypeVar("RequestT")
T = TypeVar("T")


class Device(Protocol):
    """The device thread."""

    def call(self, fn: Callable[[], T]) -> Awaitable[T]:
        """Runs `fn` between two forwards; it is queued at once, whether anybody awaits it or not."""
        ...


class Leases(Protocol):
    """The part of a session table that the end of a stream concerns; see outrider.sessions.SessionTable."""

    lease_s: float

    def leave(self, session_id: bytes, owner: object) -> bool:
        """Begins a lease, if the session is there and the owner's."""
        ...

    def sweep(self) -> int:
        """Ends leases."""
        ...


class Outbox(Generic[AnswerT]):
    """Answers on their way to one stream, in order; filled from any thread, emptied on the loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[AnswerT | Exception | None] = asyncio.Queue()

    def put(self, answer: AnswerT | Exception) -> None:
        """Adds an answer, or the error that ends the stream."""
        self._add(answer)

    def end(self) -> None:
        """Ends the stream behind the answers so far."""
        self._add(None)

    async def answers(self) -> AsyncIterator[AnswerT]:
        """Yields answers until the end; raises the error that ends the stream."""
        while (item := await self._items.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    def _add(self, item: AnswerT | Exception | None) -> None:
        # A loop that has been closed has no streams left.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)


class SessionStream(Generic[RequestT, AnswerT]):
    """A stream and the one session that it carries; owns the session until another stream opens it again."""

    def __init__(self, device: Device, leases: Leases) -> None:
        self.outbox = Outbox[AnswerT]()
        self._device = device
        self._leases = leases
        self._session_id: bytes | None = None

    def admit(self, fence: Fence, action: str | None, *, is_open: bool) -> None:
        """Checks what the protocol asks of any request: an action, an open first, and one session a stream.

        Raises InvalidRequest.
        """
        if action is None:
            raise InvalidRequest("action", "absent", "set")
        if self._session_id is None and not is_open:
            raise InvalidRequest("action", action, "open in the first message of a stream")
        if self._session_id not in {None, fence.session_id}:
            raise InvalidRequest("fence.session_id", fence.session_id.hex(), "that of the stream's first message")
        self._session_id = fence.session_id

    async def carry(
        self,
        requests: AsyncIterator[RequestT],
        write: Callable[[AnswerT], Awaitable[None]],
        handle: Callable[[RequestT], Awaitable[bool]],
    ) -> None:
        """Hands requests to `handle` until it returns False, and writes the outbox, until the stream ends.

        Raises what `handle` raised and what the outbox was given. Afterwards the session, unless it was closed, is on a
        lease and has no job.
        """
        reader = asyncio.create_task(self._read(requests, handle))
        try:
            async for answer in self.outbox.answers():
                await write(answer)
        finally:
            # Once cancelled, the reader queues no more jobs, so the lease begins behind its last one.
            reader.cancel()
            leaving = asyncio.ensure_future(self._leave(self._queue_leave()))
            await asyncio.wait({reader, leaving})

    async def _read(self, requests: AsyncIterator[RequestT], handle: Callable[[RequestT], Awaitable[bool]]) -> None:
        try:
            async for request in requests:
                if not await handle(request):
                    break
        except Exception as error:  # noqa: BLE001 - it is raised where the answers are written, behind earlier ones
            self.outbox.put(error)
        else:
            self.outbox.end()

    def _queue_leave(self) -> Awaitable[bool] | None:
        """Queues the lease at once, because a handler may be cancelled a second time."""
        # A service that has stopped has freed everything.
        with suppress(NotReady):
            return self._device.call(partial(self._leases.leave, self._session_id or b"", self))
        return None

    async def _leave(self, leaving: Awaitable[bool] | None) -> None:
        if leaving is not None and await leaving:
            asyncio.get_running_loop().call_later(self._leases.lease_s, self._sweep)

    def _sweep(self) -> None:
        """Ends the lease when its time has come; the device thread decides whether it has."""
        with suppress(NotReady):
            self._device.call(self._leases.sweep)
