"""The wall around every handler: no Python text leaves a process, and no caller keeps it busy with nothing.

An OutriderError ends a call with its own status. Any other exception is logged once, with its traceback, and ends the
call with INTERNAL "internal error". A message that cannot be parsed is the caller's fault, and not a Python exception.
Refusals and questions about the process itself are answered at a pace: a client that asks again at once takes no more
time, which the streams of others need.
"""

import asyncio
import inspect
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf.descriptor import Descriptor
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from outrider.errors import InvalidKey, InvalidRequest, OutriderError, check_count
from outrider.rpc.crowd import Crowd
from outrider.rpc.errors import UNEXPECTED_TEXT, status_of
from outrider.rpc.memory import SHORT_BYTES, STRANGERS, RequestMemory
from outrider.rpc.tls import check_client
from outrider.rpc.wire import MAX_MESSAGE_BYTES
from outrider.v1 import model_service_pb2

log = structlog.get_logger()

# A twentieth of a processor. A client that watches health asks once a second, and none is meant to be refused.
THROTTLED_PER_S = 100.0
# Of these at once; a process that has just started is asked by many.
THROTTLED_BURST = 200
# A call that waits keeps a request's memory, of up to 4 MB.
MAX_THROTTLED_WAIT_S = 0.2
# A message of 4 MB that is all small fields becomes 220 MB, and takes as long to read as a hundred ordinary ones.
MAX_FIELDS = 50_000
MAX_NUMBER_BITS = 70
# For how long a caller may send its message, for which there has to be room; and where others wait for that room.
MESSAGE_WAIT_S, HURRIED_WAIT_S = 10.0, 0.25
# What a message holds while its call lasts, in its own lengths: as bytes, as they are in gRPC, and as fields.
HELD_TIMES = 3
# How the methods begin that need neither a name nor a key.
OPEN = f"/{health.SERVICE_NAME}/"
# And those that ask a process about itself.
FACTS = (
    OPEN,
    f"/{reflection.SERVICE_NAME}/",
    f"/{model_service_pb2.DESCRIPTOR.services_by_name['ModelService'].full_name}/GetModelInfo",
)

# Handlers and contexts of grpc are generic in messages that the wall never looks at.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Context = grpc.aio.ServicerContext[Any, Any]
Function = Callable[..., Any]


Metadata = Iterable[tuple[str, str | bytes]] | None
Arrival = Callable[[Any, Context], AbstractAsyncContextManager[list[Any]]]


@dataclass(frozen=True, slots=True)
class Unparsed:
    """Stands for a message of a stream that was not valid protobuf."""

    size: int


# Of a service, whose messages that are not on a link are small.
SERVICE_MEMORY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Accounts:
    """Memory of messages, and what is known of callers by what comes beside these."""

    memory: RequestMemory = field(default_factory=lambda: RequestMemory(SERVICE_MEMORY_BYTES))
    name: Callable[[Metadata], str] = lambda _metadata: ""
    """Name of the call's owner; empty where that is not known."""
    refused: Callable[[Metadata, int], None] = lambda _metadata, _num_bytes: None
    """Takes note of a message of so many bytes that could not be read."""


class Throttle:
    """Answers that cost little and are worth nothing to the caller, so many a second.

    The generic cell rate algorithm (ITU-T I.371). Where too many wait already an answer is due at once, because what
    waits takes memory: this is for clients that ask again when they are answered, and no wall against a flood.
    """

    def __init__(self) -> None:
        self._due_s = 0.0

    def wait_s(self, now_s: float) -> float:
        """Seconds for which the next answer has to wait; it takes its turn."""
        due_s = max(self._due_s, now_s - THROTTLED_BURST / THROTTLED_PER_S) + 1 / THROTTLED_PER_S
        if due_s > now_s + MAX_THROTTLED_WAIT_S:
            return 0.0
        self._due_s = due_s
        return max(0.0, due_s - now_s)

    async def turn(self) -> None:
        """Waits for the turn of an answer."""
        if wait_s := self.wait_s(asyncio.get_running_loop().time()):
            await asyncio.sleep(wait_s)


