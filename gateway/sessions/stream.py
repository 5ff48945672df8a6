"""One bidirectional call of one session: its messages, their deadlines and its end.

Three habits of grpc.aio shape it. Cancelling a read or a write cancels the whole call, so both happen in tasks that
outlive a deadline and a caller that leaves; one task reads for the whole life of the call, which is cheaper than one a
message. Dropping a call object does not cancel it, so `close` always does. A call that has ended answers a write with
InvalidStateError; a read tells the true reason.
"""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

import grpc
import structlog
from google.protobuf.message import Message

from outrider.errors import OutriderError, PeerLost
from outrider.rpc.errors import error_from, said_by_peer

# What gRPC itself says of a call whose connection or process is gone, by the version and by what lies between.
LOST_STATUSES = frozenset({"UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN"})
MAX_UNREAD = 1024  # messages that may wait here; more wait in the transport

log = structlog.get_logger()

Sent = TypeVar("Sent", bound=Message)
Received = TypeVar("Received", bound=Message)


class MessageStream(Generic[Sent, Received]):
    """Messages to and from one peer; every failure of the call is raised as an OutriderError."""

    def __init__(self, call: "grpc.aio.StreamStreamCall[Sent, Received]", peer: str) -> None:
        """Takes a call that has just begun, and the name of its other end for messages to people."""
        self._call = call
        self._peer = peer
        self._unread: deque[Received] = deque()
        self._end: OutriderError | None = None  # why nothing comes behind what is unread
        self._changed: asyncio.Future[None] | None = None  # somebody waits for a message, or for room
        self._reading = asyncio.create_task(self._read())
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
        if not self._unread and self._end is None:
            await self._change(timeout_s)
        if not self._unread:
            raise self._end or TimeoutError
        if len(self._unread) == MAX_UNREAD:
            self._tell()
        message = self._unread.popleft()
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
                    await self._send_last(last, timeout_s)
        except (TimeoutError, OutriderError):
            pass  # The other end is gone or hangs. Its lease on the session frees what this message could not.
        finally:
            self._call.cancel()
            for task in filter(None, (self._reading, self._writing)):
                task.add_done_callback(_retrieve)
                task.cancel()

    async def _send_last(self, last: Sent, timeout_s: float) -> None:
        await self.write(last, timeout_s)
        if self._writing is not None:
            await self._writing
        with suppress(asyncio.InvalidStateError):
            await self._call.done_writing()
        while True:
            await self.read(timeout_s)

    async def _write(self, message: Sent) -> None:
        # Whatever ends the call here is what the next read raises.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(message)
            self._has_left = True

    async def _read(self) -> None:
        """Takes messages in until the call ends."""
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                if message is None:
                    # This is how grpc.aio says that a message could not be parsed.
                    raise PeerLost(f"{self._peer} sent a message that is not valid")
                self._unread.append(cast("Received", message))
                self._tell()
                while len(self._unread) >= MAX_UNREAD:
                    await self._change(None)
            self._end = PeerLost(f"{self._peer} ended the session")
        except PeerLost as error:
            self._end = error
            self._call.cancel()
        except grpc.aio.AioRpcError as error:
            self._end = self._failure(error)
        except asyncio.CancelledError:
            self._end = PeerLost(f"the session with {self._peer} was cancelled on this side")
            if not self._call.cancelled():
                raise
        finally:
            self._tell()

    async def _change(self, timeout_s: float | None) -> None:
        """Waits until `_tell`, or until the time is over."""
        loop = asyncio.get_running_loop()
        changed = self._changed = loop.create_future()
        timer = None if timeout_s is None else loop.call_later(timeout_s, _settle, changed)
        try:
            await changed
        finally:
            if timer is not None:
                timer.cancel()

    def _tell(self) -> None:
        if self._changed is not None:
            _settle(self._changed)

    def _failure(self, error: grpc.aio.AioRpcError) -> OutriderError:
        """What the peer stated, as it is; for a failure of gRPC's own, a sentence that names the peer."""
        status = error.code().name
        if said_by_peer(error) or status not in LOST_STATUSES:
            return error_from(error)
        log.info("stream lost", service=self._peer, status=status, details=error.details())
        what = "was lost in the middle of the request" if self._has_left else "cannot be reached"
        return PeerLost(f"{self._peer} {what}", status=status)


def _settle(changed: "asyncio.Future[None]") -> None:
    if not changed.done():
        changed.set_result(None)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Takes note of how an abandoned task ended, which asyncio would otherwise log as forgotten."""
    if not task.cancelled():
        task.exception()
