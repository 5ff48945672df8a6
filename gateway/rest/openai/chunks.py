"""Answers of OpenAI's older routes: chunks of a stream, or one body."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.generation.events import Event, OutputToken, RoundEvent
from gateway.rest.answering import AnswerWriter, ChoiceBuffer, ResponseHeader
from gateway.rest.asking.chat_body import StreamOptions
from gateway.rest.errors import error_json
from gateway.rest.figures import ResponseFigures
from gateway.rest.openai.models import Envelope, Finish, Tokens, finish_of
from gateway.rest.sse import DONE, data, line
from gateway.text.tokenizer import Tokenizer
from outrider.answer import PromptToken
from outrider.errors import OutriderError, ProtocolViolation
from outrider.parameters import TokenLogprob

# Chunks with padding have lengths that are multiples of this, so that a length says little about the text.
PADDING = 32


def logprob_of(token: OutputToken | PromptToken) -> TokenLogprob:
    """The log-softmax of the target's raw logits, before any transform of the request. Raises ProtocolViolation."""
    if token.logprob is None:
        raise ProtocolViolation(f"no log-probability came for token {token.token_id}")
    return token.logprob


@dataclass
class ResponseFormatter(ABC):
    """Formatter of chunks on one of OpenAI's older routes."""

    header: ResponseHeader
    tokenizer: Tokenizer
    has_logprobs: bool
    has_token_ids: bool
    begun: set[int] = field(default_factory=set, init=False)

    def chunks(self, index: int, event: Event) -> list[Envelope]:
        """The chunks of a stream that an event makes: a choice has an opening, its text, and its finish reason."""
        chunks = [] if index in self.begun else self.opening(index)
        self.begun.add(index)
        if isinstance(event, RoundEvent):
            return [*chunks, *self.delta(index, "".join(token.text for token in event.tokens), event.tokens)]
        return [*chunks, *self.delta(index, event.text_delta), self.chunk(index, "", finish=finish_of(event))]

    def delta(self, index: int, text: str, tokens: Tokens = ()) -> list[Envelope]:
        """A chunk of text, or none when it would be empty."""
        has_facts = bool(tokens) and (self.has_logprobs or self.has_token_ids)
        return [self.chunk(index, text, tokens)] if text or has_facts else []

    def token_ids(self, tokens: Tokens) -> dict[str, Any]:
        """The field of a choice for clients that want it; an echoed prompt is not part of the answer."""
        ids = [token.token_id for token in tokens if isinstance(token, OutputToken)]
        return {"token_ids": ids} if self.has_token_ids else {}

    @abstractmethod
    def opening(self, index: int) -> list[Envelope]:
        """The chunks before the first text of a choice."""

    @abstractmethod
    def chunk(self, index: int, text: str, tokens: Tokens = (), finish: Finish | None = None) -> Envelope:
        """Chunk of one choice, with its text and tokens."""

    @abstractmethod
    def bare_chunk(self) -> Envelope:
        """Chunk without choices, for usage."""

    @abstractmethod
    def body(self, choices: Sequence[ChoiceBuffer]) -> Envelope:
        """Envelope of the whole answer."""


@dataclass(slots=True)
class ChunkWriter(AnswerWriter):
    """Answers of OpenAI's older routes: chunks as a formatter makes them, with usage and figures, and [DONE]."""

    formatter: ResponseFormatter
    figures: ResponseFigures
    options: StreamOptions

    @property
    def takes_long(self) -> bool:
        # Up to 21 objects a token: seconds for a long answer.
        return self.formatter.has_logprobs

    def frames(self, index: int, event: Event) -> list[bytes]:
        figures, options, chunks = self.figures, self.options, self.formatter.chunks(index, event)
        if figures.is_complete and not options.include_usage:
            # Otherwise nothing would say the seed.
            chunks[-1].metrics, chunks[-1].outrider = figures.metrics(), figures.facts()
        for chunk in chunks:
            if options.continuous_usage_stats:
                chunk.usage = figures.usage()
            elif options.include_usage:
                chunk.usage = None
            if options.include_obfuscation:
                chunk.obfuscation = padding(chunk.model_dump_json(exclude_unset=True))
        return [data(chunk.model_dump_json(exclude_unset=True)) for chunk in chunks]

    def end(self) -> list[bytes]:
        if not self.options.include_usage:
            return [DONE]
        last, figures = self.formatter.bare_chunk(), self.figures
        last.metrics, last.outrider, last.usage = figures.metrics(), figures.facts(), figures.usage()
        return [data(last.model_dump_json(exclude_unset=True)), DONE]

    def failure(self, error: OutriderError) -> list[bytes]:
        return [data(error_json(error))]

    def whole(self, choices: Sequence[ChoiceBuffer]) -> str:
        body, figures = self.formatter.body(choices), self.figures
        body.usage, body.metrics, body.outrider = figures.usage(), figures.metrics(), figures.facts()
        return body.model_dump_json(exclude_unset=True)


def padding(bare: str) -> str:
    """Value of `obfuscation` in an event that is otherwise this JSON."""
    # In bytes: that is what can be seen of a chunk from outside.
    return secrets.token_hex(PADDING)[: -len(line(bare + ',"obfuscation":""')) % PADDING]
