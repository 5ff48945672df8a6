"""A session of a service on this side: its life, its bidirectional calls, and how long to wait for them.

Three habits of grpc.aio shape a call. Cancelling a read or a write cancels the whole call, so both happen in tasks that
outlive a deadline and a caller that leaves; one task reads for the whole life of the call, which is cheaper than one a
message. Dropping a call object does not cancel it, so `close` always does. A call that has ended answers a write with
InvalidStateError; a read tells the true reason. A deadline is a multiple of the usual time, so that no machine needs a
setting.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar, cast

import grpc
import structlog
from google.protobuf.message import Message

from gateway.rounds.round import TokenLog
from gateway.sessions.link import Replicas, ServiceLink
from outrider.errors import OutriderError, PeerLost
from outrider.parameters import SessionSpec
from outrider.rpc.errors import error_from, said_by_peer
from outrider.v1 import types_pb2

CLOSE_TIMEOUT_S = 2.0
MAX_DRIFT_REPAIRS = 3  # of one session: a service that goes on drifting only miscounts
# What gRPC itself says of a call whose connection or process is gone, by the version and by what lies between.
LOST_STATUSES = frozenset({"UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN"})
MAX_UNREAD = 1024  # messages that may wait here; more wait in the transport
SMALL_CATCH_UP = 32  # committed tokens that a draft reads in passing
CATCH_UP_TOKEN_S = 0.005  # allowance for each further one
MISSED_MAX_S = 1.0  # misses raise the deadline to this at most; only answers raise it further
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
CLOCK_MARGIN_S = 0.01  # the transport counts a call's time by a clock of its own

log = structlog.get_logger()

Sent = TypeVar("Sent", bound=Message)
Received = TypeVar("Received", bound=Message)
StreamT = TypeVar("StreamT", bound="MessageStream[Any, Any]")


class RemoteSession(Generic[StreamT]):
    """A session that outlives its streams; each begins an epoch. Leaving the context ends it on the service too."""

    def __init__(
        self, replicas: Replicas, spec: SessionSpec, token_log: TokenLog, session_id: bytes, deadline: "Deadline"
    ) -> None:
        self._replicas = replicas
        self._spec = spec
        self._log = token_log
        self._session_id = session_id
        self._deadline = deadline
        self._stream: StreamT | None = None
        self._epoch = 0
        self._num_repairs = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exit: object) -> None:
        for link in self._replicas.links:
            link.breaker.left(self._session_id)
        if self._stream is not None:
            self._stream.finish(self._fence())

    async def _forget(self) -> None:
        """Ends the stream; the service keeps the session on a lease."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close()

    def _fence(self, base_len: int | None = None) -> types_pb2.Fence:
        base_len = len(self._log) if base_len is None else base_len
        return types_pb2.Fence(session_id=self._session_id, epoch=self._epoch, base_len=base_len)


class MessageStream(Generic[Sent, Received]):
    """Messages of one session to and from one service; every failure of the call is raised as an OutriderError."""

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[Sent, Received]",
        request: Callable[..., Sent],
        peer: ServiceLink,
        spec: SessionSpec,
        token_log: TokenLog,
    ) -> None:
        """Takes a call that has just begun, and what makes its requests."""
        self.peer = peer
        self._spec = spec
        self._log = token_log
        self._call = call
        self._request = request
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
            await self._wait_for_change(timeout_s)
        if not self._unread:
            raise self._end or TimeoutError
        if len(self._unread) == MAX_UNREAD:
            self._wake()
        message = self._unread.popleft()
        self._num_bytes += message.ByteSize()
        return message

    def take_bytes(self) -> int:
        """Bytes of the messages, both ways, since the last call."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        return num_bytes

    def finish(self, fence: types_pb2.Fence) -> None:
        """Ends the session and the call, in the background; the fence has the session's newest epoch."""
        self.peer.finish(self.close(self._request(fence=fence, close=types_pb2.CloseSession())))

    async def close(self, last: Sent | None = None) -> None:
        """Sends a last message and waits until the other end has ended the call; cancels the call in any case."""
        try:
            if last is not None:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self.write(last, CLOSE_TIMEOUT_S)
                    if self._writing is not None:
                        await self._writing
                    with suppress(asyncio.InvalidStateError):
                        await self._call.done_writing()
                    while True:
                        await self.read(CLOSE_TIMEOUT_S)
        except (TimeoutError, OutriderError):
            pass  # The other end is gone or hangs. Its lease on the session frees what this message could not.
        finally:
            self._call.cancel()
            for task in filter(None, (self._reading, self._writing)):
                # How an abandoned task ended is looked at, or asyncio would log it as forgotten.
                task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
                task.cancel()

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
                    raise PeerLost(f"{self.peer} sent a message that is not valid")
                self._unread.append(cast("Received", message))
                self._wake()
                while len(self._unread) >= MAX_UNREAD:
                    await self._wait_for_change(None)
            self._end = PeerLost(f"{self.peer} ended the session")
        except PeerLost as error:
            self._end = error
            self._call.cancel()
        except grpc.aio.AioRpcError as error:
            self._end = self._failure(error)
        except asyncio.CancelledError:
            self._end = PeerLost(f"the session with {self.peer} was cancelled on this side")
            if not self._call.cancelled():
                raise
        finally:
            self._wake()

    async def _wait_for_change(self, timeout_s: float | None) -> None:
        """Waits until `_wake`, or until the time is over."""
        loop = asyncio.get_running_loop()
        self._changed = loop.create_future()
        timer = None if timeout_s is None else loop.call_later(timeout_s, self._wake)
        try:
            await self._changed
        finally:
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def _failure(self, error: grpc.aio.AioRpcError) -> OutriderError:
        """What the peer stated, as it is; for a failure of gRPC's own, a sentence that names the peer."""
        status = error.code().name
        if said_by_peer(error) or status not in LOST_STATUSES:
            return error_from(error)
        log.info("stream lost", service=str(self.peer), status=status, details=error.details())
        what = "was lost in the middle of the request" if self._has_left else "cannot be reached"
        return PeerLost(f"{self.peer} {what}", status=status)


