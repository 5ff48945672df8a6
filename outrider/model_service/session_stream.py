"""The door to a service's sessions: one stream a session, the same for draft and target.

A message takes three hops. The servicer reads it, checks its fence and makes a job of it (SessionServicer.job); the
job runs on the device thread, where the service's sessions decide what the message is; what has to be computed becomes
a task of the verifier or drafter. Answers go into the stream's outbox and are written here as they come.

Requests are read while answers are computed, because a newer epoch or a close has to be seen while a job runs. A stream
ends when its client ends it, when a request says so, or with the first error; a client that cancels while nothing is
under way looks like one that has ended its stream, so nothing may depend on which it was.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

import grpc
from structlog.contextvars import bind_contextvars

from outrider.engine.worker import DeviceWorker
from outrider.errors import InvalidRequest, NotReady, Overloaded
from outrider.model_service.servicer import ServiceFacts
from outrider.model_service.session_store import LeaseTable, Outbox, SessionAnswer, SessionStore
from outrider.process import telemetry
from outrider.process.telemetry import session_prefix
from outrider.rpc.fencing import ComputeTimes, Fence
from outrider.rpc.messages import fence_from, fence_message, times_message
from outrider.v1.draft_service_pb2 import ProposeRequest, ProposeResponse
from outrider.v1.target_service_pb2 import VerifyRequest, VerifyResponse
from outrider.v1.types_pb2 import Pong, TokensWanted

MAX_UNFINISHED_JOBS = 16
# A stream has a handler, two tasks and some jobs, so this bounds all of them.
MAX_STREAMS = 1024
# What took longer gets an event of its own; everything else is in the sums.
SLOW_US = 500_000

RequestT = TypeVar("RequestT", ProposeRequest, VerifyRequest)
ResponseT = TypeVar("ResponseT", ProposeResponse, VerifyResponse)
StoreT = TypeVar("StoreT", bound=SessionStore[Any])
Job = Callable[[], None]
"""What the device thread does for a message."""


class SessionStream:
    """A stream and the one session that it carries; owns the session until another stream opens it again."""

    def __init__(
        self, device: DeviceWorker[Any], table: LeaseTable[Any], time_left_s: Callable[[], float | None] = lambda: None
    ) -> None:
        """`time_left_s` tells what is left of the client's deadline; None for no end."""
        self.outbox = Outbox()
        self._device = device
        self._table = table
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

    async def hand_over(self, job: Job) -> None:
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
        requests: AsyncIterator[Any],
        write: Callable[[Any], Awaitable[None]],
        handle: Callable[[Any], Awaitable[bool]],
    ) -> None:
        """Hands requests to `handle` until it returns False, and answers to `write`, until the stream ends.

        Raises what `handle` raised and what the outbox was given, and Overloaded about a client that does not read.
        Afterwards the session, unless it was closed, is on a lease and has no job.
        """
        reader = asyncio.create_task(self._read(requests, handle))
        writer = asyncio.create_task(self._write(write))
        overflow = self.outbox.overflow
        try:
            ends: set[asyncio.Future[Any]] = {writer, overflow}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if overflow.done():
                raise overflow.result()
            writer.result()
        finally:
            # Once cancelled, the reader queues no more jobs, so the lease begins behind its last one.
            reader.cancel()
            writer.cancel()
            await asyncio.wait([reader, writer, *self._leave()])

    def _run(self, job: Job) -> None:
        """On the device thread; behind a failure nothing of the stream has an effect."""
        if self._has_failed:
            return
        try:
            job()
        except Exception as error:  # noqa: BLE001 - it is raised where the answers are written, behind earlier ones
            self._has_failed = True
            self.outbox.put(error)

    async def _write(self, write: Callable[[Any], Awaitable[None]]) -> None:
        while (answer := await self.outbox.get()) is not None:
            await write(answer)

    async def _read(self, requests: AsyncIterator[Any], handle: Callable[[Any], Awaitable[bool]]) -> None:
        end: Exception | None = None
        try:
            async for request in requests:
                if not await handle(request):
                    break
        except Exception as error:  # noqa: BLE001 - it is raised where the answers are written, behind earlier ones
            end = error
        # What the jobs so far answer or raise at once goes before the end. A service that has stopped runs none.
        with suppress(NotReady):
            await self._device.call(lambda: None)
        self.outbox.put(end)

    def _leave(self) -> list[asyncio.Future[Any]]:
        """Queues the lease at once, because a handler may be cancelled a second time; returns what tells of its end."""
        left_s = self._time_left_s()
        # No lease outlasts the client's deadline, because nobody comes back after that.
        lease_s = self._table.lease_s if left_s is None else min(left_s, self._table.lease_s)

        def sweep() -> None:
            """Ends the lease when its time has come; the device thread decides whether it has."""
            with suppress(NotReady):
                self._device.call(self._table.sweep)

        def sweep_later(leaving: asyncio.Future[bool]) -> None:
            if not leaving.cancelled() and leaving.result():
                asyncio.get_running_loop().call_later(lease_s, sweep)

        # A service that has stopped has freed everything.
        with suppress(NotReady):
            leaving = self._device.call(partial(self._table.leave, self._session_id or b"", self.outbox, lease_s))
            leaving.add_done_callback(sweep_later)
            return [leaving]
        return []


