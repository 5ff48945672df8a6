"""Entry of every surface: requests in, events out; places and the queue before them; a log line a request.

Entering `Frontend.open` has checked the requests and waited for the first place, and nothing was sent to a service
before. So whatever is wrong with a request is known before a surface has promised its client anything. A request that
waits holds nothing but a line in a list, so waiting costs no service anything; a full queue says so at once. Further
samples of a request begin as they get places.

A log line has sizes, times and figures, and never a word, a token id or a seed. Of an error only the reason is logged,
because its sentence may repeat what the client wrote.
"""

import asyncio
import math
import time
from bisect import insort
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol, Self, TypeVar

import structlog

from gateway.generation.backend import Backend
from gateway.generation.beams import searched
from gateway.generation.generate import CompletionEvent, Event, RequestContext, merged, prepare
from gateway.generation.request import CheckedRequest, GenerationRequest
from gateway.generation.transcript import SpeculationFigures
from gateway.keys.door import Entrance
from gateway.keys.tenant import Spending, Tenant
from gateway.text.chat_template import ChatTemplate
from outrider.errors import InvalidRequest, NotReady, OutriderError, Overloaded
from outrider.process.telemetry import bound, request_scope

# Seconds that a client is asked to wait: between a moment and a minute, by how fast places came free lately.
RETRY_AFTER_S = (1.0, 60.0)
SMOOTHING = 0.2

log = structlog.get_logger()

EventT = TypeVar("EventT")


class ClientStalled(OutriderError):
    """The client must read what it asked for."""

    status = "DEADLINE_EXCEEDED"
    reason = "CLIENT_STALLED"
    exit_code = 75


@dataclass(slots=True, eq=False)
class Places:
    """Places of one request: it has one for each of its samples that runs, and waits for one at a time."""

    arrived_s: float
    priority: int
    taken: deque[tuple[float, int]] = field(default_factory=deque)
    """Times when its places were taken, and how many samples ran then."""
    waited_s: float = 0.0
    """Seconds from its arrival until it got the latest one."""
    has_begun: bool = False
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    patience: asyncio.Timeout | None = None
    """Within which it waits for its next event."""


