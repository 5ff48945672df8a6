"""The client for asyncio: the same as `blocking` but for the words async and await."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Iterable
from typing import Any, Self, Unpack

import grpc

from outrider.client.calls import CALL_CANCELLED, CLIENT_CLOSED, CLOSED_BEFORE, Caller, Cancelled, Terms, unreadable
from outrider.client.events import Answer, AnswerBuilder, Event, event_from
from outrider.client.requests import (
    ChatOptions,
    GenerationOptions,
    Message,
    Metadata,
    Prompt,
    chat_request,
    generate_request,
)
from outrider.rpc.channels import open_channel
from outrider.rpc.tls import Tls
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub


class AsyncStream:
    """The events of one request, as they come. Like a file it is read once, and goes on where reading stopped.

    Leaving its context, `cancel`, cancelling the task that reads and dropping it unread all end the call, and with it
    the work of the services. Reading raises the OutriderError that the gateway answered, PeerLost when it is gone,
    TimedOut, and Cancelled when the client was closed meanwhile, or a task that read before was cancelled.
    """

    def __init__(self, call: "grpc.aio.UnaryStreamCall[Any, pb.GenerateResponse]", terms: Terms) -> None:
        self._call = call
        self._terms = terms
        self._builder = AnswerBuilder()
        self._cancelled = False
        # gRPC itself would go on receiving for a stream that no code holds any more. By then the call may have ended,
        # and its event loop too.
        self._end_call = weakref.finalize(self, lambda: call.done() or call.cancel())
        self._end_call.atexit = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            # It may look into the connection, and wait for that.
            raise await asyncio.to_thread(self._terms.failure, error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if not self._cancelled:
                # Only the call was cancelled: a bare CancelledError would end the task as if somebody had cancelled it.
                raise Cancelled(CLIENT_CLOSED if self._terms.closed.is_set() else CALL_CANCELLED) from None
            message = grpc.aio.EOF
        if message is None:
            self._end_call()
            raise unreadable(self._terms.address)
        if not isinstance(message, pb.GenerateResponse):
            raise StopAsyncIteration
        return self._builder.add(event_from(message))

    async def text(self, sample_index: int = 0) -> AsyncIterator[str]:
        """The text of one sample, piece by piece as it comes: what is left of it where reading has begun already."""
        async for event in self:
            if event.sample_index == sample_index and event.text:
                yield event.text

    async def result(self) -> Answer:
        """Reads to the end and returns everything, what was read before included. Raises Cancelled after `cancel`."""
        async for _ in self:
            pass
        if self._cancelled and not self._builder.is_whole:
            raise Cancelled(CALL_CANCELLED)
        return self._builder.answer()

    def cancel(self) -> None:
        """Ends the call; reading ends then, too. Without an effect on a call that has ended."""
        self._cancelled = True
        self._end_call()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class AsyncClient:
    """A connection to a gateway, made by the first request and again after a loss. Belongs to one event loop.

    `timeout_s` and `metadata` hold for every request that names none of its own; metadata of both is sent. `api_key` is
    what a gateway with keys asks for; without `tls` it travels as it is. With `tls` the connection is one of TLS, whose
    files are read once. Raises InvalidRequest about an address that is not HOST:PORT, files that do not fit, and a
    timeout, metadata or key that no call can have.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float | None = None,
        metadata: Metadata | None = None,
        api_key: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._caller = Caller(address, timeout_s, metadata, api_key, tls)
        # Made within the event loop to which it then belongs: a client may be made before there is one.
        self._channel: grpc.aio.Channel | None = None

    def generate(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> AsyncStream:
        """Continues text or token ids; see GenerationOptions. Needs a running event loop.

        Raises InvalidRequest and PromptTooLong at once about what no message can carry, TypeError about an option that
        there is not, and Cancelled after `close`. What the gateway refuses is raised by reading.
        """
        return self._started("Generate", generate_request(prompt, options), options)

    def chat(self, messages: Iterable[Message], **options: Unpack[ChatOptions]) -> AsyncStream:
        """Answers the last of some messages, each with a role and a content; the same in everything else."""
        return self._started("Chat", chat_request(messages, options), options)

    async def close(self) -> None:
        """Ends the connection and every request on it, whose reading then raises Cancelled. For good."""
        self._caller.closed.set()
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _started(self, method: str, message: object, options: GenerationOptions) -> AsyncStream:
        terms = self._caller.terms(options)
        if terms.closed.is_set():
            raise Cancelled(CLOSED_BEFORE)
        if self._channel is None:
            self._channel = open_channel(terms.address, self._caller.files)
        call = getattr(GenerationServiceStub(self._channel), method)
        return AsyncStream(call(message, timeout=terms.timeout_s, metadata=terms.metadata), terms)
