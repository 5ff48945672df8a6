"""The client without an event loop: any number of threads may share a client, and one reads each stream."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, Unpack

import grpc

from outrider.client.calls import CALL_CANCELLED, CLOSED_BEFORE, Caller, Cancelled, Terms
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
from outrider.rpc.channels import open_blocking_channel
from outrider.rpc.tls import Tls
from outrider.rpc.wire import channel_options
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub

CallIterator = Any
"""An iterator over the messages of a call, which can be cancelled; gRPC has no public type for it."""


class Stream:
    """The events of one request, as they come. Like a file it is read once, and goes on where reading stopped.

    Leaving its context, `cancel`, and dropping it unread all end the call, and with it the work of the services.
    Reading raises the OutriderError that the gateway answered, PeerLost when it is gone, TimedOut, and Cancelled when
    the client was closed meanwhile.
    """

    def __init__(self, call: CallIterator, terms: Terms) -> None:
        self._call = call
        self._terms = terms
        self._builder = AnswerBuilder()
        self._cancelled = False
        # gRPC itself would go on receiving for a stream that no code holds any more.
        self._end_call = weakref.finalize(self, call.cancel)
        self._end_call.atexit = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        try:
            message = next(self._call)
        except grpc.RpcError as error:
            if self._cancelled:
                raise StopIteration from None
            raise self._terms.failure(error) from None
        return self._builder.add(event_from(message))

    def text(self, sample_index: int = 0) -> Iterator[str]:
        """The text of one sample, piece by piece as it comes: what is left of it where reading has begun already."""
        for event in self:
            if event.sample_index == sample_index and event.text:
                yield event.text

    def result(self) -> Answer:
        """Reads to the end and returns everything, what was read before included. Raises Cancelled after `cancel`."""
        for _ in self:
            pass
        if self._cancelled and not self._builder.is_whole:
            raise Cancelled(CALL_CANCELLED)
        return self._builder.answer()

    def cancel(self) -> None:
        """Ends the call; reading ends then, too. From any thread, and without an effect on a call that has ended."""
        self._cancelled = True
        self._end_call()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class Client:
    """A connection to a gateway, made by the first request and again after a loss.

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
        self._channel = open_blocking_channel(address, self._caller.files, channel_options())
        self._stub = GenerationServiceStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> Stream:
        """Continues text or token ids; see GenerationOptions.

        Raises InvalidRequest and PromptTooLong at once about what no message can carry, TypeError about an option that
        there is not, and Cancelled after `close`. What the gateway refuses is raised by reading.
        """
        return self._started(self._stub.Generate, generate_request(prompt, options), options)

    def chat(self, messages: Iterable[Message], **options: Unpack[ChatOptions]) -> Stream:
        """Answers the last of some messages, each with a role and a content; the same in everything else."""
        return self._started(self._stub.Chat, chat_request(messages, options), options)

    def close(self) -> None:
        """Ends the connection and every request on it, whose reading then raises Cancelled. For good."""
        self._caller.closed.set()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _started(self, method: Callable[..., CallIterator], message: object, options: GenerationOptions) -> Stream:
        terms = self._caller.terms(options)
        try:
            return Stream(method(message, timeout=terms.timeout_s, metadata=terms.metadata), terms)
        except ValueError:
            # What gRPC says about a closed channel; another thread may have closed it.
            if not terms.closed.is_set():
                raise
            raise Cancelled(CLOSED_BEFORE) from None
