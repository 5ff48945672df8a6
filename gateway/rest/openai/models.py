"""Answers of OpenAI's older routes, as models that are also their documentation. What is not set is not sent."""

from collections.abc import Sequence
from typing import Literal, Self, TypeAlias

from pydantic import BaseModel

from gateway.generation.events import CompletionEvent, OutputToken
from gateway.rest.figures import Facts, Metrics, Usage
from outrider.answer import CallBegun, PromptToken
from outrider.parameters import FinishReason

Finish = Literal["stop", "length", "tool_calls"]
Tokens: TypeAlias = Sequence[OutputToken | PromptToken]


class TopLogprob(BaseModel):
    """A token that might have stood there, and its log-probability under the target's raw logits."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """The tokens of a piece of the answer."""

    content: list[ChatTokenLogprob]
    refusal: None


class TextLogprobs(BaseModel):
    """The tokens of a piece of text, one entry each in every list. A prompt's first token has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Envelope(BaseModel):
    """What bodies and chunks have in common."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None
    choices: Sequence[BaseModel]
    usage: Usage | None = None
    metrics: Metrics | None = None
    outrider: Facts | None = None
    obfuscation: str | None = None


class CalledFunction(BaseModel):
    """The function of a call; the arguments are a JSON object as text."""

    name: str
    arguments: str


class MessageCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction

    @classmethod
    def begun(cls, call: CallBegun) -> Self:
        """A call whose arguments are still to come."""
        return cls(id=call.call_id, type="function", function=CalledFunction(name=call.name, arguments=""))


class AssistantMessage(BaseModel):
    """What the assistant says; nothing beside calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[MessageCall] | None = None


class ChatChoice(BaseModel):
    """One of the answers to the same conversation."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    token_ids: list[int] | None = None


class ChatCompletion(Envelope):
    """The answer to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class FunctionDelta(BaseModel):
    """More of the arguments of a call."""

    arguments: str


class CallDelta(BaseModel):
    """A call that begins, or more of its arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction | FunctionDelta


class ChatDelta(BaseModel):
    """What is new, of one kind."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(BaseModel):
    """What is new in one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    token_ids: list[int] | None = None


class ChatChunk(Envelope):
    """An event of a stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class TextChoice(BaseModel):
    """One text, or in a stream what is new in it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None
    token_ids: list[int] | None = None


class TextCompletion(Envelope):
    """How a prompt goes on; also an event of a stream."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


def finish_of(event: CompletionEvent) -> Finish:
    """OpenAI's word for why a choice ended: its limit, a call, or else a token or a string that stops it."""
    if event.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if event.has_calls else "stop"
