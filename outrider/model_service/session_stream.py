"""The door to a service's sessions: one stream a session, the same for draft and target.

Requests are read while answers are computed, because a newer epoch or a close has to be seen while a job runs. Fences
are checked, a close frees, a ping is answered at once; everything else becomes a job for the device. A stream ends when
its client ends it, when a request says so, or with the first error; a client that cancels while nothing is under way
looks like one that has ended its stream, so nothing may depend on which it was.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar

from structlog.contextvars import bind_contextvars

from outrider import tracing
from outrider.errors import InvalidRequest, NotReady, OutriderError, Overloaded
from outrider.logs import session_prefix
from outrider.model_service.session_store import SessionTable
from outrider.rpc import messages
from outrider.rpc.fencing import ComputeTimes, Fence
from outrider.v1 import types_pb2 as pb

# Eight windows of unasked verdicts: a client that asks for all of them again a few times is still heard.
MAX_UNSENT_ANSWERS = 2048
MAX_UNFINISHED_JOBS = 16

OutT = TypeVar("OutT")
InT = TypeVar("InT")
T = TypeVar("T")


class Device(Protocol):
    """The device thread."""

    def post(self, job: Callable[[], None]) -> None:
        """Runs a job between two forwards; nobody is told when."""
        ...

    def call(self, fn: Callable[[], T]) -> Awaitable[T]:
        """Runs `fn` between two forwards; it is queued at once, whether anybody awaits it or not."""
        ...


class Leases(Protocol):
    """The part of a SessionTable that the end of a stream concerns."""

    lease_s: float

    def leave(self, session_id: bytes, owner: object, lease_s: float) -> bool:
        """Begins a lease of lease_s seconds, if the session is there and the owner's."""
        ...

    def sweep(self) -> int:
        """Ends leases."""
        ...


def _for_ever() -> None:
    """No deadline."""


class Outbox(Generic[OutT]):
    """Answers on their way to one stream, in order; filled from any thread, emptied on the loop that made it.

    A client that leaves more than `maximum` of them unread is given up: `overflow` has the error then.
    """

    def __init__(self, maximum: int = MAX_UNSENT_ANSWERS) -> None:
        self._loop = asyncio.get_running_loop()
        self._maximum = maximum
        self._items: deque[OutT | Exception | None] = deque()
        self._is_waking = False
        self._wanted: asyncio.Future[None] | None = None
        self.overflow: asyncio.Future[Overloaded] = self._loop.create_future()

    def put(self, answer: OutT | Exception | None) -> None:
        """Adds an answer, the error that ends the stream, or None for its end behind the answers so far."""
        if len(self._items) <= self._maximum:
            self._items.append(answer)
        # One wake serves all that is put before the loop gets to it. A loop that has been closed has no streams left.
        if not self._is_waking and not self._loop.is_closed():
            self._is_waking = True
            self._loop.call_soon_threadsafe(self._wake)

    async def get(self) -> OutT | None:
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