@asynccontextmanager
async def rpc_errors(context: Context, throttle: Throttle | None, crowd: Crowd) -> AsyncIterator[None]:
    """Ends the call with the status of whatever is raised inside; what aborts or cancels the call passes through.

    A refusal waits for its turn where there is a throttle, and one for want of a key for its connection's.
    """
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except OutriderError as error:
        # What waits keeps nothing of what was read.
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, InvalidKey):
            await crowd.refuse(context.peer())
        elif throttle is not None:
            await throttle.turn()
        await context.abort_with_status(status_of(error))
    except Exception as error:
        if context.cancelled() or context.done():
            # A write into a call that its client has left raises one of several classes; no caller is there to read it.
            log.debug("call ended by its client", reason=type(error).__name__)
            return
        log.exception("unexpected error in a handler")
        await context.abort_with_status(status_of(OutriderError(UNEXPECTED_TEXT)))


class Guard(grpc.aio.ServerInterceptor):
    """Puts every handler of a server within the wall, unary and streaming alike.

    `clients` are the names of those who are let in, where not all are; a caller that watches health needs no name.
    Messages of calls that have one are read here: with memory that is taken before they are, and with a look at how
    much they are before they are parsed.
    """

    def __init__(self, clients: Collection[str], crowd: Crowd, accounts: Accounts) -> None:
        self._clients, self._crowd, self._accounts = clients, crowd, accounts
        self._throttle = Throttle()
        self._counting = asyncio.Lock()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The handler of a method, guarded; None for a method that is not served."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        inner: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        # On the wire it is the same whether a method takes a message or many, and gRPC reads a single one by itself.
        make: Any = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        method, throttle = handler_call_details.method, self._throttle
        is_open, is_fact = method.startswith(OPEN), method.startswith(FACTS)
        clients = () if is_open else self._clients
        arrival: Arrival = partial(self._stream, is_open)
        if not handler.request_streaming and handler.request_deserializer is not None:
            arrival = partial(self._message, is_open, handler.request_deserializer)

        async def admit(context: Context) -> None:
            if is_fact:
                await throttle.turn()
            check_client(context, clients)

        # grpc.aio distinguishes generators from coroutines by looking at the function, so each gets a wrapper of its
        # kind.
        wrap = _generator if inspect.isasyncgenfunction(inner) else _coroutine
        wrapped: Handler = make(
            # One turn is enough for a call.
            wrap(inner, arrival, admit, partial(rpc_errors, throttle=None if is_fact else throttle, crowd=self._crowd)),
            request_deserializer=_tolerant(handler.request_deserializer) if handler.request_streaming else None,
            response_serializer=handler.response_serializer,
        )
        return wrapped

    @asynccontextmanager
    async def _stream(
        self, is_open: bool, messages: AsyncIterator[object], context: Context
    ) -> AsyncIterator[list[Any]]:
        async with self._present(is_open, context):
            yield [_checked_stream(messages)]

    @asynccontextmanager
    async def _message(
        self, is_open: bool, parse: Callable[[bytes], Any], _messages: object, context: Context
    ) -> AsyncIterator[list[Any]]:
        """The one message of a call, alone in a list, so that the code that takes it out is the only one to have it."""
        metadata, memory, peer = context.invocation_metadata(), self._accounts.memory, context.peer()
        known = self._crowd.known(peer)
        whose = "" if is_open else self._accounts.name(metadata)
        sender = whose or (peer if known.was_heard else STRANGERS)
        with memory.coming.share(sender) as coming, memory.kept.share(whose) as kept:
            await coming.take(MAX_MESSAGE_BYTES)
            data: Any = None
            try:
                async with memory.coming.reading(coming, MESSAGE_WAIT_S, HURRIED_WAIT_S):
                    data = await context.read()
            except TimeoutError:
                within = f"here within {MESSAGE_WAIT_S:g} seconds, and {HURRIED_WAIT_S:g} while others wait"
                raise InvalidRequest("message", "absent", within) from None
            finally:
                known.was_heard = isinstance(data, bytes)
            if not isinstance(data, bytes):
                raise InvalidRequest("message", "absent", "a message of this method")
            await kept.take(HELD_TIMES * len(data))
            coming.give_back()
            try:
                holder = [await self._parsed(parse, data)]
            except InvalidRequest:
                if not is_open:
                    self._accounts.refused(metadata, len(data))
                raise
            del data
            async with self._present(is_open, context):
                yield holder

    async def _parsed(self, parse: Callable[[bytes], Any], data: bytes) -> Any:  # noqa: ANN401 - what a method takes
        """A message from its bytes; raises InvalidRequest about what is none, and about one with too many fields."""
        if len(data) > SHORT_BYTES:
            kind: Any = getattr(parse, "__self__", None)
            # One after the other, and beside the loop: it takes a fifth of a second, in which others want their tokens.
            async with self._counting:
                count = await asyncio.to_thread(num_fields, data, kind.DESCRIPTOR)
            check_count("message", count, MAX_FIELDS, "fields")
        message = _tolerant(parse)(data)
        if isinstance(message, Unparsed):
            raise _no_message(message)
        return message

    @asynccontextmanager
    async def _present(self, is_open: bool, context: Context) -> AsyncIterator[None]:
        """While a call runs; one that everybody may make says nothing for its caller."""
        if is_open:
            yield
            return
        known, was_let_in = self._crowd.begin(context.peer()), True
        try:
            yield
        except InvalidKey:
            was_let_in = False
            raise
        finally:
            self._crowd.end(known, was_let_in=was_let_in)