class RequestExpired(OutriderError):
    """The client gave the request less time than it took."""

    status = "DEADLINE_EXCEEDED"
    reason = "REQUEST_EXPIRED"
    exit_code = 75


@dataclass(frozen=True, slots=True)
class Deadline:
    """When the client gives up, on the running loop's clock; None for no end."""

    at_s: float | None = None

    @classmethod
    def after(cls, time_left_s: float | None) -> Self:
        """The end after so many seconds; None for no end."""
        return cls(None if time_left_s is None else asyncio.get_running_loop().time() + time_left_s)

    def left_s(self) -> float | None:
        """The timeout of every call for this request; None for no limit."""
        return None if self.at_s is None else max(0.0, self.at_s - asyncio.get_running_loop().time())

    @property
    def has_come(self) -> bool:
        """Whether calls fail because of this, and not because of their services."""
        left_s = self.left_s()
        return left_s is not None and left_s <= CLOCK_MARGIN_S


NEVER = Deadline()


@dataclass(slots=True)
class DraftDeadline:
    """Deadline of a draft's answer: factor times the moving average of its answers, between min_s and max_s."""

    min_s: float = 0.25
    max_s: float = 5.0
    factor: float = 20.0
    _mean_s: float | None = None

    def seconds(self, catch_up_count: int) -> float:
        """Time to wait for an answer for which the draft has to read catch_up_count tokens first."""
        usual_s = self.max_s if self._mean_s is None else self.factor * self._mean_s
        allowance_s = CATCH_UP_TOKEN_S * max(0, catch_up_count - SMALL_CATCH_UP)
        return min(max(usual_s, self.min_s), self.max_s) + allowance_s

    def observe(self, answer_s: float, catch_up_count: int) -> None:
        """Learns from an answer."""
        if catch_up_count <= SMALL_CATCH_UP:
            self._mean_s = answer_s if self._mean_s is None else 0.9 * self._mean_s + 0.1 * answer_s

    def missed(self) -> None:
        """Learns from a deadline that passed, which says only that the draft is slower; it may even hang.

        So the deadline itself is no answer's time: fed back, it would raise the next one without end.
        """
        max_s = MISSED_MAX_S / self.factor
        self._mean_s = max_s if self._mean_s is None else max(self._mean_s, min(2 * self._mean_s, max_s))


@dataclass(slots=True)
class RoundDeadline:
    """When to ask whether the target still works: factor times the moving average of its answers, within bounds.

    Passing it costs one question and no request, so it may be short. `max_s` bounds what a slow start would teach.
    """

    min_s: float = 2.0
    max_s: float = 30.0
    factor: float = 20.0
    _mean_s: float = 0.0

    def seconds(self) -> float:
        """Time to wait for a verdict before the target is looked at."""
        return min(max(self.factor * self._mean_s, self.min_s), self.max_s)

    def observe(self, answer_s: float) -> None:
        """Learns from an answer."""
        self._mean_s += 0.1 * (min(answer_s, self.max_s) - self._mean_s)


@dataclass(frozen=True, slots=True)
class TargetTimeouts:
    """With a target: until it is looked at; seconds for which its device may finish nothing, it may be away, and it may
    work without an answer before the session is opened again.
    """

    deadline: RoundDeadline = field(default_factory=RoundDeadline)
    stall_s: float = 30.0
    rebuild_budget_s: float = 30.0
    answer_s: float = 60.0


class RetryBudget:
    """The time within one round in which a request has no target. Begins with the first fault."""

    def __init__(self, budget_s: float, now_s: float) -> None:
        self.until_s = now_s + budget_s
        self._budget_s = budget_s
        self._num_faults = 0

    def pause_s(self, fault: OutriderError, now_s: float) -> float:
        """Seconds to wait before the next attempt; raises PeerLost when the budget is used up.

        The first fault begins its time, because the round before it may have taken long.
        """
        self._num_faults += 1
        if self._num_faults == 1:
            self.until_s = now_s + self._budget_s
            return 0.0
        if now_s >= self.until_s:
            message = f"{fault.message}, and no target took the request over within {self._budget_s:g} seconds"
            raise PeerLost(message) from fault
        return float(min(FIRST_PAUSE_S * 2 ** (self._num_faults - 2), LONGEST_PAUSE_S, self.until_s - now_s))