class SessionStream(Generic[InT, OutT]):
    """A stream and the one session that it carries; owns the session until another stream opens it again."""

    def __init__(self, device: Device, leases: Leases, time_left_s: Callable[[], float | None] = _for_ever) -> None:
        """`time_left_s` tells what is left of the client's deadline; None for no end."""
        self.outbox = Outbox[OutT]()
        self._device = device
        self._leases = leases
        self._time_left_s = time_left_s
        self._session_id: bytes | None = None
        self._num_jobs = 0
        self._has_failed = False

    def admit(self, fence: Fence, action: str | None) -> str:
        """Checks what the protocol asks of any request: an action, an open first, and one session a stream.

        Returns the action; raises InvalidRequest.
        """
        if action is None:
            raise InvalidRequest("action", "absent", "set")
        if self._session_id is None and action != "open":
            raise InvalidRequest("action", action, "open in the first message of a stream")
        if self._session_id not in {None, fence.session_id}:
            raise InvalidRequest("fence.session_id", fence.session_id.hex(), "that of the stream's first message")
        self._session_id = fence.session_id
        return action

    async def hand_over(self, job: Callable[[], None]) -> None:
        """Queues a job for the device, behind the earlier ones; what it raises ends the stream.

        Nobody is woken at its end, because the answer is what its client waits for; but every 16th is waited for, so
        that a client cannot fill the device's queue.
        """
        self._num_jobs += 1
        if self._num_jobs % MAX_UNFINISHED_JOBS:
            self._device.post(partial(self._run, job))
        else:
            await self._device.call(partial(self._run, job))

    async def carry(
        self,
        requests: AsyncIterator[InT],
        write: Callable[[OutT], Awaitable[None]],
        handle: Callable[[InT], Awaitable[bool]],
    ) -> None:
        """Hands requests to `handle` until it returns False, and writes the outbox, until the stream ends.

        Raises what `handle` raised and what the outbox was given, and Overloaded about a client that does not read.
        Afterwards the session, unless it was closed, is on a lease and has no job.
        """
        reader = asyncio.create_task(self._read(requests, handle))
        writer = asyncio.create_task(self._write(write))
        overflow = self.outbox.overflow
        try:
            ends: set[asyncio.Future[None] | asyncio.Future[Overloaded]] = {writer, overflow}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if overflow.done():
                raise overflow.result()
            writer.result()
        finally:
            # Once cancelled, the reader queues no more jobs, so the lease begins behind its last one.
            reader.cancel()
            writer.cancel()
            lease_s = self._lease_s()
            leaving = asyncio.ensure_future(self._leave(self._queue_leave(lease_s), lease_s))
            await asyncio.wait({reader, writer, leaving})

    def _run(self, job: Callable[[], None]) -> None:
        """On the device thread; behind a failure nothing of the stream has an effect."""
        if self._has_failed:
            return
        try:
            job()
        except Exception as error:  # noqa: BLE001 - it is raised where the answers are written, behind earlier ones
            self._has_failed = True
            self.outbox.put(error)

    async def _write(self, write: Callable[[OutT], Awaitable[None]]) -> None:
        while (answer := await self.outbox.get()) is not None:
            await write(answer)

    async def _read(self, requests: AsyncIterator[InT], handle: Callable[[InT], Awaitable[bool]]) -> None:
        end: Exception | None = None
        try:
            async for request in requests:
                if not await handle(request):
                    break
        except Exception as error:  # noqa: BLE001 - it is raised where the answers are written, behind earlier ones
            end = error
        # What the jobs so far answer or raise at once goes before the end. A service that has stopped runs none.
        with suppress(NotReady):
            await self._device.call(_nothing)
        self.outbox.put(end)

    def _lease_s(self) -> float:
        """No lease outlasts the client's deadline, because nobody comes back after that."""
        left_s = self._time_left_s()
        return self._leases.lease_s if left_s is None else min(left_s, self._leases.lease_s)

    def _queue_leave(self, lease_s: float) -> Awaitable[bool] | None:
        """Queues the lease at once, because a handler may be cancelled a second time."""
        # A service that has stopped has freed everything.
        with suppress(NotReady):
            return self._device.call(partial(self._leases.leave, self._session_id or b"", self, lease_s))
        return None

    async def _leave(self, leaving: Awaitable[bool] | None, lease_s: float) -> None:
        if leaving is not None and await leaving:
            asyncio.get_running_loop().call_later(lease_s, self._sweep)

    def _sweep(self) -> None:
        """Ends the lease when its time has come; the device thread decides whether it has."""
        with suppress(NotReady):
            self._device.call(self._leases.sweep)


def _nothing() -> None:
    """A job whose end tells that those before it have ended."""


# What took longer gets an event of its own; everything else is in the sums.
SLOW_US = 500_000


@dataclass(slots=True)
class SessionFigures:
    """Sums over a stream."""

    num_answers: int = 0
    num_forwards: int = 0
    queue_us: int = 0
    compute_us: int = 0

    def add(self, times: ComputeTimes) -> None:
        """Counts an answer."""
        self.num_answers += 1
        self.num_forwards += times.forward_count
        self.queue_us += times.queue_us
        self.compute_us += times.compute_us
        # The first one read the prompt.
        if self.num_answers == 1 or times.queue_us + times.compute_us > SLOW_US:
            name = "first answer" if self.num_answers == 1 else "slow answer"
            tracing.event(name, queue_us=times.queue_us, compute_us=times.compute_us, forwards=times.forward_count)

    def tell(self) -> None:
        """Writes the sums into the open span."""
        tracing.note(
            answers=self.num_answers, forwards=self.num_forwards, queue_us=self.queue_us, compute_us=self.compute_us
        )


# A stream has a handler, two tasks and some jobs, so this bounds all of them.
MAX_STREAMS = 1024


