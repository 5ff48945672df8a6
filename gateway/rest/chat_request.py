"""The body of POST /v1/chat/completions. Knows no template and no generation."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway.rest.fields import Count, GenerationFields, Strict, Unserved, text_or_list
from outrider.parameters import MAX_LOGPROB_COUNT

MAX_MESSAGES = 4096
# Of one message. Lists end at their first fault: a finding for each of a million entries takes minutes and gigabytes.
MAX_PARTS, MAX_CALLS = 4096, 128
NO_EFFECT = "Accepted without effect."


class TextPart(Strict):
    """A part of a message; only text is served."""

    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    """What an assistant called in an earlier turn."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call of an earlier turn."""

    id: str
    type: Literal["function"]
    function: FunctionCall


Content = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True), Tag("<list>")],
    Discriminator(
        text_or_list,
        custom_error_type="content_kind",
        custom_error_message="Input should be a string or a list of text parts",
    ),
]


class Message(Strict):
    """One turn. Which roles there may be, and what else a turn may carry, is the template's say."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    refusal: Unserved = None
    audio: Unserved = None
    function_call: Unserved = None

    @property
    def text(self) -> str | None:
        """The content; parts are put together as they are."""
        return "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content


class Function(Strict):
    """A function that the model may be told of."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that the model may be told of."""

    type: Literal["function"]
    function: Function


class ResponseFormat(Strict):
    """How the answer is shaped; only plain text is served."""

    type: Literal["text"]


class ChatRequest(GenerationFields):
    """A conversation and how to go on."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROB_COUNT)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    response_format: ResponseFormat | None = None
    parallel_tool_calls: Annotated[bool | None, Field(description=NO_EFFECT)] = None
    metadata: Annotated[dict[str, str] | None, Field(description=NO_EFFECT, max_length=16)] = None
    store: Annotated[Literal[False] | None, Field(description=NO_EFFECT)] = None
    service_tier: Annotated[Literal["auto", "default"] | None, Field(description=NO_EFFECT)] = None
    safety_identifier: Annotated[str | None, Field(description=NO_EFFECT)] = None
    prompt_cache_key: Annotated[str | None, Field(description=NO_EFFECT)] = None
    audio: Unserved = None
    function_call: Unserved = None
    functions: Unserved = None
    modalities: Unserved = None
    moderation: Unserved = None
    prediction: Unserved = None
    prompt_cache_options: Unserved = None
    prompt_cache_retention: Unserved = None
    reasoning_effort: Unserved = None
    verbosity: Unserved = None
    web_search_options: Unserved = None
