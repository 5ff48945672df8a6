"""What every surface calls: requests in, events out; places and the queue before them; a log line a request.

Entering `Frontend.open` has checked the requests and waited for places, and nothing was sent to a service before. So
whatever is wrong with a request is known before a surface has promised its client anything. Whoever waits holds nothing
but a line in a list, so waiting costs no service anything; a full queue says so at once.

A log line has sizes, times and figures, and never a word, a token id or a seed. Of an error only the reason is logged,
because its sentence may repeat what the client wrote.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import structlog

from gateway.generation.generate import Backend, CompletionEvent, Event, RequestContext, merged, prepare
from gateway.generation.request import CheckedRequest, GenerationRequest
from gateway.generation.transcript import SpeculationFigures
from gateway.text.chat_template import ChatTemplate
from outrider.errors import InvalidRequest, NotReady, OutriderError, Overloaded
from outrider.parameters import MAX_SAMPLES
from outrider.process.telemetry import request_scope

# What a client is told to wait: between a moment and a minute, by how fast places came free lately.
RETRY_AFTER_S = (1.0, 60.0)
SMOOTHING = 0.2

log = structlog.get_logger()

ValueT = TypeVar("ValueT")


class ClientStalled(OutriderError):
    """The client must read what it asked for."""

    status = "DEADLINE_EXCEEDED"
    reason = "CLIENT_STALLED"
    exit_code = 75


@dataclass(slots=True, eq=False)
class _Waiter:
    num_samples: int
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    has_places: bool = False


class Admission:
    """At most `places` samples run at a time, and at most queue_len requests wait for places."""

    def __init__(self, places: int, queue_len: int) -> None:
        self.places = places
        self.queue_len = queue_len
        self.running = 0  # samples
        self._queue: deque[_Waiter] = deque()
        self._place_s = RETRY_AFTER_S[0]
        self._num_arriving = 0
        self._is_closed = False

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def retry_after_s(self) -> int:
        """Whole seconds after which a request that is turned away may find a place."""
        min_s, max_s = RETRY_AFTER_S
        return math.ceil(min(max(min_s, (self.waiting + 1) * self._place_s), max_s))

    def check(self, sample_count: int) -> None:
        """Raises Overloaded when a request for so many places would not even be queued, so that it costs nothing more.

        Raises InvalidRequest when it would never get them, NotReady after `close`.
        """
        self._check_open()
        if sample_count > self.places:
            limit = f"at most {self.places}, the samples that this gateway takes at a time"
            raise InvalidRequest("sample_count", sample_count, limit)
        if not self._has_room(sample_count) and self.waiting >= self.queue_len:
            raise Overloaded(
                f"{self.running} of {self.places} places are taken and {self.waiting} requests wait already, "
                f"of at most {self.queue_len}",
                retry_after_s=self.retry_after_s,
            )

    def close(self) -> None:
        """Sends whoever waits and whoever comes elsewhere; those who run keep their places."""
        self._is_closed = True
        for waiter in self._queue:
            waiter.turn.set()
        self._queue.clear()

    @contextmanager
    def arrival(self, sample_count: int) -> Iterator[None]:
        """Bounds how many requests are looked at, which takes long while the target is away. Raises as `check` does."""
        self.check(sample_count)
        if self._num_arriving >= self.places + self.queue_len:
            message = f"{self._num_arriving} requests are looked at already, which takes long while the target is away"
            raise Overloaded(message, retry_after_s=self.retry_after_s)
        self._num_arriving += 1
        try:
            yield
        finally:
            self._num_arriving -= 1

    @asynccontextmanager
    async def place(self, sample_count: int) -> AsyncIterator[float]:
        """Waits for places and holds them; gives the seconds that it waited. Raises as `check` does."""
        self.check(sample_count)
        arrived_s = time.monotonic()
        await self._enter(sample_count)
        entered_s = time.monotonic()
        try:
            yield entered_s - arrived_s
        finally:
            held_s = (time.monotonic() - entered_s) / self.places
            self._place_s += SMOOTHING * (held_s - self._place_s)
            self.running -= sample_count
            self._call()

    async def _enter(self, sample_count: int) -> None:
        """Takes places at once when there are some and nobody waits, else in turn."""
        if self._has_room(sample_count):
            self.running += sample_count
            return
        waiter = _Waiter(sample_count)
        self._queue.append(waiter)
        try:
            await waiter.turn.wait()
            if not waiter.has_places:
                self._check_open()
        except BaseException:
            # Its turn may have come in the same moment in which it left.
            if waiter.has_places:
                self.running -= sample_count
            with suppress(ValueError):
                self._queue.remove(waiter)
            self._call()
            raise

    def _check_open(self) -> None:
        if self._is_closed:
            raise NotReady("The gateway is stopping and takes no more requests")

    def _has_room(self, sample_count: int) -> bool:
        return not self._queue and self.running + sample_count <= self.places

    def _call(self) -> None:
        """Gives places to those who have waited longest. A large request is not overtaken by small ones."""
        while self._queue and self.running + self._queue[0].num_samples <= self.places:
            waiter = self._queue.popleft()
            self.running += waiter.num_samples
            waiter.has_places = True
            waiter.turn.set()


class RequestLog:
    """What is known so far of one request, which may have several parts and has waited so long for its places."""

    def __init__(self, requests: Sequence[CheckedRequest], waited_s: float) -> None:
        self._requests = requests
        self._waited_s = waited_s
        self._arrived_s = time.monotonic() - waited_s
        self._first_token_s: float | None = None
        self._num_tokens = 0
        self._completions: list[CompletionEvent] = []
        self._figures = SpeculationFigures()

    def observe(self, event: Event) -> None:
        if isinstance(event, CompletionEvent):
            self._completions.append(event)
            return
        if self._first_token_s is None:
            self._first_token_s = time.monotonic()
        self._num_tokens += len(event.tokens)
        if not event.committed.is_first:
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
            prompt_tokens=sum(request.spec.prompt_len for request in self._requests),
            cached_prompt_tokens=sum(each.cached_prompt_tokens for each in self._completions if not each.sample_index),
            completion_tokens=self._num_tokens,
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
    """The gateway as its surfaces see it: `open` is where every request enters."""

    backend: Backend
    admission: Admission
    metrics: Observer
    chat_template: ChatTemplate
    model_name: str
    started_s: float = field(default_factory=time.time)

    @asynccontextmanager
    async def open(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation]:
        """Checks requests that belong together, waits for their places, and holds these until it is left.

        Raises InvalidRequest, PromptTooLong, Overloaded, and what is said of a target that is away.
        """
        # What is out of range is refused later, with the range.
        num_samples = sum(min(max(1, request.sample_count or 1), MAX_SAMPLES) for request in requests)
        async with AsyncExitStack() as places:
            places.enter_context(request_scope())
            try:
                with self.admission.arrival(num_samples):
                    contexts = [await self._prepared(requests, number) for number in range(len(requests))]
                waited_s = await places.enter_async_context(self.admission.place(num_samples))
            except OutriderError as error:
                self.metrics.rejected(error)
                log.info("request refused", status=error.reason)
                raise
            except asyncio.CancelledError as error:
                # The client left the queue.
                self.metrics.ended(error)
                log.info("request refused", status="CLIENT_LEFT")
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

    async def _prepared(self, requests: Sequence[GenerationRequest], number: int) -> RequestContext:
        """One of several requests, whose number is on its errors."""
        try:
            return await prepare(requests[number], self.backend)
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
    """Lets the observer know, in order, in a later turn of the loop: counting takes a while, and tokens go first."""
    asyncio.get_running_loop().call_soon(observe, value)