class Request(Protocol):
    """A message of a session's stream."""

    @property
    def fence(self) -> pb.Fence:
        """Which session it belongs to."""
        ...

    def WhichOneof(self, oneof_group: Literal["action"], /) -> str | None:  # noqa: N802 - the name is protobuf's
        """Name of the field that is set."""
        ...


class Answered(Protocol):
    """An answer to a message."""

    @property
    def times(self) -> ComputeTimes:
        """What it cost."""
        ...


AnswerT = TypeVar("AnswerT", bound=Answered)
RequestT = TypeVar("RequestT", bound=Request)
ResponseT = TypeVar("ResponseT")
RequestT_contra = TypeVar("RequestT_contra", bound=Request, contravariant=True)
ResponseT_co = TypeVar("ResponseT_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Arrival(Generic[AnswerT]):
    """Of a message: its fence, its stream, where answers go, and when it came, on time.perf_counter_ns."""

    fence: Fence
    owner: object
    reply: Callable[[AnswerT | OutriderError], None]
    arrived_ns: int


class Messages(Protocol[RequestT_contra, AnswerT, ResponseT_co]):
    """What the messages of one service say."""

    def job(self, action: str, request: RequestT_contra, arrival: Arrival[AnswerT]) -> Callable[[], None]:
        """What the device thread does for a request; raises InvalidRequest and the like about what it says."""
        ...

    def response(self, answer: AnswerT) -> ResponseT_co:
        """The message for an answer."""
        ...

    def pong(self, fence: Fence) -> ResponseT_co:
        """The answer to a ping."""
        ...


@dataclass(frozen=True, slots=True)
class Pinged:
    """Stands for the answer to a ping among the answers of a stream."""

    fence: Fence


def unobserved(times: ComputeTimes) -> None:
    """Nobody wants to know."""


class SessionServicer(Generic[RequestT, AnswerT, ResponseT]):
    """Carries the session streams of one service."""

    def __init__(
        self,
        messages: Messages[RequestT, AnswerT, ResponseT],
        context_len: int,
        table: SessionTable[Any],
        device: Device,
        observe: Callable[[ComputeTimes], None] = unobserved,
    ) -> None:
        """`observe` is told what each answer cost, when it is sent."""
        self._observe = observe
        self._messages = messages
        self._context_len = context_len
        self._table = table
        self._device = device
        self._num_streams = 0

    async def carry(
        self,
        requests: AsyncIterator[RequestT],
        write: Callable[[ResponseT], Awaitable[None]],
        time_left_s: Callable[[], float | None],
        parent: Mapping[str, str] | None = None,
    ) -> None:
        """Carries one session until its stream ends; raises what ends it, and Overloaded when there are too many.

        `time_left_s` as in SessionStream; `parent` is what the caller says of its trace.
        """
        if self._num_streams >= MAX_STREAMS:
            raise Overloaded(f"{self._num_streams} sessions have a stream already", limit=MAX_STREAMS)
        stream = SessionStream[RequestT, AnswerT | Pinged](self._device, self._table, time_left_s)
        self._num_streams += 1
        with tracing.span("session", parent=parent or {}):
            figures = SessionFigures()
            try:
                await stream.carry(requests, partial(self._answer, write, figures), partial(self._handle, stream))
            finally:
                self._num_streams -= 1
                figures.tell()

    async def _answer(
        self,
        write: Callable[[ResponseT], Awaitable[None]],
        figures: SessionFigures,
        answer: AnswerT | Pinged,
    ) -> None:
        if isinstance(answer, Pinged):
            await write(self._messages.pong(answer.fence))
            return
        await write(self._messages.response(answer))
        self._observe(answer.times)
        figures.add(answer.times)

    async def _handle(self, stream: SessionStream[RequestT, AnswerT | Pinged], request: RequestT) -> bool:
        """Takes one request; False after a close, which ends the stream."""
        arrived_ns = time.perf_counter_ns()
        fence = messages.fence_from(request.fence, self._context_len)
        action = stream.admit(fence, request.WhichOneof("action"))
        if action == "open":
            bind_contextvars(session=session_prefix(fence.session_id))
            tracing.note(session=session_prefix(fence.session_id))
        if action == "ping":
            stream.outbox.put(Pinged(fence))
        elif action == "close":
            await self._device.call(partial(self._table.close, fence, stream))
        else:
            arrival: Arrival[AnswerT] = Arrival(fence, stream, stream.outbox.put, arrived_ns)
            await stream.hand_over(self._messages.job(action, request, arrival))
        return action != "close"
