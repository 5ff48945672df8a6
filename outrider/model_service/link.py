"""The door to a service's sessions: one link a gateway, which carries the messages of all its sessions in batches.

A message takes three hops. The servicer reads it, checks its fence and makes a job of it (LinkServicer.job); the jobs
of a frame run on the device thread, where the service's sessions decide what each message is; what has to be computed
becomes a task of the verifier or drafter. Answers go into the link's outbox, and all that is there leaves in one frame.
A message that opens a session with a grammar waits before that until it is compiled, and so do those after it.

Frames are read while answers are computed, because a newer epoch or a close has to be seen while a job runs. Whatever
is wrong with a message ends the session that it names, and nothing else. A link ends when its gateway ends it; one that
was cut looks the same, so nothing may depend on which it was: its sessions are on leases.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import grpc
import structlog

from outrider.constraint import MAX_GRAMMAR_BYTES
from outrider.engine.device_thread import DeviceWorker
from outrider.errors import InvalidRequest, NotReady, OutriderError, Overloaded
from outrider.grammar import Grammar, GrammarEngine
from outrider.model_service.leases import IDLE_S, MAX_SESSIONS
from outrider.model_service.outbox import MAX_UNSENT_OF_SESSION, PONG, Outbox, Outboxes, SessionAnswer
from outrider.model_service.servicer import ServiceFacts
from outrider.model_service.sessions import SessionStore
from outrider.parameters import MAX_SALT_BYTES
from outrider.process.upkeep import Upkeep
from outrider.rpc import channels
from outrider.rpc.channels import FRAME_BYTES, MAX_OF_SESSION
from outrider.rpc.errors import session_error
from outrider.rpc.fencing import Fence, check_fence
from outrider.rpc.messages.round import fence_from, write_fence, write_times
from outrider.rpc.tls import client_name
from outrider.timing import ComputeTimes
from outrider.v1.draft_service_pb2 import (
    DraftServiceLinkRequest,
    DraftServiceLinkResponse,
    ProposeRequest,
    ProposeResponse,
)
from outrider.v1.target_service_pb2 import (
    TargetServiceLinkRequest,
    TargetServiceLinkResponse,
    VerifyRequest,
    VerifyResponse,
)
from outrider.v1.types_pb2 import OpenPart

# A link has a handler, two tasks and some jobs, so this bounds all of them. One without sessions makes room.
MAX_LINKS = 256
# Until the first frame, which a gateway sends at once: else a caller that opens links and says nothing would take all.
FIRST_FRAME_S = 10.0
# Frames of a link that may wait for the device.
MAX_UNFINISHED_FRAMES = 16
# Tokens of opens that are on their way in parts, of one link.
MAX_PART_TOKENS = 4 << 20
SWEEP = "sweep of leases"

log = structlog.get_logger()

RequestT = TypeVar("RequestT", ProposeRequest, VerifyRequest)
Frame = DraftServiceLinkRequest | TargetServiceLinkRequest
AnswerFrame = DraftServiceLinkResponse | TargetServiceLinkResponse
StoreT = TypeVar("StoreT", bound=SessionStore[Any])
Job = Callable[[], None]
"""Work of the device thread for a message; raises what ends the message's session."""


class SilentLink(OutriderError):
    """The gateway must send a frame, which may be empty, when it opens a link."""

    status = "DEADLINE_EXCEEDED"
    reason = "SILENT_LINK"
    exit_code = 75


class OpenParts:
    """Tokens of the opens of one link that are on their way in parts, by session."""

    def __init__(self) -> None:
        self._parts: dict[bytes, tuple[Fence, list[int]]] = {}
        self._num_tokens = 0

    def add(self, fence: Fence, part: OpenPart) -> None:
        """Takes a part, once; raises InvalidRequest and Overloaded, and then the session has none."""
        known, token_ids = self._parts.get(fence.session_id, (fence, []))
        if known != fence or part.start == 0:
            self.forget(fence.session_id)
            token_ids = []
        if part.start != len(token_ids):
            # It comes again, or one before it is lost; then the open finds that some are missing.
            return
        if len(token_ids) + len(part.token_ids) >= fence.base_len:
            self.forget(fence.session_id)
            count = f"{len(token_ids) + len(part.token_ids)} tokens"
            raise InvalidRequest(
                "part.token_ids", count, f"fewer than base_len {fence.base_len} tokens, with those before"
            )
        if fence.session_id not in self._parts and len(self._parts) >= MAX_SESSIONS:
            raise Overloaded(f"{len(self._parts)} opens are on their way on this link already", limit=MAX_SESSIONS)
        if self._num_tokens + len(part.token_ids) > MAX_PART_TOKENS:
            message = f"opens on their way have {self._num_tokens} tokens on this link already"
            self.forget(fence.session_id)
            raise Overloaded(message, limit=MAX_PART_TOKENS)
        self._num_tokens += len(part.token_ids)
        token_ids += part.token_ids
        self._parts[fence.session_id] = fence, token_ids

    def peek(self, fence: Fence) -> Sequence[int]:
        """Tokens that `take` would give."""
        known, token_ids = self._parts.get(fence.session_id, (fence, []))
        return token_ids if known == fence else ()

    def take(self, fence: Fence) -> Sequence[int]:
        """The tokens before those of an open."""
        token_ids = self.peek(fence)
        self.forget(fence.session_id)
        return token_ids

    def forget(self, session_id: bytes) -> None:
        """Drops the parts of an open that have come."""
        self._num_tokens -= len(self._parts.pop(session_id, (None, ()))[1])


