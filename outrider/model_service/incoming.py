"""Messages of a link on their way to the device thread: opens in parts, grammars to compile, one job a message.

A message that opens a session with a grammar waits until it is compiled, and so do those after it. Whatever is wrong
with a message ends the session that it names, and nothing else.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

import structlog

from outrider.constraint import MAX_GRAMMAR_BYTES
from outrider.engine.device_thread import DeviceWorker
from outrider.errors import InvalidRequest, NotReady, OutriderError, Overloaded
from outrider.grammar import Grammar, GrammarEngine
from outrider.model_service.leases import MAX_SESSIONS
from outrider.model_service.outbox import Outbox
from outrider.model_service.servicer import ServiceFacts
from outrider.model_service.sessions import SessionStore
from outrider.parameters import MAX_SALT_BYTES
from outrider.rpc.fencing import Fence, check_fence
from outrider.rpc.wire import MAX_OF_SESSION
from outrider.v1.draft_service_pb2 import ProposeRequest
from outrider.v1.target_service_pb2 import VerifyRequest
from outrider.v1.types_pb2 import OpenPart

# Tokens of opens that are on their way in parts, of one link.
MAX_PART_TOKENS = 4 << 20

log = structlog.get_logger()

RequestT = TypeVar("RequestT", ProposeRequest, VerifyRequest)
Job = Callable[[], None]
"""Work of the device thread for a message; raises what ends the message's session."""
Jobs = list[tuple[Fence, Job]]


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


@dataclass(slots=True)
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
    facts: ServiceFacts
    sessions: SessionStore[Any]
    device: DeviceWorker[Any]
    job: Callable[[Arrived[RequestT], Sequence[int], Outbox], Job]
    """LinkServicer.job."""
    compiled: Callable[[GrammarEngine, str, bytes, Sequence[int]], Awaitable[Grammar]]
    """LinkServicer.compiled."""
    run: Callable[[Jobs], None]
    """Runs jobs of the link; on the device thread."""
    parts: OpenParts = field(default_factory=OpenParts)
    compiling: dict[bytes, Compiling[RequestT]] = field(default_factory=dict)

    def must_wait(self, message: Arrived[RequestT]) -> bool:
        """Keeps an open with a grammar, and what comes after it, until that is compiled; returns whether it did."""
        request, session_id, grammars = message.request, message.fence.session_id, self.facts.grammars
        found = self.compiling.get(session_id)
        if found is None:
            text = request.open.session.grammar if request.HasField("open") else ""
            salt = request.open.session.cache_salt
            if not text or grammars is None or len(text.encode()) > MAX_GRAMMAR_BYTES or len(salt) > MAX_SALT_BYTES:
                return False
            tokens = [*self.parts.peek(message.fence)]
            tokens += request.open.session.token_ids
            output = tokens[request.open.session.prompt_len :]
            compiled = self._compile(partial(self.compiled, grammars, text, salt, output), session_id)
            found = self.compiling[session_id] = Compiling(asyncio.create_task(compiled))
        elif request.HasField("ping") or len(found.waiting) >= MAX_OF_SESSION:
            return False
        found.waiting.append(message)
        return True

    async def _compile(self, compile_it: Callable[[], Awaitable[Grammar]], session_id: bytes) -> None:
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
        waiting = self.compiling.pop(session_id).waiting
        opening = waiting.pop(0)
        jobs = self.jobs(replace(opening, grammar=grammar)) if refused is None else [self.refusal(opening, refused)]
        for message in waiting:
            # It may be opened once more, and then needs another.
            if not self.must_wait(message):
                jobs += self.jobs(message)
        # A service that has stopped runs none.
        with suppress(NotReady):
            self.device.post(partial(self.run, jobs))

    def refusal(self, message: Arrived[RequestT], error: OutriderError) -> tuple[Fence, Job]:
        return message.fence, partial(self.sessions.refuse, message.fence, error, self.outbox)

    def jobs(self, message: Arrived[RequestT]) -> Jobs:
        """A message as at most one job: of what it says, or of the error for which it is refused."""
        try:
            job = self._job(message)
        except OutriderError as error:
            return [self.refusal(message, error)]
        except Exception:
            # What a bug says is for the log, and other sessions are on this link.
            log.exception("a message could not be read")
            return [self.refusal(message, OutriderError("the message could not be taken"))]
        return [] if job is None else [(message.fence, job)]

    def _job(self, message: Arrived[RequestT]) -> Job | None:
        """Work of the device thread for a message, None for nothing; raises what the message is refused for."""
        request, fence, parts, outbox = message.request, message.fence, self.parts, self.outbox
        check_fence(fence, self.facts.context_len)
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
                return partial(self.sessions.table.close, fence, outbox)
            case "open":
                # One that is here may be opened again: it goes on, as any that runs.
                if self.sessions.is_draining and self.sessions.table.get(fence.session_id) is None:
                    raise NotReady("the service is stopping")
                earlier = parts.take(fence)
                if len(earlier) != request.open.session.part_len:
                    return partial(self.sessions.want_tokens, fence, None, outbox)
        return self.job(message, earlier, outbox)
