"""From requests to a response, streamed or whole: the same for both kinds of route. Knows no shape of a choice.

Nothing is promised to a client before the door is open: until then every error has its status. Afterwards an error is
the last event of a stream, and there is no [DONE].
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from gateway.generation.frontend import Frontend, Generation
from gateway.generation.generate import Event
from gateway.generation.request import CheckedRequest, GenerationRequest
from gateway.rest.asks import renamed
from gateway.rest.clients import while_there
from gateway.rest.errors import error_json, unexpected
from gateway.rest.fields import StreamOptions
from gateway.rest.responses import Envelope
from gateway.rest.settings import RestSettings
from gateway.rest.sse import DONE, EventStream, data, line
from gateway.rest.tally import Tally
from gateway.sessions.link import ModelInfo
from outrider.errors import InvalidRequest, OutriderError

# Chunks with padding have lengths that are multiples of this, so that a length tells little of the text.
PADDING = 32


@dataclass(frozen=True, slots=True)
class Head:
    """What is the same in every chunk of an answer."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None


class Shape(Protocol):
    """How an answer looks on one route. Choices are numbered through over all prompts."""

    def chunks(self, index: int, event: Event) -> Sequence[Envelope]:
        """What a stream tells of an event."""

    def bare_chunk(self) -> Envelope:
        """A chunk without choices."""

    def take(self, index: int, event: Event) -> None:
        """Keeps an event for `body`."""

    def body(self) -> Envelope:
        """The whole answer."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a body asks for."""

    asks: Sequence[GenerationRequest]
    names: Mapping[str, str]
    id_prefix: str
    stream: StreamOptions | None
    """None for a whole answer."""
    make_shape: Callable[[Head, Sequence[CheckedRequest]], Awaitable[Shape]]


@dataclass(frozen=True, slots=True)
class Opened:
    """An order behind the door."""

    order: Order
    shape: Shape
    tally: Tally
    events: AsyncGenerator[tuple[int, Event], None]


@dataclass(frozen=True, slots=True)
class Answering:
    """Answers orders."""

    door: Frontend
    settings: RestSettings

    async def answer(self, request: Request, order: Order) -> Response:
        """The response; raises whatever is wrong before there is one, and ClientGone."""
        if order.stream is None:
            body = await while_there(request.receive, self._whole(order))
            return Response(body, media_type="application/json")
        stream = EventStream(self._frames(order), self.settings.keep_alive_s, self.settings.client_stall_s)
        await stream.begin(request.receive)
        return stream

    async def _whole(self, order: Order) -> str:
        async with self._opened(order) as opened:
            async for index, event in opened.events:
                opened.tally.add(index, event)
                opened.shape.take(index, event)
        if any(ask.logprob_count is not None for ask in order.asks):
            # Up to 21 objects a token: seconds for a long answer, which other requests would feel.
            return await asyncio.to_thread(_body_json, opened)
        return _body_json(opened)

    async def _frames(self, order: Order) -> AsyncGenerator[bytes, None]:
        """The first frame is empty, and says that the headers may go out."""
        is_open = False
        try:
            async with self._opened(order) as opened:
                is_open = True
                yield b""
                async with aclosing(_chunks(opened)) as chunks:
                    async for chunk in chunks:
                        yield data(chunk)
        except Exception as error:
            if not is_open:
                raise
            yield data(error_json(error if isinstance(error, OutriderError) else unexpected(error)))
        else:
            yield DONE

    @asynccontextmanager
    async def _opened(self, order: Order) -> AsyncIterator[Opened]:
        self._check_places(order.asks)
        async with AsyncExitStack() as stack:
            try:
                generation = await stack.enter_async_context(self.door.open(order.asks))
            except OutriderError as error:
                raise renamed(error, order.names) from None
            target = self.door.backend.target.info
            shape = await order.make_shape(self._head(order, target), generation.requests)
            returns_rounds = any(ask.return_rounds for ask in order.asks)
            tally = Tally(generation.requests, target.max_draft_count if target else 0, returns_rounds)
            events = await stack.enter_async_context(aclosing(_numbered(generation)))
            yield Opened(order, shape, tally, events)

    def _check_places(self, asks: Sequence[GenerationRequest]) -> None:
        num_choices, places = sum(ask.sample_count or 1 for ask in asks), self.door.admission.places
        if len(asks) > 1 and num_choices > places:
            raise InvalidRequest.too_many("prompt", num_choices, places, "choices (prompts times n)")

    def _head(self, order: Order, target: ModelInfo | None) -> Head:
        answer_id = f"{order.id_prefix}-{secrets.token_hex(12)}"
        return Head(answer_id, int(time.time()), self.door.model_name, fingerprint(target) if target else None)


def fingerprint(target: ModelInfo) -> str:
    """What the tokens of a seed depend on beside the request: weights and numerics."""
    numerics = hashlib.blake2b(target.numerics_id.encode(), digest_size=4).hexdigest()
    return f"fp_{target.model_hash[:8]}{numerics}"


async def _numbered(generation: Generation) -> AsyncGenerator[tuple[int, Event], None]:
    """Events with the numbers of their choices."""
    firsts = [0]
    for plan in generation.requests:
        firsts.append(firsts[-1] + plan.sample_count)
    async for number, event in generation.events:
        yield firsts[number] + event.sample_index, event


def _body_json(opened: Opened) -> str:
    body = opened.shape.body()
    body.usage, body.metrics, body.outrider = opened.tally.usage(), opened.tally.metrics(), opened.tally.facts()
    return body.model_dump_json(exclude_unset=True)


async def _chunks(opened: Opened) -> AsyncGenerator[str, None]:
    options, tally = opened.order.stream or StreamOptions(), opened.tally
    async for index, event in opened.events:
        tally.add(index, event)
        chunks = opened.shape.chunks(index, event)
        if tally.is_complete and not options.include_usage:
            # Otherwise nothing would tell the seed.
            chunks[-1].metrics, chunks[-1].outrider = tally.metrics(), tally.facts()
        for chunk in chunks:
            yield _chunk_json(chunk, options)
    if options.include_usage:
        last = opened.shape.bare_chunk()
        last.metrics, last.outrider = tally.metrics(), tally.facts()
        last.usage = tally.usage()
        yield last.model_dump_json(exclude_unset=True)


def _chunk_json(chunk: Envelope, options: StreamOptions) -> str:
    if options.include_usage:
        chunk.usage = None
    if options.include_obfuscation:
        # In bytes: that is what can be seen of a chunk from outside.
        bare_len = len(line(chunk.model_dump_json(exclude_unset=True))) + len(',"obfuscation":""')
        chunk.obfuscation = secrets.token_hex(PADDING)[: -bare_len % PADDING]
    return chunk.model_dump_json(exclude_unset=True)
