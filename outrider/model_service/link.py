"""The door to a service's sessions: one link a gateway, which carries the messages of all its sessions in batches.

A message takes three hops. The servicer reads it, checks its fence and makes a job of it (outrider.model_service
.incoming, LinkServicer.job); the jobs of a frame run on the device thread, where the service's sessions decide what
each message is; what has to be computed becomes a task of the verifier or drafter. Answers go into the link's outbox,
and all that is there leaves in one frame.

Frames are read while answers are computed, because a newer epoch or a close has to be seen while a job runs. A link
ends when its gateway ends it; one that was cut looks the same, so nothing may depend on which it was: its sessions are
on leases.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import grpc
import structlog

from outrider.engine.device_thread import DeviceWorker
from outrider.errors import NotReady, OutriderError, Overloaded
from outrider.estimates.timing import ComputeTimes
from outrider.grammar import Grammar, GrammarEngine
from outrider.model_service.incoming import Arrived, Incoming, Job, Jobs, RequestT
from outrider.model_service.leases import IDLE_S
from outrider.model_service.load import LinkLoad, LoadMeter
from outrider.model_service.outbox import MAX_UNSENT_OF_SESSION, PONG, Outbox, Outboxes, SessionAnswer
from outrider.model_service.servicer import ServiceFacts
from outrider.model_service.sessions import SessionStore
from outrider.process.upkeep import Upkeep
from outrider.rpc import channels
from outrider.rpc.errors import session_error
from outrider.rpc.messages.round import fence_from, write_fence, write_times
from outrider.rpc.tls import client_name
from outrider.rpc.wire import FRAME_BYTES, MAX_OF_SESSION
from outrider.v1.draft_service_pb2 import (
    DraftServiceLinkRequest,
    DraftServiceLinkResponse,
)
from outrider.v1.target_service_pb2 import (
    TargetServiceLinkRequest,
    TargetServiceLinkResponse,
)

# A link has a handler, two tasks and some jobs, so this bounds all of them. One without sessions makes room.
MAX_LINKS = 256
# Until the first frame, which a gateway sends at once: else a caller that opens links and says nothing would take all.
FIRST_FRAME_S = 10.0
# Frames of a link that may wait for the device.
MAX_UNFINISHED_FRAMES = 16
SWEEP = "sweep of leases"

log = structlog.get_logger()

Frame = DraftServiceLinkRequest | TargetServiceLinkRequest
AnswerFrame = DraftServiceLinkResponse | TargetServiceLinkResponse
StoreT = TypeVar("StoreT", bound=SessionStore[Any])


class SilentLink(OutriderError):
    """The gateway must send a frame, which may be empty, when it opens a link."""

    status = "DEADLINE_EXCEEDED"
    reason = "SILENT_LINK"
    exit_code = 75


class LinkServicer(ABC, Generic[RequestT, StoreT]):
    """Carries the links of one service; a subclass says what its messages mean."""

    answer_type: ClassVar[type[DraftServiceLinkResponse] | type[TargetServiceLinkResponse]]

    def __init__(
        self,
        facts: ServiceFacts,
        sessions: StoreT,
        device: DeviceWorker[Any],
        outboxes: Outboxes,
        observe: Callable[[ComputeTimes], None] = lambda times: None,
    ) -> None:
        """`outboxes` are flushed where the device rests; `observe` gets what each answer cost, when it is sent.

        `upkeep` is of the service's work in the background.
        """
        self.upkeep = Upkeep()
        self._facts = facts
        self._sessions = sessions
        self._device = device
        self._outboxes = outboxes
        self._observe = observe
        # In the order in which something was heard of them last.
        self._links: dict[Outbox, LinkLoad] = {}
        self.load = LoadMeter(facts, sessions)
        self._sweep_timer: asyncio.TimerHandle | None = None

    @property
    @abstractmethod
    def services(self) -> channels.Services:
        """Services for `outrider.rpc.channels.serve`."""

    @abstractmethod
    def job(self, message: Arrived[RequestT], earlier: Sequence[int], owner: Outbox) -> Job:
        """Work of the device thread for a message; raises InvalidRequest and the like about what it says.

        Of an open, `earlier` are the tokens that came before it; answers go to `owner`, the outbox of its link.
        """

    @abstractmethod
    def compiled(self, grammars: GrammarEngine, text: str, salt: bytes, output: Sequence[int]) -> Awaitable[Grammar]:
        """The grammar of a session that is opened after an output; raises GrammarRefused."""

    @abstractmethod
    def fill(self, response: Any, answer: Any) -> None:  # noqa: ANN401 - with a proposal or a verdict
        """Sets the field of a response that carries what a session has computed."""

    def link_load(self, outbox: Outbox) -> LinkLoad:
        """What a new link hears of the service's load."""
        return LinkLoad(self.load, outbox)

    async def Link(  # noqa: N802 - the name is the protocol's
        self, request_iterator: AsyncIterator[Frame], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Carries a gateway's sessions until its link ends; those that were not closed are on leases then.

        Raises Overloaded when there are too many links, SilentLink, and about a gateway that does not read.
        """
        if len(self._links) >= MAX_LINKS:
            # Ends the one that has been silent longest of those without a session, by a look from beside the device
            # thread: who opens a first session in this very moment may have to open it again.
            owners = {held.owner for held in self._sessions.table}
            idlest = next((each for each in self._links if each not in owners), None)
            if idlest is None:
                raise Overloaded(f"{len(self._links)} gateways have a link already, with sessions", limit=MAX_LINKS)
            del self._links[idlest]
            if not idlest.overflow.done():
                message = f"another gateway needs the place of this link, which is the idlest of {MAX_LINKS}"
                idlest.overflow.set_result(Overloaded(message, limit=MAX_LINKS))
        # Else the head would go with the first frame, and while that waits for its reader gRPC cannot end the call.
        await context.send_initial_metadata(())
        outbox: Outbox = Outbox(self._outboxes, client_name(context))
        load = self._links[outbox] = self.link_load(outbox)
        self._sweep_after(IDLE_S)
        reader = asyncio.create_task(self._read(_begun(request_iterator), outbox, load))
        writer = asyncio.create_task(self._write(context.write, outbox, load))
        ends: set[asyncio.Future[Any]] = {reader, writer, outbox.overflow}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if outbox.overflow.done():
                raise outbox.overflow.result()
            if reader.done():
                reader.result()
                # What the jobs so far answer at once goes before the end. A service that has stopped runs none.
                with suppress(NotReady):
                    await self._device.call(outbox.end)
            await writer
        finally:
            # Once cancelled, the reader queues no more jobs, so leases begin after its last one.
            reader.cancel()
            writer.cancel()
            load.end()
            self._links.pop(outbox, None)
            ends = {reader, writer}
            # Queued at once, because a handler may be cancelled a second time. A service that has stopped has freed
            # everything.
            with suppress(NotReady):
                leaving = self._device.call(partial(self._sessions.table.leave, outbox))
                leaving.add_done_callback(lambda _left: self._sweep_after(self._sessions.table.lease_s))
                ends.add(leaving)
            await asyncio.wait(ends)

    def drain(self, grace_s: float) -> None:
        """Takes no more sessions, says so, and ends each link as soon as it has none; what is left ends after grace_s.

        May be called more than once, with less time.
        """
        self._sessions.is_draining = True
        self.load.drain_ends_s = min(self.load.drain_ends_s, self.load.clock() + grace_s)
        for outbox, load in self._links.items():
            load.hurry()
            with suppress(NotReady):
                self._device.post(partial(self._end_if_idle, outbox))

    async def _read(self, frames: AsyncIterator[Any], outbox: Outbox, load: LinkLoad) -> None:
        run, num_frames = partial(self._run, outbox), 0
        link = Incoming(outbox, self._facts, self._sessions, self._device, self.job, self.compiled, run)
        try:
            async for frame in frames:
                arrived_ns = time.perf_counter_ns()
                # Not of one that has lost its place and is about to end.
                if outbox in self._links:
                    self._links[outbox] = self._links.pop(outbox)
                load.hear(frame)
                counts: dict[bytes, int] = {}
                jobs: Jobs = []
                for request in frame.requests:
                    message = Arrived(request, fence_from(request.fence), arrived_ns)
                    session_id = message.fence.session_id
                    counts[session_id] = count = counts.get(session_id, 0) + 1
                    if count > MAX_OF_SESSION:
                        error = Overloaded(f"a frame has more than {MAX_OF_SESSION} messages of one session")
                        jobs.append(link.refusal(message, error))
                    elif not link.must_wait(message):
                        jobs += link.jobs(message)
                num_frames += 1
                # No task is woken at the end of a job, because the answer is what its client waits for; but some are
                # waited for, so that a client cannot fill the device's queue.
                if num_frames % MAX_UNFINISHED_FRAMES:
                    self._device.post(partial(run, jobs))
                else:
                    await self._device.call(partial(run, jobs))
            await asyncio.gather(*(each.task for each in link.compiling.values()))
        finally:
            for each in link.compiling.values():
                each.task.cancel()

    def _run(self, outbox: Outbox, jobs: Jobs) -> None:
        """On the device thread; what a job raises is about its session alone."""
        for fence, job in jobs:
            self._sessions.table.hear(fence.session_id, outbox)
            try:
                self._sessions.check_client(fence.session_id, outbox.client)
                job()
            except OutriderError as error:
                self._sessions.refuse(fence, error, outbox)
            except Exception:
                # What a bug says is for the log and not for a client.
                log.exception("a message failed")
                self._sessions.refuse(fence, OutriderError("the message could not be taken"), outbox)
        for session_id in outbox.take_flooded():
            held = self._sessions.table.get(session_id)
            if held is not None and held.owner is outbox:
                message = f"the session has {MAX_UNSENT_OF_SESSION} answers that its client has not taken"
                self._sessions.fail(session_id, held, Overloaded(message, limit=MAX_UNSENT_OF_SESSION))
        if self._sessions.is_draining:
            self._end_if_idle(outbox)

    def _end_if_idle(self, outbox: Outbox) -> None:
        if not self._sessions.table.owns_any(outbox):
            outbox.end()

    async def _write(self, write: Callable[[AnswerFrame], Awaitable[None]], outbox: Outbox, load: LinkLoad) -> None:
        while (answers := await outbox.take()) is not None:
            for frame in self._frames(answers):
                load.write(frame)
                # A nudge may come just after its load has left with answers.
                if frame.responses or frame.HasField("load"):
                    await write(frame)
            for answer in answers:
                self._observe(answer.times)

    def _frames(self, answers: Sequence[SessionAnswer[Any]]) -> Iterator[AnswerFrame]:
        """Answers in as few frames as FRAME_BYTES allows."""
        table = self._sessions.table
        new_frame: Callable[[], Any] = partial(
            self.answer_type,
            instance_id=self._facts.instance_id,
            numerics_id=self._facts.numerics_id,
            session_count=len(table) - table.num_leased,
        )
        whole = new_frame()
        for answer in answers:
            # In place, because a message that is made of others copies each of them.
            response = whole.responses.add()
            write_fence(response.fence, answer.fence)
            if answer.error is not None:
                response.error.CopyFrom(session_error(answer.error))
            elif answer.content is PONG:
                response.pong.SetInParent()
            else:
                response.cached_len = answer.cached_len
                write_times(response.times, answer.times)
                if answer.content is None:
                    response.tokens_wanted.known_len = answer.known_len
                else:
                    self.fill(response, answer.content)
        if whole.ByteSize() <= FRAME_BYTES:
            yield whole
            return
        part, size = new_frame(), 0
        for response in whole.responses:
            num_bytes = response.ByteSize()
            if size and size + num_bytes > FRAME_BYTES:
                yield part
                part, size = new_frame(), 0
            part.responses.append(response)
            size += num_bytes
        yield part

    def _sweep_after(self, delay_s: float) -> None:
        """Looks for leases that end and sessions that are idle, again and again while there may be some."""
        loop, timer = asyncio.get_running_loop(), self._sweep_timer
        if timer is not None and timer.when() <= loop.time() + delay_s:
            return
        if timer is not None:
            timer.cancel()
        self._sweep_timer = loop.call_later(delay_s, self._sweep)

    def _sweep(self) -> None:
        self._sweep_timer = None
        with suppress(NotReady):
            self._device.call(self._sessions.table.sweep).add_done_callback(self._swept)

    def _swept(self, sweeping: asyncio.Future[float | None]) -> None:
        if sweeping.cancelled():
            due_s = None
        elif error := sweeping.exception():
            self.upkeep.failed(SWEEP, error)
            due_s = self._sessions.table.lease_s
        else:
            self.upkeep.works(SWEEP)
            due_s = sweeping.result()
        if due_s is not None or self._links:
            self._sweep_after(IDLE_S if due_s is None else due_s)


async def _begun(frames: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The frames of a link; raises SilentLink when the first does not come in time."""
    try:
        async with asyncio.timeout(FIRST_FRAME_S):
            first = await anext(frames, None)
    except TimeoutError:
        raise SilentLink(f"nothing has come on this link for {FIRST_FRAME_S:g} s", limit=FIRST_FRAME_S) from None
    if first is not None:
        yield first
    async for frame in frames:
        yield frame
