"""The way from an accepted request to a response, streamed or whole: the same for all kinds of route.

Until its request is accepted, nothing is promised to a client, and every error has a status. Afterwards an error is the
last event of a stream, and there is no [DONE]. What an answer looks like is the say of the route's AnswerWriter.
"""

import asyncio
import hashlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from gateway.generation.events import CompletionEvent, Event, OutputToken, RoundEvent
from gateway.generation.frontend import Frontend
from gateway.generation.request import GenerationRequest
from gateway.keys.door import Entrance
from gateway.rest.asking.request import in_names_of
from gateway.rest.bodies import ignored_header
from gateway.rest.errors import unexpected
from gateway.rest.figures import ResponseFigures
from gateway.rest.guard import entrance_of
from gateway.rest.settings import RestSettings
from gateway.rest.sse import KEEP_ALIVE, EventStream, while_there
from outrider.answer import Delta, PromptToken
from outrider.errors import OutriderError, ProtocolViolation


@dataclass(slots=True)
class ChoiceBuffer:
    """Choice of an answer that is sent whole."""

    texts: list[str] = field(default_factory=list)
    tokens: list[OutputToken] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    prompt_tokens: tuple[PromptToken, ...] = ()
    end: CompletionEvent | None = None

    @property
    def completion(self) -> CompletionEvent:
        """Event that ended the choice; raises ProtocolViolation while there is none."""
        if self.end is None:
            raise ProtocolViolation("an answer was asked for before it was complete")
        return self.end

    def add(self, event: Event) -> None:
        """Keeps an event of the choice."""
        self.deltas += event.deltas
        if isinstance(event, RoundEvent):
            self.texts += [token.text for token in event.tokens]
            self.tokens += event.tokens
            self.prompt_tokens = self.prompt_tokens or event.prompt_tokens
        else:
            self.texts.append(event.text_delta)
            self.end = event


@dataclass(frozen=True, slots=True)
class ResponseHeader:
    """Fields that are the same in every chunk of an answer."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class AnswerWriter(ABC):
    """Writer of an answer on one route: frames of a stream, or one JSON text. Choices are numbered over all prompts."""

    @property
    def takes_long(self) -> bool:
        """Whether `whole` may take so long that other requests would feel it."""
        return False

    def begin(self) -> list[bytes]:
        """The frames before the first event."""
        return []

    @abstractmethod
    def frames(self, index: int, event: Event) -> list[bytes]:
        """The frames that an event of a choice makes."""

    @abstractmethod
    def end(self) -> list[bytes]:
        """Frames after the last event."""

    @abstractmethod
    def failure(self, error: OutriderError) -> list[bytes]:
        """The frames instead of all that is still to come."""

    @abstractmethod
    def whole(self, choices: Sequence[ChoiceBuffer]) -> str:
        """The whole answer as JSON."""


@dataclass(frozen=True, slots=True)
class OpenResponse:
    """A response whose requests have begun; events come with the numbers of their choices."""

    writer: AnswerWriter
    figures: ResponseFigures
    events: AsyncGenerator[tuple[int, Event], None]


@dataclass(frozen=True, slots=True)
class Responder:
    """Answers a body of a route over HTTP; `requests` is what it asks the gateway for, one entry a prompt."""

    frontend: Frontend
    settings: RestSettings
    is_streamed: bool
    requests: Sequence[GenerationRequest]
    names: Mapping[str, str]
    id_prefix: str
    make_writer: Callable[[ResponseHeader, ResponseFigures], Awaitable[AnswerWriter]]
    ignored: Sequence[str] = ()
    """Fields that were accepted without effect, which a header names."""
    keep_alive: bytes = KEEP_ALIVE

    async def respond(self, request: Request) -> Response:
        """The response; raises whatever is wrong before there is one, and ClientGone."""
        headers, enter = ignored_header(self.ignored), entrance_of(request)
        if not self.is_streamed:
            async with while_there(request.receive):
                async with self._opened(enter) as opened:
                    choices = [ChoiceBuffer() for _ in range(opened.figures.first_choices[-1])]
                    async for index, event in opened.events:
                        opened.figures.add(index, event)
                        choices[index].add(event)
                whole = partial(opened.writer.whole, choices)
                body = await asyncio.to_thread(whole) if opened.writer.takes_long else whole()
                return Response(body, headers=headers, media_type="application/json")
        keep_alive_s, stall_s = self.settings.keep_alive_s, self.settings.client_stall_s
        stream = EventStream(self._frames(enter), keep_alive_s, stall_s, headers, self.keep_alive)
        await stream.begin(request.receive)
        return stream

    async def _frames(self, enter: Entrance | None) -> AsyncGenerator[bytes, None]:
        """The events of a stream. The first frame is empty, and says that the headers may go out."""
        writer: AnswerWriter | None = None
        try:
            async with self._opened(enter) as opened:
                writer = opened.writer
                yield b""
                for frame in writer.begin():
                    yield frame
                async for index, event in opened.events:
                    opened.figures.add(index, event)
                    for frame in writer.frames(index, event):
                        yield frame
                last = writer.end()
        except Exception as error:
            if writer is None:
                raise
            last = writer.failure(error if isinstance(error, OutriderError) else unexpected(error))
        for frame in last:
            yield frame

    @asynccontextmanager
    async def _opened(self, enter: Entrance | None) -> AsyncIterator[OpenResponse]:
        async with AsyncExitStack() as stack:
            try:
                generation = await stack.enter_async_context(self.frontend.open(self.requests, enter))
            except OutriderError as error:
                raise in_names_of(self.names, error) from None
            target = generation.target
            # What the tokens of a seed depend on beside the request: weights and numerics.
            numerics = hashlib.blake2b(target.numerics_id.encode(), digest_size=4).hexdigest()
            fingerprint = f"fp_{target.model_hash[:8]}{numerics}"
            returns_rounds = any(request.return_rounds for request in self.requests)
            figures = ResponseFigures(generation.requests, target.max_draft_count, returns_rounds)
            firsts = figures.first_choices
            events = ((firsts[number] + event.sample_index, event) async for number, event in generation.events)
            answer_id = f"{self.id_prefix}{secrets.token_hex(12)}"
            header = ResponseHeader(answer_id, int(time.time()), self.frontend.model_name, fingerprint)
            writer = await self.make_writer(header, figures)
            yield OpenResponse(writer, figures, await stack.enter_async_context(aclosing(events)))
