"""Entry of every surface: requests in, events out.

Entering `Frontend.open` has checked the requests and waited for the first place, and nothing was sent to a service
before. So whatever is wrong with a request is known before a surface has promised its client anything. Further samples
of a request begin as they get places.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import structlog

from gateway.generation.admission import Admission, Reservation
from gateway.generation.backend import Backend
from gateway.generation.beams import searched
from gateway.generation.events import Event
from gateway.generation.request import CheckedRequest, GenerationRequest
from gateway.generation.request_log import RequestLog
from gateway.generation.sample import RequestContext, merged, prepare
from gateway.keys.door import Entrance
from gateway.keys.tenant import Spending, Tenant
from gateway.sessions.peer import ModelInfo
from gateway.sessions.wait import Wait
from gateway.text.chat_template import ChatTemplate
from outrider.errors import InvalidRequest, OutriderError
from outrider.process.telemetry import bound, request_scope

log = structlog.get_logger()


class ClientStalled(OutriderError):
    """The client must read what it asked for."""

    status = "DEADLINE_EXCEEDED"
    reason = "CLIENT_STALLED"
    exit_code = 75


class Observer(Protocol):
    """A listener that every request is reported to, whatever surface it came by."""

    def admitted(self, requests: Sequence[CheckedRequest]) -> None:
        """A request has its first place; `requests` are its parts."""

    def placed(self, waited_s: float) -> None:
        """A sample of a request has its place, so long after the request began to wait."""

    def rejected(self, error: OutriderError, key: str | None) -> None:
        """A request was turned away; nothing was spent on it. `key` is the name of its API key, where keys are asked
        for.
        """

    def used(self, key: str, prompt_tokens: int, tokens: int) -> None:
        """A request with an API key of that name is over, and has used so many tokens."""

    def observe(self, event: Event) -> None:
        """A request has an event: a round, or the completion of a sample."""

    def ended(self, error: BaseException | None) -> None:
        """A request that was not turned away is over: None when it ended well, else what ended it."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Requests that belong together and have begun, and the events of all, each with the number of its request."""

    requests: tuple[CheckedRequest, ...]
    target: ModelInfo
    """Facts of the target whose weights the first of them has."""
    events: AsyncGenerator[tuple[int, Event], None]


ANY_NAME = "*"


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The name of the served model, and further ones by which clients may ask for it; "*" among these is any."""

    main: str
    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, names: Sequence[str], own: str) -> Self:
        """The names that an operator gave, of which the first that is one is the main one, else the model's own."""
        given = [name for name in names if name != ANY_NAME]
        main = given[0] if given else own
        return cls(main, tuple(name for name in names if name != main))

    def __contains__(self, name: str) -> bool:
        return name == self.main or name in self.others or ANY_NAME in self.others

    @property
    def listed(self) -> list[str]:
        """Names that can be listed."""
        return [self.main, *(name for name in self.others if name != ANY_NAME)]


