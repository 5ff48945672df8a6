"""GenerationService: carries requests in and events out; no client is waited for without end.

The next round begins while the message about the one before is still leaving, so the way to the client costs no round
anything.
"""

import asyncio
import types
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Self, TypeVar

import grpc
from google.protobuf.message import Message

from gateway.generation.frontend import ClientStalled, Frontend
from gateway.generation.request import GenerationRequest
from gateway.grpc.keys import entrance_of
from gateway.grpc.messages import chat_request_from, event_message, request_from
from gateway.keys.door import Door, Entrance
from outrider.errors import OutriderError
from outrider.process import telemetry
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1.generation_service_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server

Context = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
ChatContext = grpc.aio.ServicerContext[pb.ChatRequest, pb.GenerateResponse]
MAX_LEAVING = 4  # messages of a call; the next round waits for one of them
ItemT = TypeVar("ItemT")


class ClientWriter:
    """Writes to a call, in order; a message may take stall_s seconds. Leaving it gives up what is still on its way.

    Messages leave when `go` or `flush` is called after them.
    """

    def __init__(
        self, context: grpc.aio.ServicerContext[Any, Any], stall_s: float, head: Sequence[tuple[str, str]] = ()
    ) -> None:
        """`head` is the metadata that goes before the first message."""
        self._context, self._head = context, head
        self._stall_s = stall_s
        self._messages: deque[Message] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._wanted: asyncio.Future[None] | None = None
        self._moved: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        # Else the head would go with the first message, and while that waits for its reader gRPC cannot end the call.
        await self._context.send_initial_metadata(tuple(self._head))
        return self

    async def __aexit__(self, *_exit: object) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.cancel()
            # Whatever the write says now is about a call that has ended for a better reason.
            await asyncio.wait({writing})
            if not writing.cancelled():
                writing.exception()

    async def write(self, message: Message) -> None:
        """Takes a message; waits while several before it have not left.

        Raises ClientStalled when none of these leaves, and what a write raises when its client left.
        """
        if len(self._messages) >= MAX_LEAVING:
            await self._move()
        if self._writing is not None and self._writing.done():
            self._writing.result()
        self._messages.append(message)

    def go(self) -> None:
        """Lets the messages leave that were taken; they are not waited for."""
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="client writer")
        elif self._messages and self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    async def flush(self) -> None:
        """Waits until all messages have left; raises as `write`."""
        self.go()
        while self._messages:
            await self._move()

    async def _move(self) -> None:
        """Waits until one more message has left."""
        if self._writing is not None and self._writing.done():
            self._writing.result()
        self._moved = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._stall_s):
                await self._moved
        except TimeoutError:
            raise ClientStalled(f"The client read nothing for {self._stall_s:g} seconds") from None

    async def _write(self) -> None:
        """Writes what comes; a task does it, because the next round does not wait for it."""
        try:
            while True:
                while self._messages:
                    await self._context.write(self._messages[0])
                    self._messages.popleft()
                    self._wake()
                self._wanted = asyncio.get_running_loop().create_future()
                await self._wanted
        finally:
            self._wake()

    def _wake(self) -> None:
        if self._moved is not None and not self._moved.done():
            self._moved.set_result(None)


class GenerationServicer(GenerationServiceServicer):
    """Serves Generate and Chat to clients that take each message in time."""

    def __init__(self, frontend: Frontend, client_stall_s: float, door: Door | None = None) -> None:
        self._frontend = frontend
        self._client_stall_s = client_stall_s
        self._door = door

    async def Generate(  # type: ignore[override]  # noqa: N802 - the name is the protocol's
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        """Writes a message for every round and every completion.

        It writes instead of yielding, so that a client that leaves interrupts this very frame, and everything below it
        is closed before the call is over. A generator would be left to the garbage collector.
        """
        with telemetry.span("Generate", parent=_carrier(context)):
            with self._entrance(context, request) as enter:
                asked = request_from(request)
            await self._answer(asked, enter, context)

    async def Chat(  # type: ignore[override]  # noqa: N802 - the name is the protocol's
        self, request: pb.ChatRequest, context: ChatContext
    ) -> None:
        """Generates the answer to a conversation, and streams the same messages as Generate."""
        with telemetry.span("Chat", parent=_carrier(context)):
            with self._entrance(context, request) as enter:
                asked = await chat_request_from(request, self._frontend.chat_template)
            await self._answer(asked, enter, context)

    @contextmanager
    def _entrance(self, context: Context | ChatContext, message: Message) -> Iterator[Entrance | None]:
        """The entrance of a message, None where no keys are asked for; what is refused within counts for the key."""
        entrance = None if self._door is None else entrance_of(self._door, context.invocation_metadata())
        try:
            yield entrance
        except OutriderError:
            if entrance is not None:
                entrance.refused(message.ByteSize())
            raise

    async def _answer(self, request: GenerationRequest, enter: Entrance | None, context: Context | ChatContext) -> None:
        async with (
            self._frontend.open([request], enter) as generation,
            aclosing(generation.events) as events,
            ClientWriter(context, self._client_stall_s, _head(request)) as writer,
        ):
            try:
                while True:
                    # What the next round has to say to a service goes first, because that is waited for.
                    _, event = await begun(events.__anext__(), writer.go)
                    await writer.write(event_message(event))
            except StopAsyncIteration:
                await writer.flush()
            except ClientStalled:
                raise
            except OutriderError:
                # What an answer has said comes before the error that it ends with.
                await writer.flush()
                raise


@types.coroutine
def begun(step: Awaitable[ItemT], then: Callable[[], None]) -> Generator[Any, None, ItemT]:
    """Waits for a step, and calls `then` once: when the step first waits for something itself, or is over at once."""
    waiting = step.__await__()
    try:
        try:
            awaited = waiting.send(None)
        finally:
            then()
        while True:
            try:
                yield awaited
            except BaseException as error:  # noqa: BLE001 - the step decides what becomes of it, a cancellation too
                awaited = waiting.throw(error)
            else:
                awaited = waiting.send(None)
    except StopIteration as end:
        result: ItemT = end.value
        return result


def _head(request: GenerationRequest) -> Sequence[tuple[str, str]]:
    """Metadata before an answer: the fields of messages that the prompt says otherwise."""
    named = ", ".join(name.replace(".function", "") for name in request.ignored)
    return [("x-outrider-ignored", named)] if named else []


def _carrier(context: Context | ChatContext) -> dict[str, str]:
    """Metadata that the client sent beside its message, as far as it is text."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def generation_service(
    frontend: Frontend, client_stall_s: float, door: Door | None = None
) -> dict[str, Callable[[grpc.aio.Server], None]]:
    """The service for `outrider.rpc.channels.serve`: its full name, and what adds it to a server.

    Without a door it is not asked whose a request is.
    """
    servicer = GenerationServicer(frontend, client_stall_s, door)
    name = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
    return {name: lambda server: add_GenerationServiceServicer_to_server(servicer, server)}