class SessionServicer(ABC, Generic[RequestT, ResponseT, StoreT]):
    """Carries the session streams of one service; a subclass says what its messages mean."""

    response_type: type[ResponseT]

    def __init__(
        self,
        facts: ServiceFacts,
        sessions: StoreT,
        device: DeviceWorker[Any],
        observe: Callable[[ComputeTimes], None],
    ) -> None:
        """`observe` is told what each answer cost, when it is sent."""
        self._facts = facts
        self._sessions = sessions
        self._device = device
        self._observe = observe
        self._num_streams = 0

    @abstractmethod
    def job(self, request: RequestT, fence: Fence, arrived_ns: int, owner: Outbox) -> Job:
        """What the device thread does for a request; raises InvalidRequest and the like about what it says.

        `arrived_ns` is when it came, on time.perf_counter_ns; answers go to `owner`, the outbox of its stream.
        """

    @abstractmethod
    def content(self, answer: Any) -> Mapping[str, Any]:  # noqa: ANN401 - a proposal or a verdict
        """The field of a response that carries what a session has computed."""

    async def carry(
        self, requests: AsyncIterator[RequestT], context: grpc.aio.ServicerContext[RequestT, ResponseT]
    ) -> None:
        """Carries one session until its stream ends; raises what ends it, and Overloaded when there are too many."""
        if self._num_streams >= MAX_STREAMS:
            raise Overloaded(f"{self._num_streams} sessions have a stream already", limit=MAX_STREAMS)
        stream = SessionStream(self._device, self._sessions.table, context.time_remaining)
        self._num_streams += 1
        with telemetry.span("session", parent=telemetry.parent_of(context.invocation_metadata())):
            sums = AnswerSums()
            try:
                await stream.carry(requests, partial(self._write, context, sums), partial(self._handle, stream))
            finally:
                self._num_streams -= 1
                sums.note()

    async def _write(
        self,
        context: grpc.aio.ServicerContext[RequestT, ResponseT],
        sums: "AnswerSums",
        answer: SessionAnswer[Any] | ResponseT,
    ) -> None:
        if not isinstance(answer, SessionAnswer):
            await context.write(answer)
            return
        if answer.content is None:
            content: Mapping[str, Any] = {"tokens_wanted": TokensWanted(known_len=answer.known_len)}
        else:
            content = self.content(answer.content)
        response = self.response_type(
            fence=fence_message(answer.fence, self._facts.instance_id),
            cached_len=answer.cached_len,
            numerics_id=self._facts.numerics_id,
            times=times_message(answer.times),
            **content,
        )
        await context.write(response)
        self._observe(answer.times)
        sums.add(answer.times)

    async def _handle(self, stream: SessionStream, request: RequestT) -> bool:
        """Takes one request; False after a close, which ends the stream."""
        arrived_ns = time.perf_counter_ns()
        fence = fence_from(request.fence, self._facts.context_len)
        action = stream.admit(fence, request.WhichOneof("action"))
        if action == "open":
            bind_contextvars(session=session_prefix(fence.session_id))
            telemetry.note(session=session_prefix(fence.session_id))
        if action == "ping":
            pong = self.response_type(fence=fence_message(fence, self._facts.instance_id), pong=Pong())
            stream.outbox.put(pong)
        elif action == "close":
            await self._device.call(partial(self._sessions.table.close, fence, stream.outbox))
        else:
            await stream.hand_over(self.job(request, fence, arrived_ns, stream.outbox))
        return action != "close"


class AnswerSums:
    """What the answers of a stream cost, for its span."""

    def __init__(self) -> None:
        self._num_answers = self._num_forwards = self._queue_us = self._compute_us = 0

    def add(self, times: ComputeTimes) -> None:
        self._num_answers += 1
        self._num_forwards += times.forward_count
        self._queue_us += times.queue_us
        self._compute_us += times.compute_us
        # The first one read the prompt.
        if self._num_answers == 1 or times.queue_us + times.compute_us > SLOW_US:
            name = "first answer" if self._num_answers == 1 else "slow answer"
            telemetry.event(name, queue_us=times.queue_us, compute_us=times.compute_us, forwards=times.forward_count)

    def note(self) -> None:
        counts = {"answers": self._num_answers, "forwards": self._num_forwards}
        telemetry.note(**counts, queue_us=self._queue_us, compute_us=self._compute_us)