@dataclass(frozen=True, slots=True)
class Frontend:
    """The gateway as its surfaces see it: `open` is where every request enters."""

    backend: Backend
    admission: Admission
    metrics: Observer
    chat_template: ChatTemplate
    names: ModelNames
    started_s: float = field(default_factory=time.time)

    @property
    def model_name(self) -> str:
        """The main name of the served model."""
        return self.names.main

    @asynccontextmanager
    async def open(
        self,
        requests: Sequence[GenerationRequest],
        enter: Entrance | None = None,
        wait: Wait | None = None,
    ) -> AsyncIterator[Generation]:
        """Checks requests that belong together, and waits for a place for the first sample; the others wait for theirs
        while events come. What they hold is given back when it is left. `enter` returns whose requests they are, where
        keys are asked for: asked when the requests are there, and once more when they have their place. `wait` gets
        where they stand in the queue, and then how much of the first one's prompt is read.

        Raises InvalidRequest, PromptTooLong, Overloaded, RateLimited, InvalidKey, and what is said of a target that is
        away.
        """
        async with AsyncExitStack() as stack:
            stack.enter_context(request_scope())
            tenant = None if enter is None else enter()
            if tenant is not None:
                stack.enter_context(bound(key=tenant.name))
            spending, priority = Spending(), 0 if tenant is None else tenant.key.priority
            try:
                if tenant is not None:
                    await tenant.count_request()
                    requests = [_with_key(request, tenant, len(requests)) for request in requests]
                with self.admission.arrival(priority):
                    contexts = [await self._prepared(requests, number, priority) for number in range(len(requests))]
                contexts[0] = replace(contexts[0], wait=wait)
                if tenant is not None:
                    asked = [context.request for context in contexts]
                    spending = await stack.enter_async_context(_spending(tenant, asked))
                places = await stack.enter_async_context(self.admission.entry(priority, wait))
                if enter is not None:
                    # It may have waited long, and begins only now.
                    enter()
                contexts = await self._renewed(contexts)
            except OutriderError as error:
                self.metrics.rejected(error, None if tenant is None else tenant.name)
                log.info("request refused", status=error.reason)
                raise
            except asyncio.CancelledError as error:
                # The client left the queue.
                self.metrics.ended(error)
                log.info("request refused", status="CLIENT_LEFT")
                raise
            checked = tuple(context.request for context in contexts)
            self.metrics.admitted(checked)
            record, end = RequestLog(checked, places.waited_s), None
            try:
                async with aclosing(self._events(contexts, places, record)) as events:
                    yield Generation(checked, contexts[0].target, events)
            except BaseException as error:
                end = error
                raise
            finally:
                self.metrics.ended(end)
                record.ended(end)
                spending.used_tokens = record.prompt_tokens + record.num_tokens
                if tenant is not None:
                    self.metrics.used(tenant.name, record.prompt_tokens, record.num_tokens)

    async def _prepared(self, requests: Sequence[GenerationRequest], number: int, priority: int) -> RequestContext:
        """Context of one of several requests, whose number is on its errors."""
        with _numbered(number, len(requests)):
            context = await prepare(requests[number], self.backend)
        context.placing.priority = priority
        return context

    async def _renewed(self, contexts: Sequence[RequestContext]) -> list[RequestContext]:
        """The requests with the weights that are there now, all with the first one's where they can have them."""
        found = list[RequestContext]()
        for number, context in enumerate(contexts):
            with _numbered(number, len(contexts)):
                found.append(await context.renewed(found[0].target if found else None))
        return found

    async def _events(
        self, contexts: Sequence[RequestContext], places: Reservation, record: RequestLog
    ) -> AsyncGenerator[tuple[int, Event], None]:
        if sum(context.request.num_runs for context in contexts) == 1:
            async with aclosing(self._samples(contexts, places)) as samples:
                stream = await anext(samples)
        else:
            stream = merged(self._samples(contexts, places))
        async with aclosing(stream) as events:
            while (numbered := await self.admission.next_of(events, places)) is not None:
                number, event = numbered
                self.metrics.observe(event)
                record.observe(event)
                yield number, event

    async def _samples(
        self, contexts: Sequence[RequestContext], places: Reservation
    ) -> AsyncGenerator[AsyncGenerator[tuple[int, Event], None], None]:
        """The events of each sample, prompt by prompt, as they get places; the request has the first one's already."""
        for number, context in enumerate(contexts):
            for index in range(context.request.num_runs):
                if number or index:
                    await self.admission.take(places)
                self.metrics.placed(places.waited_s)
                beams, waited_us = context.request.beam_search, int(1e6 * places.waited_s)
                sample = searched(context, beams, waited_us) if beams else context.sample(index, waited_us)
                yield self._in_place(number, sample, places)

    async def _in_place(
        self, number: int, events: AsyncGenerator[Event, None], places: Reservation
    ) -> AsyncGenerator[tuple[int, Event], None]:
        """A sample's events with the number of its request; its place is given back when it ends."""
        try:
            async with aclosing(events):
                async for event in events:
                    yield number, event
        finally:
            self.admission.give_back(places)


@contextmanager
def _numbered(number: int, count: int) -> Iterator[None]:
    """Puts the number of a request, of so many that belong together, on its errors."""
    try:
        yield
    except OutriderError as error:
        if count > 1:
            error.metadata["request"] = str(number)
        raise


def _with_key(request: GenerationRequest, tenant: Tenant, count: int) -> GenerationRequest:
    """A request, of so many that belong together, with the name of its key, and with no more tokens than that may ask
    for; raises InvalidRequest.
    """
    most, per_minute = tenant.limits.max_tokens, tenant.limits.tokens_per_minute
    request = replace(request, tenant=tenant.name, most_tokens=None if per_minute is None else per_minute // count)
    if request.max_tokens is None or most is None or request.max_tokens <= most:
        return replace(request, most_new_tokens=most)
    if request.up_to_context:
        return replace(request, max_tokens=most)
    raise InvalidRequest("max_tokens", request.max_tokens, f"at most {most} with this key")


def _spending(tenant: Tenant, requests: Sequence[CheckedRequest]) -> AbstractAsyncContextManager[Spending]:
    """Share of a key's limits for requests that belong together, and differ in their prompts alone."""
    prompt_tokens = sum(request.spec.prompt_len for request in requests)
    max_tokens = max(request.spec.max_len - request.spec.prompt_len for request in requests)
    samples = sum(request.sample_count for request in requests)
    return tenant.spending(samples, prompt_tokens, max_tokens, len(requests))
