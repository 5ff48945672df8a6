"""One bidirectional call of one session. Knows nothing of sessions, only of messages, deadlines and ends.

Three habits of grpc.aio shape it. Cancelling a read or a write cancels the whole call, so both are tasks that outlive a
deadline and a caller that leaves, and a read is taken up by the next one. Dropping a call object does not cancel it, so
`close` always does. A call that has ended answers a write with InvalidStateError; a read tells the true reason.
"""

import asyncio
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

import grpc
import structlog
from google.protobuf.message import Message

from outrider.errors import OutriderError, PeerLost
from outrider.rpc import error_from, said_by_peer

# What gRPC itself says of a call whose connection or process is gone, by the version and by what lies between.
LOST_STATUSES = frozenset({"UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN"})

log = structlog.get_logger()

Sent = TypeVar("Sent", bound=Message)
Received = TypeVar("Received", bound=Message)


class MessageStream(Generic[Sent, Received]):
    """Messages to and from one peer; every failure of the call is raised as an OutriderError."""

    def __init__(self, call: "grpc.aio.StreamStreamCall[Sent, Received]", peer: str) -> None:
        """Takes a call that has just begun, and the name of its other end for messages to people."""
        self._call = call
        self._peer = peer
        self._reading: asyncio.Task[Received | None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._has_left = False  # a message reached a connection
        self._num_bytes = 0

    async def write(self, message: Sent, timeout_s: float) -> None:
        """Puts a message on its way behind the one before; raises TimeoutError when that has not left by then.

        It is not waited for, so that sending and reading overlap. A message that cannot be sent is a call that has
        ended, and the next read says why.
        """
        if self._writing is not None and not self._writing.done():
            await asyncio.wait({self._writing}, timeout=timeout_s)
            if not self._writing.done():
                raise TimeoutError
        self._num_bytes += message.ByteSize()
        self._writing = asyncio.create_task(self._write(message))

    async def read(self, timeout_s: float) -> Received:
        """Next message; raises TimeoutError when it takes longer, PeerLost when the other end has ended the call."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        done, _ = await asyncio.wait({self._reading}, timeout=timeout_s)
        if not done:
            raise TimeoutError
        reading, self._reading = self._reading, None
        message = reading.result()
        if message is None:
            raise PeerLost(f"{self._peer} ended the session")
        self._num_bytes += message.ByteSize()
        return message

    def take_bytes(self) -> int:
        """Bytes of the messages, both ways, since the last call."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        return num_bytes

    async def close(self, last: Sent | None, timeout_s: float) -> None:
        """Sends a last message and waits until the other end has ended the call; cancels the call in any case."""
        try:
            if last is not None:
                async with asyncio.timeout(timeout_s):
                    await self._say_goodbye(last, timeout_s)
        except (TimeoutError, OutriderError):
            pass  # The other end is gone or hangs. Its lease on the session frees what this message could not.
        finally:
            self._call.cancel()
            for task in filter(None, (self._reading, self._writing)):
                task.add_done_callback(_retrieve)
                task.cancel()
            self._reading = None

    async def _say_goodbye(self, last: Sent, timeout_s: float) -> None:
        await self.write(last, timeout_s)
        if self._writing is not None:
            await self._writing
        with suppress(asyncio.InvalidStateError):
            await self._call.done_writing()
        while True:
            reading, self._reading = self._reading or asyncio.create_task(self._read()), None
            if await reading is None:
                return

    async def _write(self, message: Sent) -> None:
        # Whatever ends the call here is what the next read raises.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(message)
            self._has_left = True

    async def _read(self) -> Received | None:
        """One message, or None at the end."""
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error
        except asyncio.CancelledError:
            if self._call.cancelled():
                raise PeerLost(f"the session with {self._peer} was cancelled on this side") from None
            raise
        return None if message is grpc.aio.EOF else cast("Received", message)

    def _failure(self, error: grpc.aio.AioRpcError) -> OutriderError:
        """What the peer stated, as it is; for a failure of gRPC's own, a sentence that names the peer."""
        status = error.code().name
        if said_by_peer(error) or status not in LOST_STATUSES:
            return error_from(error)
        log.info("stream lost", service=self._peer, status=status, details=error.details())
        what = "was lost in the middle of the request" if self._has_left else "cannot be reached"
        return PeerLost(f"{self._peer} {what}", status=status)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Takes note of how an abandoned task ended, which asyncio would otherwise log as forgotten."""
    if not task.cancelled():
        task.exception()
