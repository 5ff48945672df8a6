"""Answers of /v1/messages: a message, or the events that build one up, as Anthropic's clients read them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field

from gateway.generation.events import Event
from gateway.rest.answering import AnswerWriter, ChoiceBuffer, ResponseHeader
from gateway.rest.errors import messages_error_json
from gateway.rest.figures import Facts, Metrics, ResponseFigures
from gateway.rest.parts import Part, Parts
from gateway.rest.sse import typed
from outrider.answer import CallArguments, CallBegun, ContentDelta, Delta, ReasoningDelta
from outrider.errors import OutriderError
from outrider.parameters import FinishReason

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
SIGNATURE_BYTES = 16


class TextContent(BaseModel):
    """A part of the answer that the user reads."""

    type: Literal["text"]
    text: str


class ThinkingContent(BaseModel):
    """What the model thought; its signature is a digest that is never checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(BaseModel):
    """A call of a tool. Arguments that are no object, as the answer was cut, are the text `partial_json` in `input`."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = Annotated[TextContent | ThinkingContent | ToolUseContent, Field(discriminator="type")]


class MessagesUsage(BaseModel):
    """Tokens in, those from the prefix cache apart, and out. In the first event nothing is known of the cache."""

    input_tokens: int
    cache_creation_input_tokens: int | None
    cache_read_input_tokens: int | None
    output_tokens: int


class AnthropicMessage(BaseModel):
    """An answer of the Messages API, whole or as it is at its first event."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    metrics: Metrics | None = None
    outrider: Facts | None = None


class MessagesTokenCount(BaseModel):
    """How long a prompt is."""

    input_tokens: int


class MessageStart(BaseModel):
    """The message begins, without content."""

    type: Literal["message_start"]
    message: AnthropicMessage


class ContentBlockStart(BaseModel):
    """A block begins, without content."""

    type: Literal["content_block_start"]
    index: int
    content_block: AnswerBlock


class TextDelta(BaseModel):
    """Characters that follow the text until now."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(BaseModel):
    """More of what the model thinks."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(BaseModel):
    """The end of what the model thinks."""

    type: Literal["signature_delta"]
    signature: str


class InputJsonDelta(BaseModel):
    """More of the arguments of a call, which together are a JSON object as text."""

    type: Literal["input_json_delta"]
    partial_json: str


BlockDelta = Annotated[TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta, Field(discriminator="type")]


class ContentBlockDelta(BaseModel):
    """More of a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: BlockDelta


class ContentBlockStop(BaseModel):
    """A block is over."""

    type: Literal["content_block_stop"]
    index: int


class StopFacts(BaseModel):
    """Why the message is over."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(BaseModel):
    """How the message ended, with usage and figures."""

    type: Literal["message_delta"]
    delta: StopFacts
    usage: MessagesUsage
    metrics: Metrics
    outrider: Facts


class MessageStop(BaseModel):
    """The message is over."""

    type: Literal["message_stop"]


class Ping(BaseModel):
    """Nothing has happened for a while."""

    type: Literal["ping"]


MessagesEvent = (
    MessageStart | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop | Ping
)


EVENTS: tuple[type[BaseModel], ...] = get_args(MessagesEvent)


def frame(event: MessagesEvent) -> bytes:
    """Bytes of an event in a stream."""
    return typed(event.type, event.model_dump_json(exclude_unset=True))


PING = frame(Ping(type="ping"))


