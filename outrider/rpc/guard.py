"""The wall around every handler: no Python text leaves a process, and nobody keeps it busy with nothing.

An OutriderError ends a call with its own status. Any other exception is logged once, with its traceback, and ends the
call with INTERNAL "internal error". A message that cannot be parsed is the caller's fault, and not a Python exception.
Refusals and questions about the process itself are answered at a pace: a client that asks again at once takes no more
time, which the streams of others need.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import structlog
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from outrider.errors import InvalidRequest, OutriderError
from outrider.rpc.errors import UNEXPECTED_TEXT, status_of
from outrider.rpc.tls import check_client
from outrider.v1 import model_service_pb2

log = structlog.get_logger()

# A twentieth of a processor. Whoever asks for health asks once a second, and nobody means to be refused.
THROTTLED_PER_S = 100.0
# Of these at once; a process that has just started is asked by many.
THROTTLED_BURST = 200
# Whoever waits keeps a request's memory, of up to 4 MB.
MAX_THROTTLED_WAIT_S = 0.2
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


@dataclass(frozen=True, slots=True)
class Unparsed:
    """Stands for a message that was not valid protobuf."""

    size: int


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
        """Waits for it."""
        if wait_s := self.wait_s(asyncio.get_running_loop().time()):
            await asyncio.sleep(wait_s)


@asynccontextmanager
async def rpc_errors(context: Context, throttle: Throttle | None) -> AsyncIterator[None]:
    """Ends the call with the status of whatever is raised inside; what aborts or cancels the call passes through.

    A refusal waits for its turn where there is a throttle.
    """
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except OutriderError as error:
        if throttle is not None:
            await throttle.turn()
        await context.abort_with_status(status_of(error))
    except Exception as error:
        if context.cancelled() or context.done():
            # A write into a call that its client has left raises one of several classes; nobody is there to be told.
            log.debug("call ended by its client", reason=type(error).__name__)
            return
        log.exception("unexpected error in a handler")
        await context.abort_with_status(status_of(OutriderError(UNEXPECTED_TEXT)))


class Guard(grpc.aio.ServerInterceptor):
    """Puts every handler of a server behind the wall, unary and streaming alike.

    `clients` are the names of those who are let in, where not all are; whoever watches health needs no name.
    """

    def __init__(self, clients: Collection[str] = ()) -> None:
        self._clients = clients
        self._throttle = Throttle()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The handler of a method, guarded; None for a method that nobody serves."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        inner: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        kind = "_".join(
            "stream" if each else "unary" for each in (handler.request_streaming, handler.response_streaming)
        )
        make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
        checked = _checked_stream if handler.request_streaming else _checked
        method, throttle = handler_call_details.method, self._throttle
        clients = () if method.startswith(OPEN) else self._clients
        is_fact = method.startswith(FACTS)

        async def admit(context: Context) -> None:
            if is_fact:
                await throttle.turn()
            check_client(context, clients)

        # grpc.aio tells generators from coroutines by looking at the function, so each gets a wrapper of its kind.
        wrap = _generator if inspect.isasyncgenfunction(inner) else _coroutine
        wrapped: Handler = make(
            # One turn is enough for a call.
            wrap(inner, checked, admit, None if is_fact else throttle),
            request_deserializer=_tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )
        return wrapped


def _coroutine(
    inner: Function, checked: Function, admit: Callable[[Context], Awaitable[None]], throttle: Throttle | None
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def call(request: object, context: Context) -> object:
        async with rpc_errors(context, throttle):
            await admit(context)
            return await inner(checked(request), context)
        return None

    return call


def _generator(
    inner: Function, checked: Function, admit: Callable[[Context], Awaitable[None]], throttle: Throttle | None
) -> Callable[[Any, Context], AsyncIterator[Any]]:
    async def stream(request: object, context: Context) -> AsyncIterator[Any]:
        async with rpc_errors(context, throttle):
            await admit(context)
            async for response in inner(checked(request), context):
                yield response

    return stream


def _tolerant(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """A deserializer that returns Unparsed where the original raises: grpc would send the exception's text."""
    if deserializer is None:
        return None

    def parse(data: bytes) -> object:
        try:
            return deserializer(data)
        except Exception:  # noqa: BLE001 - protobuf does not say which exceptions its parsers raise
            return Unparsed(len(data))

    return parse


def _checked(message: object) -> object:
    if isinstance(message, Unparsed):
        raise InvalidRequest("message", f"{message.size} bytes", "a valid protobuf message of this method")
    return message


async def _checked_stream(messages: AsyncIterator[object]) -> AsyncIterator[object]:
    async for message in messages:
        yield _checked(message)
