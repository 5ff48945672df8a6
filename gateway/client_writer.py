"""Messages on their way to one client, at most one at a time. Knows no rounds and no requests.

The next round begins while the message about the one before is still leaving, so the way to the client costs no round
anything. A client that does not read is not waited for without end.
"""

import asyncio
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.message import Message

from outrider.errors import OutriderError


class ClientStalled(OutriderError):
    """The client must read what it asked for."""

    status = "DEADLINE_EXCEEDED"
    reason = "CLIENT_STALLED"
    exit_code = 75


class ClientWriter:
    """Writes to a call. Leaving the context gives up what has not left; `flush` waits for it."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], stall_s: float) -> None:
        """A message may take stall_s seconds."""
        self._context = context
        self._stall_s = stall_s
        self._writing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.cancel()
            # Whatever the write says now is about a call that has ended for a better reason.
            await asyncio.wait({writing})
            if not writing.cancelled():
                writing.exception()

    async def write(self, message: Message) -> None:
        """Puts a message on its way as soon as the one before has left; raises ClientStalled about that one."""
        await self.flush()
        self._writing = asyncio.ensure_future(self._context.write(message))

    async def flush(self) -> None:
        """Waits until the last message has left. Raises ClientStalled, and what a write raises when its client left."""
        writing = self._writing
        if writing is None:
            return
        if not writing.done():
            await asyncio.wait({writing}, timeout=self._stall_s)
        if not writing.done():
            raise ClientStalled(f"The client read nothing for {self._stall_s:g} seconds")
        self._writing = None
        writing.result()