class Admission:
    """Admission of requests: at most `places` samples run at a time, and queue_len requests wait that have none.

    The smallest priority comes first, and within one who came first, one place at a time: a request that wants more
    than one goes to the end of its priority's queue for each. So the samples of large requests take turns with
    everybody else's. A request's priority never changes while it waits, and its place is never taken away.
    """

    def __init__(self, places: int, queue_len: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.places = places
        self.queue_len = queue_len
        self.running = 0  # samples
        self.is_leaving = False
        """Whether the gateway begins to stop, which its readiness says before anybody is turned away."""
        self._clock_s = clock_s
        self._queue: deque[Places] = deque()  # in the order in which they get places
        self._entered: set[Places] = set()
        self._left = asyncio.Event()
        # From one place that comes free to the next, as it was lately.
        self._free_s = RETRY_AFTER_S[0]
        self._num_arriving = 0
        self._is_closed = False
        self._is_over = False

    @property
    def waiting(self) -> int:
        """Requests that wait and have no sample running."""
        return sum(not places.taken for places in self._queue)

    def retry_after_s(self, priority: int = 0) -> int:
        """Whole seconds after which a request of that priority may find a place, after those that wait and go before.

        It follows from how fast places came free lately. Requests that run and have not ended count too: in a burst of
        long ones nothing else shows that they are long. A request that comes meanwhile, and goes before, is not
        foreseen.
        """
        now_s, (min_s, max_s) = self._clock_s(), RETRY_AFTER_S
        ages_s = [now_s - taken_s for places in self._entered for taken_s, _ in places.taken]
        free_s = max(self._free_s, sum(ages_s) / max(1, len(ages_s)) ** 2)
        num_before = sum(places.priority <= priority for places in self._queue)
        return math.ceil(min(max(min_s, (num_before + 1) * free_s), max_s))

    def check(self, priority: int = 0) -> None:
        """Raises Overloaded when a request would not even be queued, so that it costs nothing more; NotReady after
        `close`. A full queue is full for all; the priority says when to come again.
        """
        self._check_open()
        if self.running >= self.places and self.waiting >= self.queue_len:
            raise Overloaded(
                f"{self.running} of {self.places} places are taken and {self.waiting} requests wait already, "
                f"of at most {self.queue_len}",
                retry_after_s=self.retry_after_s(priority),
            )

    def close(self) -> None:
        """Refuses requests that come, or wait and have not begun, so that they go elsewhere; others get all places."""
        self.is_leaving = self._is_closed = True
        for places in self._queue:
            if not places.has_begun:
                places.turn.set()
        self._queue = deque(places for places in self._queue if places.has_begun)

    def end(self) -> None:
        """Ends those who still run, wherever they are: what they wait for next is NotReady."""
        self._is_over = True
        for places in self._entered:
            if places.patience is not None:
                places.patience.reschedule(0.0)

    async def next_of(self, events: AsyncIterator[EventT], places: Places) -> EventT | None:
        """Next event of a request, None after the last; raises NotReady after `end`."""
        if not self._is_over:
            try:
                async with asyncio.timeout(None) as places.patience:
                    return await anext(events, None)
            except TimeoutError:
                if not self._is_over:
                    raise
            finally:
                places.patience = None
        raise NotReady("The gateway is stopping, and the time of its last requests is over")

    async def emptied(self) -> None:
        """Waits until all requests have ended that were let in."""
        while self._entered:
            self._left.clear()
            await self._left.wait()

    @contextmanager
    def arrival(self, priority: int = 0) -> Iterator[None]:
        """Bounds how many requests are looked at, which takes long while the target is away. Raises as `check` does."""
        self.check(priority)
        if self._num_arriving >= self.places + self.queue_len:
            message = f"{self._num_arriving} requests are looked at already, which takes long while the target is away"
            raise Overloaded(message, retry_after_s=self.retry_after_s(priority))
        self._num_arriving += 1
        try:
            yield
        finally:
            self._num_arriving -= 1

    @asynccontextmanager
    async def entry(self, priority: int = 0) -> AsyncIterator[Places]:
        """Waits for a request's first place. What it holds when it is left is given back. Raises as `check` does."""
        self.check(priority)
        places = Places(self._clock_s(), priority)
        self._entered.add(places)
        try:
            await self.take(places)
            yield places
        finally:
            # It may wait, for its first place or a further one, and its turn may have come in this very moment.
            with suppress(ValueError):
                self._queue.remove(places)
            while places.taken:
                self.give_back(places)
            self._entered.remove(places)
            self._left.set()

    async def take(self, places: Places) -> None:
        """Waits for one more place, after all that wait and have no greater priority. Raises NotReady when it is the
        first and the gateway stops.
        """
        places.turn.clear()
        insort(self._queue, places, key=lambda each: each.priority)
        self._call()
        await places.turn.wait()
        if not places.has_begun:
            self._check_open()

    def give_back(self, places: Places) -> None:
        """Gives back one place of a request; does nothing when it has none left."""
        if not places.taken:
            return
        # Which of them it was changes no mean. By those who ran beside it and not by all places: had these been taken,
        # it might have been as much slower.
        taken_s, num_running = places.taken.popleft()
        free_s = (self._clock_s() - taken_s) / max(num_running, self.running)
        self._free_s += SMOOTHING * (free_s - self._free_s)
        self.running -= 1
        self._call()

    def _check_open(self) -> None:
        if self._is_closed:
            raise NotReady("The gateway is stopping and takes no more requests")

    def _call(self) -> None:
        """Gives places to the first of the queue."""
        while self._queue and self.running < self.places:
            places, now_s = self._queue.popleft(), self._clock_s()
            self.running += 1
            places.taken.append((now_s, self.running))
            places.waited_s, places.has_begun = now_s - places.arrived_s, True
            places.turn.set()


class RequestLog:
    """Facts so far of one request, which may have several parts and has waited so long for its first place."""

    def __init__(self, requests: Sequence[CheckedRequest], waited_s: float) -> None:
        self._requests = requests
        self._waited_s = waited_s
        self._arrived_s = time.monotonic() - waited_s
        self._first_token_s: float | None = None
        self.num_tokens = 0
        """Number of output tokens of all samples."""
        self._completions: list[CompletionEvent] = []
        self._figures = SpeculationFigures()

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(request.spec.prompt_len for request in self._requests)

    def observe(self, event: Event) -> None:
        if isinstance(event, CompletionEvent):
            self._completions.append(event)
            return
        if self._first_token_s is None:
            self._first_token_s = time.monotonic()
        self.num_tokens += len(event.tokens)
        if event.committed is not None and not event.committed.is_first:
            self._figures.add(event.committed)

    def ended(self, error: BaseException | None) -> None:
        ended_s, figures = time.monotonic(), self._figures
        if error is None:
            status = "OK"
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            status = "CANCELLED"
        else:
            status = error.reason if isinstance(error, OutriderError) else OutriderError.reason
        log.info(
            "request ended",
            status=status,
            finish_reasons=[completion.finish_reason.value for completion in self._completions],
            samples=sum(request.sample_count for request in self._requests),
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=sum(each.cached_prompt_tokens for each in self._completions if not each.sample_index),
            completion_tokens=self.num_tokens,
            queue_ms=_ms(self._waited_s),
            first_token_ms=None if self._first_token_s is None else _ms(self._first_token_s - self._arrived_s),
            total_ms=_ms(ended_s - self._arrived_s),
            rounds=figures.rounds,
            drafts=figures.drafts,
            draft_tokens=figures.draft_tokens,
            accepted_tokens=figures.accepted_tokens,
            draft_acceptance_rate=round(figures.draft_acceptance_rate, 4),
            mean_acceptance_length=round(figures.mean_acceptance_length, 3),
            fallback_rounds=figures.fallback_rounds,
            target_reopens=sum(completion.target_reopens for completion in self._completions),
        )


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


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
        self, requests: Sequence[GenerationRequest], enter: Entrance | None = None
    ) -> AsyncIterator[Generation]:
        """Checks requests that belong together, and waits for a place for the first sample; the others wait for theirs
        while events come. What they hold is given back when it is left. `enter` returns whose requests they are, where
        keys are asked for: asked when the requests are there, and once more when they have their place.

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
                    tenant.count_request()
                    requests = [_with_key(request, tenant, len(requests)) for request in requests]
                with self.admission.arrival(priority):
                    contexts = [await self._prepared(requests, number) for number in range(len(requests))]
                if tenant is not None:
                    spending = stack.enter_context(_spending(tenant, [context.request for context in contexts]))
                places = await stack.enter_async_context(self.admission.entry(priority))
                if enter is not None:
                    # It may have waited long, and begins only now.
                    enter()
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
                    yield Generation(checked, events)
            except BaseException as error:
                end = error
                raise
            finally:
                self.metrics.ended(end)
                record.ended(end)
                spending.used_tokens = record.prompt_tokens + record.num_tokens
                if tenant is not None:
                    self.metrics.used(tenant.name, record.prompt_tokens, record.num_tokens)

    async def _prepared(self, requests: Sequence[GenerationRequest], number: int) -> RequestContext:
        """Context of one of several requests, whose number is on its errors."""
        try:
            return await prepare(requests[number], self.backend)
        except OutriderError as error:
            if len(requests) > 1:
                error.metadata["request"] = str(number)
            raise

    async def _events(
        self, contexts: Sequence[RequestContext], places: Places, record: RequestLog
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
        self, contexts: Sequence[RequestContext], places: Places
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
        self, number: int, events: AsyncGenerator[Event, None], places: Places
    ) -> AsyncGenerator[tuple[int, Event], None]:
        """A sample's events with the number of its request; its place is given back when it ends."""
        try:
            async with aclosing(events):
                async for event in events:
                    yield number, event
        finally:
            self.admission.give_back(places)


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


def _spending(tenant: Tenant, requests: Sequence[CheckedRequest]) -> AbstractContextManager[Spending]:
    """Share of a key's limits for requests that belong together, and differ in their prompts alone."""
    prompt_tokens = sum(request.spec.prompt_len for request in requests)
    max_tokens = max(request.spec.max_len - request.spec.prompt_len for request in requests)
    samples = sum(request.sample_count for request in requests)
    return tenant.spending(samples, prompt_tokens, max_tokens, len(requests))
