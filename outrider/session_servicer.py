"""The door to a service's sessions: what draft and target do alike with the messages of a stream. Touches no device.

Fences are checked, a close frees, a ping is answered at once; everything else becomes a job for the device. What the
messages say is each service's own and comes as `Messages`.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar

from structlog.contextvars import bind_contextvars

from outrider import wire
from outrider.compute_times import ComputeTimes
from outrider.errors import OutriderError, Overloaded
from outrider.fencing import Fence
from outrider.process import tracing
from outrider.process.logs import session_prefix
from outrider.session_figures import SessionFigures
from outrider.session_stream import Device, SessionStream
from outrider.sessions import SessionTable
from outrider.v1 import types_pb2 as pb

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
        fence = wire.fence_from(request.fence, self._context_len)
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
