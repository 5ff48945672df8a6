"""The client for asyncio. Knows no protobuf; the same as `blocking` but for the words async and await."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Self, Unpack

import grpc

from outrider.client.calls import Caller, Cancelled, Terms, call_cancelled, client_closed, closed_before
from outrider.client.events import Answer, AsyncReplies, Event, Stub, Transcript, event_or_end
from outrider.client.requests import GenerationOptions, Message, Metadata, Prompt, chat_request, generate_request
from outrider.rpc.channels import open_channel


class AsyncStream:
    """The events of one request, as they come. Like a file it is read once, and goes on where reading stopped.

    Leaving its context, `cancel`, cancelling the task that reads and dropping it unread all end the call, and with it
    the work of the services. Reading raises the OutriderError that the gateway answered, PeerLost when it is gone,
    TimedOut, and Cancelled when the client was closed meanwhile, or a task that read before was cancelled.
    """

    def __init__(self, call: AsyncReplies, terms: Terms) -> None:
        self._call = call
        self._terms = terms
        self._transcript = Transcript()
        self._cancelled = False
        # gRPC itself would go on receiving for a stream that nobody holds any more.
        self._end_call = weakref.finalize(self, _end, call)
        self._end_call.atexit = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        try:
            event = event_or_end(await self._call.read())
        except grpc.RpcError as error:
            raise self._terms.failure(error) from None
        except asyncio.CancelledError:
            if _is_being_cancelled():
                raise
            if not self._cancelled:
                raise self._ended_by_caller() from None
            event = None
        if event is None:
            raise StopAsyncIteration
        return self._transcript.add(event)

    async def text(self, sample_index: int = 0) -> AsyncIterator[str]:
        """The text of one sample, piece by piece as it comes: what is left of it where reading has begun already."""
        async for event in self:
            if event.sample_index == sample_index and event.text:
                yield event.text

    async def result(self) -> Answer:
        """Reads to the end and returns everything, what was read before included. Raises Cancelled after `cancel`."""
        async for _ in self:
            pass
        if self._cancelled and not self._transcript.is_whole:
            raise call_cancelled()
        return self._transcript.answer()

    def cancel(self) -> None:
        """Ends the call; reading ends then, too. Without an effect on a call that has ended."""
        self._cancelled = True
        self._end_call()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def _ended_by_caller(self) -> Cancelled:
        """For a task that nobody cancelled: a bare CancelledError would end it as if somebody had."""
        return client_closed() if self._terms.closed.is_set() else call_cancelled()


class AsyncClient:
    """A connection to a gateway, made by the first request and again after a loss. Belongs to one event loop.

    `timeout_s` and `metadata` hold for every request that names none of its own; metadata of both is sent. Raises
    InvalidRequest about an address that is not HOST:PORT, and about a timeout or metadata that no call can have.
    """

    def __init__(self, address: str, *, timeout_s: float | None = None, metadata: Metadata | None = None) -> None:
        self._caller = Caller(address, timeout_s, metadata)
        # Made within the event loop to which it then belongs: a client may be made before there is one.
        self._channel: grpc.aio.Channel | None = None

    def generate(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> AsyncStream:
        """Continues text or token ids; see GenerationOptions. Needs a running event loop.

        Raises InvalidRequest and PromptTooLong at once about what no message can carry, TypeError about an option that
        there is not, and Cancelled after `close`. What the gateway refuses is raised by reading.
        """
        message, terms = generate_request(prompt, options), self._caller.terms(options)
        call = Stub(self._open()).Generate(message, timeout=terms.timeout_s, metadata=terms.metadata)
        return AsyncStream(call, terms)

    def chat(self, messages: Iterable[Message], **options: Unpack[GenerationOptions]) -> AsyncStream:
        """Answers the last of some messages, each with a role and a content; the same in everything else."""
        message, terms = chat_request(messages, options), self._caller.terms(options)
        call = Stub(self._open()).Chat(message, timeout=terms.timeout_s, metadata=terms.metadata)
        return AsyncStream(call, terms)

    async def close(self) -> None:
        """Ends the connection and every request on it, whose reading then raises Cancelled; there is no way back."""
        self._caller.closed.set()
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _open(self) -> grpc.aio.Channel:
        if self._caller.closed.is_set():
            raise closed_before()
        if self._channel is None:
            self._channel = open_channel(self._caller.address)
        return self._channel


def _end(call: AsyncReplies) -> None:
    """Cancels a call unless it has ended: its event loop may be over by then."""
    if not call.done():
        call.cancel()


def _is_being_cancelled() -> bool:
    """Whether somebody cancelled the task that runs, and not merely its call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
