"""What every surface calls: requests in, events out.

Entering `open` has checked the requests and waited for places, and nothing was sent to a service before. So whatever is
wrong with a request is known before a surface has promised its client anything.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from gateway.generation.admission import Admission
from gateway.generation.backend import Backend
from gateway.generation.generate import Event, RequestContext, prepare
from gateway.generation.request import CheckedRequest, GenerationRequest
from gateway.generation.request_log import RequestLog, tell_refusal
from gateway.generation.samples import merged
from gateway.text.chat_template import ChatTemplate
from outrider.errors import OutriderError
from outrider.parameters import MAX_SAMPLES
from outrider.process.logs import request_scope

ValueT = TypeVar("ValueT")


class Observer(Protocol):
    """What is told of every request, whatever surface it came by."""

    def admitted(self, waited_s: float, requests: Sequence[CheckedRequest]) -> None:
        """A request has its places; `requests` are its parts."""

    def rejected(self, error: OutriderError) -> None:
        """A request was turned away; nothing was spent on it."""

    def observe(self, event: Event) -> None:
        """Something happened to a request."""

    def ended(self, error: BaseException | None) -> None:
        """A request that was not turned away is over: None when it ended well, else what ended it."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Requests that have their places, and the events of all, each with the number of its request."""

    requests: tuple[CheckedRequest, ...]
    events: AsyncGenerator[tuple[int, Event], None]


@dataclass(frozen=True, slots=True)
class Frontend:
    """The gateway as its surfaces see it."""

    backend: Backend
    admission: Admission
    metrics: Observer
    chat_template: ChatTemplate
    model_name: str
    started_s: float = field(default_factory=time.time)
    """When it was made, in seconds since 1970."""

    @asynccontextmanager
    async def open(
        self, requests: Sequence[GenerationRequest], time_left_s: float | None = None
    ) -> AsyncIterator[Generation]:
        """Checks requests that belong together, waits for their places, and holds these until it is left.

        Raises InvalidRequest, PromptTooLong, Overloaded, and what is said of a target that is away. `time_left_s` is
        what the client's deadline leaves; None for no end.
        """
        # What is out of range is refused later, with the range.
        num_samples = sum(min(max(1, request.sample_count or 1), MAX_SAMPLES) for request in requests)
        async with AsyncExitStack() as places:
            places.enter_context(request_scope())
            try:
                with self.admission.arrival(num_samples):
                    contexts = [await self._prepared(requests, number, time_left_s) for number in range(len(requests))]
                waited_s = await places.enter_async_context(self.admission.place(num_samples))
            except OutriderError as error:
                self.metrics.rejected(error)
                tell_refusal(error.reason)
                raise
            except asyncio.CancelledError as error:
                # The client left the queue.
                self.metrics.ended(error)
                tell_refusal("CLIENT_LEFT")
                raise
            checked = tuple(context.request for context in contexts)
            self.metrics.admitted(waited_s, checked)
            record, end = RequestLog(checked, waited_s), None
            try:
                async with aclosing(self._events(contexts, int(1e6 * waited_s), record)) as events:
                    yield Generation(checked, events)
            except BaseException as error:
                end = error
                raise
            finally:
                _soon(self.metrics.ended, end)
                record.ended(end)

    async def _prepared(
        self, requests: Sequence[GenerationRequest], number: int, time_left_s: float | None
    ) -> RequestContext:
        """One of several requests, whose number is on its errors."""
        try:
            return await prepare(requests[number], self.backend, time_left_s)
        except OutriderError as error:
            if len(requests) > 1:
                error.metadata["request"] = str(number)
            raise

    async def _events(
        self, contexts: Sequence[RequestContext], queue_us: int, record: RequestLog
    ) -> AsyncGenerator[tuple[int, Event], None]:
        streams = [_numbered(number, context.events(queue_us)) for number, context in enumerate(contexts)]
        async with aclosing(streams[0] if len(streams) == 1 else merged(streams)) as events:
            async for number, event in events:
                _soon(self.metrics.observe, event)
                record.observe(event)
                yield number, event


async def _numbered(number: int, events: AsyncGenerator[Event, None]) -> AsyncGenerator[tuple[int, Event], None]:
    async with aclosing(events):
        async for event in events:
            yield number, event


def _soon(observe: Callable[[ValueT], None], value: ValueT) -> None:
    """Lets the observer know, in order, while the next round waits for a service: counting takes a while."""
    asyncio.get_running_loop().call_soon(observe, value)