@dataclass(frozen=True, slots=True)
class Arrived(Generic[RequestT]):
    """A message that has come, on time.perf_counter_ns."""

    request: RequestT
    fence: Fence
    arrived_ns: int
    grammar: Grammar | None = None
    """Grammar that the message opens a session with."""


@dataclass(slots=True)
class Compiling(Generic[RequestT]):
    """A grammar that is being compiled for a session, and the messages that wait for it, the open first."""

    task: asyncio.Task[None]
    waiting: list[Arrived[RequestT]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Incoming(Generic[RequestT]):
    """Messages of a link that are no jobs yet, and the outbox for their answers."""

    outbox: Outbox
    parts: OpenParts = field(default_factory=OpenParts)
    compiling: dict[bytes, Compiling[RequestT]] = field(default_factory=dict)


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
        self._links: dict[Outbox, None] = {}
        self._is_draining = False
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

    async def Link(  # noqa: N802 - the name is the protocol's
        self, request_iterator: AsyncIterator[Frame], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Carries a gateway's sessions until its link ends; those that were not closed are on leases then.

        Raises Overloaded when there are too many links, SilentLink, and about a gateway that does not read.
        """
        self._make_room()
        # Else the head would go with the first frame, and while that waits for its reader gRPC cannot end the call.
        await context.send_initial_metadata(())
        outbox: Outbox = Outbox(self._outboxes, client_name(context))
        self._links[outbox] = None
        self._sweep_after(IDLE_S)
        reader = asyncio.create_task(self._read(_begun(request_iterator), outbox))
        writer = asyncio.create_task(self._write(context.write, outbox))
        try:
            ends: set[asyncio.Future[Any]] = {reader, writer, outbox.overflow}
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
            self._links.pop(outbox, None)
            await asyncio.wait([reader, writer, *self._leave(outbox)])

    def _make_room(self) -> None:
        """Ends the link that has been silent longest of those without a session, where there are too many.

        Raises Overloaded when all have sessions.
        """
        if len(self._links) < MAX_LINKS:
            return
        # A look from beside the device thread: who opens a first session in this very moment may have to open it again.
        owners = {held.owner for held in self._sessions.table}
        idlest = next((outbox for outbox in self._links if outbox not in owners), None)
        if idlest is None:
            raise Overloaded(f"{len(self._links)} gateways have a link already, with sessions", limit=MAX_LINKS)
        del self._links[idlest]
        if not idlest.overflow.done():
            message = f"another gateway needs the place of this link, which is the idlest of {MAX_LINKS}"
            idlest.overflow.set_result(Overloaded(message, limit=MAX_LINKS))

    def drain(self) -> None:
        """Takes no more sessions, and ends each link as soon as it has none; may be called more than once."""
        self._is_draining = True
        for outbox in self._links:
            with suppress(NotReady):
                self._device.post(partial(self._end_if_idle, outbox))

    async def _read(self, frames: AsyncIterator[Any], outbox: Outbox) -> None:
        link: Incoming[RequestT] = Incoming(outbox)
        num_frames = 0
        try:
            async for frame in frames:
                arrived_ns = time.perf_counter_ns()
                # Not of one that has lost its place and is about to end.
                if outbox in self._links:
                    self._links[outbox] = self._links.pop(outbox)
                counts: dict[bytes, int] = {}
                jobs: list[tuple[Fence, Job]] = []
                for request in frame.requests:
                    message = Arrived(request, fence_from(request.fence), arrived_ns)
                    session_id = message.fence.session_id
                    counts[session_id] = count = counts.get(session_id, 0) + 1
                    if count > MAX_OF_SESSION:
                        error = Overloaded(f"a frame has more than {MAX_OF_SESSION} messages of one session")
                        jobs.append(self._refusal(message, error, link))
                    elif not self._must_wait(message, link):
                        jobs += self._jobs(message, link)
                num_frames += 1
                run = partial(self._run, jobs, outbox)
                # No task is woken at the end of a job, because the answer is what its client waits for; but some are
                # waited for, so that a client cannot fill the device's queue.
                if num_frames % MAX_UNFINISHED_FRAMES:
                    self._device.post(run)
                else:
                    await self._device.call(run)
            await asyncio.gather(*(each.task for each in link.compiling.values()))
        finally:
            for each in link.compiling.values():
                each.task.cancel()

    def _must_wait(self, message: Arrived[RequestT], link: Incoming[RequestT]) -> bool:
        """Keeps an open with a grammar, and what comes after it, until that is compiled; returns whether it did."""
        request, session_id, grammars = message.request, message.fence.session_id, self._facts.grammars
        found = link.compiling.get(session_id)
        if found is None:
            text = request.open.session.grammar if request.HasField("open") else ""
            salt = request.open.session.cache_salt
            if not text or grammars is None or len(text.encode()) > MAX_GRAMMAR_BYTES or len(salt) > MAX_SALT_BYTES:
                return False
            tokens = [*link.parts.peek(message.fence)]
            tokens += request.open.session.token_ids
            output = tokens[request.open.session.prompt_len :]
            compiled = self._compile(partial(self.compiled, grammars, text, salt, output), session_id, link)
            found = link.compiling[session_id] = Compiling(asyncio.create_task(compiled))
        elif request.HasField("ping") or len(found.waiting) >= MAX_OF_SESSION:
            return False
        found.waiting.append(message)
        return True

    async def _compile(
        self, compile_it: Callable[[], Awaitable[Grammar]], session_id: bytes, link: Incoming[RequestT]
    ) -> None:
        """Compiles a grammar off the loop, and goes on with the messages that waited; refuses the open with it."""
        refused: OutriderError | None = None
        grammar: Grammar | None = None
        try:
            grammar = await compile_it()
        except OutriderError as error:
            refused = error
        except Exception:
            # Whatever it is, it is about this session, whose messages must not wait for ever.
            log.exception("a grammar failed")
            refused = OutriderError("the grammar could not be compiled")
        waiting = link.compiling.pop(session_id).waiting
        opening = waiting.pop(0)
        if refused is None:
            jobs = self._jobs(replace(opening, grammar=grammar), link)
        else:
            jobs = [self._refusal(opening, refused, link)]
        for message in waiting:
            # It may be opened once more, and then needs another.
            if not self._must_wait(message, link):
                jobs += self._jobs(message, link)
        # A service that has stopped runs none.
        with suppress(NotReady):
            self._device.post(partial(self._run, jobs, link.outbox))

    def _refusal(self, message: Arrived[RequestT], error: OutriderError, link: Incoming[RequestT]) -> tuple[Fence, Job]:
        return message.fence, partial(self._sessions.refuse, message.fence, error, link.outbox)

    def _jobs(self, message: Arrived[RequestT], link: Incoming[RequestT]) -> list[tuple[Fence, Job]]:
        """A message as at most one job: of what it says, or of the error for which it is refused."""
        try:
            job = self._job(message, link)
        except OutriderError as error:
            return [self._refusal(message, error, link)]
        except Exception:
            # What a bug says is for the log, and other sessions are on this link.
            log.exception("a message could not be read")
            return [self._refusal(message, OutriderError("the message could not be taken"), link)]
        return [] if job is None else [(message.fence, job)]

    def _job(self, message: Arrived[RequestT], link: Incoming[RequestT]) -> Job | None:
        """Work of the device thread for a message, None for nothing; raises what the message is refused for."""
        request, fence, parts, outbox = message.request, message.fence, link.parts, link.outbox
        check_fence(fence, self._facts.context_len)
        earlier: Sequence[int] = ()
        match request.WhichOneof("action"):
            case None:
                raise InvalidRequest("action", "absent", "set")
            case "ping":
                outbox.pong(fence)
                return None
            case "part":
                parts.add(fence, request.part)
                return None
            case "close":
                parts.forget(fence.session_id)
                return partial(self._sessions.table.close, fence, outbox)
            case "open":
                if self._is_draining:
                    raise NotReady("the service is stopping")
                earlier = parts.take(fence)
                if len(earlier) != request.open.session.part_len:
                    return partial(self._sessions.want_tokens, fence, None, outbox)
        return self.job(message, earlier, outbox)

    def _run(self, jobs: Sequence[tuple[Fence, Job]], outbox: Outbox) -> None:
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
        if self._is_draining:
            self._end_if_idle(outbox)

    def _end_if_idle(self, outbox: Outbox) -> None:
        if not self._sessions.table.owns_any(outbox):
            outbox.end()

    async def _write(self, write: Callable[[AnswerFrame], Awaitable[None]], outbox: Outbox) -> None:
        while answers := await outbox.take():
            for frame in self._frames(answers):
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
            self._fill(whole.responses.add(), answer)
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

    def _fill(self, response: ProposeResponse | VerifyResponse, answer: SessionAnswer[Any]) -> None:
        # In place, because a message that is made of others copies each of them.
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

    def _leave(self, outbox: Outbox) -> list[asyncio.Future[Any]]:
        """Queues the leases at once, because a handler may be cancelled a second time; returns that job's futures."""
        # A service that has stopped has freed everything.
        with suppress(NotReady):
            leaving = self._device.call(partial(self._sessions.table.leave, outbox))
            leaving.add_done_callback(lambda _left: self._sweep_after(self._sessions.table.lease_s))
            return [leaving]
        return []

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