Errors = Callable[[Context], AbstractAsyncContextManager[None]]


def _coroutine(
    inner: Function, arrival: Arrival, admit: Callable[[Context], Awaitable[None]], errors: Errors
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def call(request: object, context: Context) -> object:
        async with errors(context):
            await admit(context)
            async with arrival(request, context) as messages:
                return await inner(messages.pop(), context)
        return None

    return call


def _generator(
    inner: Function, arrival: Arrival, admit: Callable[[Context], Awaitable[None]], errors: Errors
) -> Callable[[Any, Context], AsyncIterator[Any]]:
    async def stream(request: object, context: Context) -> AsyncIterator[Any]:
        async with errors(context):
            await admit(context)
            async with arrival(request, context) as messages:
                async for response in inner(messages.pop(), context):
                    yield response

    return stream


def num_fields(data: bytes, kind: Descriptor) -> int:
    """Number of fields of a message of that kind and the messages in it, but no more than one too many; of what is no
    message, up to where that shows.
    """
    count, stack = 0, [(0, len(data), kind)]
    while stack:
        place, end, kind = stack.pop()
        fields = kind.fields_by_number
        while place < end and count <= MAX_FIELDS:
            count += 1
            tag, place = _varint(data, place)
            match tag & 7:
                case 0:
                    _, place = _varint(data, place)
                case 1:
                    place += 8
                case 2:
                    size, place = _varint(data, place)
                    field = fields.get(tag >> 3)
                    if field is not None and field.message_type is not None:
                        stack.append((place, min(place + size, end), field.message_type))
                    place += size
                case 5:
                    place += 4
    return count


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """A number of variable length, and where it ends; what is cut off or too long for one ends somewhere."""
    value = shift = 0
    while place < len(data) and shift < MAX_NUMBER_BITS:
        byte = data[place]
        value |= (byte & 127) << shift
        place += 1
        if byte < 128:
            break
        shift += 7
    return value, place


def _tolerant(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """A deserializer that returns Unparsed where the original raises: grpc would send the exception's text."""
    if deserializer is None:
        return lambda data: data

    def parse(data: bytes) -> object:
        try:
            return deserializer(data)
        except Exception:  # noqa: BLE001 - protobuf does not say which exceptions its parsers raise
            return Unparsed(len(data))

    return parse


def _no_message(unparsed: Unparsed) -> InvalidRequest:
    return InvalidRequest("message", f"{unparsed.size} bytes", "a valid protobuf message of this method")


async def _checked_stream(messages: AsyncIterator[object]) -> AsyncIterator[object]:
    async for message in messages:
        if isinstance(message, Unparsed):
            raise _no_message(message)
        yield message