@dataclass(slots=True)
class MessageWriter(AnswerWriter):
    """Writes a message of one choice; max_tokens is what the client asked for."""

    header: ResponseHeader
    figures: ResponseFigures
    max_tokens: int
    parts: Parts = field(default_factory=Parts)

    def begin(self) -> list[bytes]:
        usage = MessagesUsage(
            input_tokens=self.figures.requests[0].spec.prompt_len,
            cache_creation_input_tokens=None,
            cache_read_input_tokens=None,
            output_tokens=0,
        )
        return [frame(MessageStart(type="message_start", message=self._message([], None, None, usage)))]

    def frames(self, index: int, event: Event) -> list[bytes]:
        return [frame(each) for delta in event.deltas for each in self._events(delta)]

    def end(self) -> list[bytes]:
        stop_reason, stop_sequence = self._stop()
        told = MessageDelta(
            type="message_delta",
            delta=StopFacts(stop_reason=stop_reason, stop_sequence=stop_sequence),
            usage=self._usage(),
            metrics=self.figures.metrics(),
            outrider=self.figures.facts(),
        )
        events = [*_closing(self.parts.parts[-1:]), told, MessageStop(type="message_stop")]
        return [frame(event) for event in events]

    def failure(self, error: OutriderError) -> list[bytes]:
        return [typed("error", messages_error_json(error))]

    def whole(self, choices: Sequence[ChoiceBuffer]) -> str:
        content = [_content(part) for part in Parts.of(choices[0].deltas).parts]
        message = self._message(content, *self._stop(), self._usage())
        message.metrics, message.outrider = self.figures.metrics(), self.figures.facts()
        return message.model_dump_json(exclude_unset=True)

    def _events(self, delta: Delta) -> list[MessagesEvent]:
        """The end of the block before and the beginning of a new one, where the delta begins one, and more of it."""
        before = self.parts.parts[-1:]
        begins = self.parts.add(delta)
        part = self.parts.parts[-1]
        events: list[MessagesEvent] = []
        if begins:
            empty = _content(part.empty, signature="")
            opening = ContentBlockStart(type="content_block_start", index=part.index, content_block=empty)
            events += [*_closing(before), opening]
        match delta:
            case ContentDelta(text):
                more: BlockDelta = TextDelta(type="text_delta", text=text)
            case ReasoningDelta(text):
                more = ThinkingDelta(type="thinking_delta", thinking=text)
            case CallArguments(_, text):
                more = InputJsonDelta(type="input_json_delta", partial_json=text)
            case CallBegun():
                return events
        return [*events, ContentBlockDelta(type="content_block_delta", index=part.index, delta=more)]

    def _message(
        self,
        content: list[AnswerBlock],
        stop_reason: StopReason | None,
        stop_sequence: str | None,
        usage: MessagesUsage,
    ) -> AnthropicMessage:
        return AnthropicMessage(
            id=self.header.id,
            type="message",
            role="assistant",
            model=self.header.model,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=usage,
        )

    def _stop(self) -> tuple[StopReason, str | None]:
        """Reason why the message is over, and the string that stopped it."""
        end = self.figures.ends[0]
        if end.finish_reason is FinishReason.LENGTH:
            request = self.figures.requests[0]
            # Not where the API key allowed no more: clients make the conversation shorter, and would in vain.
            is_cut = request.fills_context and request.spec.max_len - request.spec.prompt_len < self.max_tokens
            return ("model_context_window_exceeded" if is_cut else "max_tokens"), None
        if end.has_calls:
            return "tool_use", None
        return ("end_turn" if end.stop_string is None else "stop_sequence"), end.stop_string

    def _usage(self) -> MessagesUsage:
        usage = self.figures.usage()
        cached_tokens = usage.prompt_tokens_details.cached_tokens
        return MessagesUsage(
            input_tokens=usage.prompt_tokens - cached_tokens,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=cached_tokens,
            output_tokens=usage.completion_tokens,
        )


def _content(part: Part, signature: str | None = None) -> AnswerBlock:
    match part.kind:
        case "text":
            return TextContent(type="text", text=part.text)
        case "reasoning":
            signed = _signature(part.text) if signature is None else signature
            return ThinkingContent(type="thinking", thinking=part.text, signature=signed)
        case "call":
            try:
                value = json.loads(part.text or "{}")
            except (ValueError, RecursionError):
                value = None
            arguments = value if isinstance(value, dict) else {"partial_json": part.text}
            return ToolUseContent(type="tool_use", id=part.call_id, name=part.name, input=arguments)


def _closing(parts: Sequence[Part]) -> list[MessagesEvent]:
    """Events that end the blocks of parts."""
    events: list[MessagesEvent] = []
    for part in parts:
        if part.kind == "reasoning":
            signature = SignatureDelta(type="signature_delta", signature=_signature(part.text))
            events.append(ContentBlockDelta(type="content_block_delta", index=part.index, delta=signature))
        events.append(ContentBlockStop(type="content_block_stop", index=part.index))
    return events


def _signature(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=SIGNATURE_BYTES).hexdigest()
