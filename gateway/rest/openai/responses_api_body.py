"""The body of POST /v1/responses, as OpenAI's newer clients send it, and its translation. Nothing is stored."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from gateway.rest.asking.fields import (
    MAX_CALLS,
    Count,
    Ignored,
    Unserved,
    by_any_type,
    by_type,
    ignored_in,
    type_of,
)
from gateway.rest.asking.translation import (
    ChatMessages,
    DialectFields,
    Translation,
    Values,
    shared_values,
    tools_of,
)
from gateway.rest.openai.responses_api_items import Input, take
from outrider.errors import InvalidRequest
from outrider.parameters import Parameters


def _refuse_true(value: bool) -> bool:
    if value:
        raise ValueError("false")
    return value


# A literal would take 0 for it.
OnlyFalse = Annotated[bool, AfterValidator(_refuse_true), Field(json_schema_extra={"const": False})]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class FunctionTool(Parameters):
    """A function that the client runs."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: Ignored = None
    defer_loading: Ignored = None
    output_schema: Ignored = None


ResponsesTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[dict[str, Any], Tag("<other>")],
    by_any_type(["function"]),
]


class NamedFunction(Parameters):
    """A function of the request's tools, by its name."""

    type: Literal["function"]
    name: str


class AllowedFunctions(Parameters):
    """Some functions, of which one has to be called or may be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_CALLS, fail_fast=True)]


def _choice_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "<word>"
    kind = type_of(value)
    return f"<{kind}>" if kind in ("function", "allowed_tools") else None


FunctionChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("<word>")]
    | Annotated[NamedFunction, Tag("<function>")]
    | Annotated[AllowedFunctions, Tag("<allowed_tools>")],
    Discriminator(
        _choice_kind,
        custom_error_type="choice_kind",
        custom_error_message="Input should be none, auto, required, or an object of type function or allowed_tools",
    ),
]


class PlainFormat(Parameters):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(Parameters):
    """A schema that the answer has to follow."""

    type: Literal["json_schema"]
    name: str
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


TextFormat = Annotated[
    Annotated[PlainFormat, Tag("<text>")]
    | Annotated[PlainFormat, Tag("<json_object>")]
    | Annotated[SchemaFormat, Tag("<json_schema>")],
    by_type(["text", "json_object", "json_schema"]),
]


class TextConfig(Parameters):
    """What the answer looks like."""

    format: TextFormat | None = None
    verbosity: Ignored = None


class Reasoning(Parameters):
    """How hard the model thinks, where its template asks for that."""

    effort: Effort | None = None
    summary: Ignored = None
    generate_summary: Ignored = None
    context: Ignored = None
    mode: Ignored = None


class ResponsesStreamOptions(Parameters):
    """What a stream holds beside its text."""

    include_obfuscation: bool | None = None


class ResponsesRequest(DialectFields):
    """A conversation as items, and how to go on. Fields without effect are named in the header x-outrider-ignored."""

    model: str | None = None
    input: Input
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_choice: FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    stream_options: ResponsesStreamOptions | None = None
    include: Annotated[
        list[Literal["reasoning.encrypted_content"]] | None,
        Field(max_length=8, description="Accepted: what the model thinks is told as it is, and never encrypted."),
    ] = None
    store: Annotated[OnlyFalse | None, Field(description="Nothing is stored; absent is false.")] = None
    truncation: Literal["disabled"] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    client_metadata: Ignored = None
    context_management: Ignored = None
    max_tool_calls: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    user: Ignored = None
    background: OnlyFalse | None = None
    conversation: Unserved = None
    moderation: Unserved = None
    previous_response_id: Unserved = None
    prompt: Unserved = None
    top_logprobs: Unserved = None


def translated(body: ResponsesRequest) -> Translation:
    """The body as one of chat. Raises InvalidRequest about what is nowhere in it.

    A call joins the assistant's turn before it. Parts of text are put together as they are.
    """
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options", "given", "absent unless stream is true")
    conversation, unread = ChatMessages(), list[str]()
    conversation.rule(body.instructions or "", "instructions")
    if isinstance(body.input, str):
        conversation.ask(body.input, "input")
    else:
        for number, item in enumerate(body.input):
            unread += take(item, f"input.{number}", conversation)
    tools, names, skipped = tools_of(
        enumerate(body.tools or ()),
        lambda tool: tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True),
        "parameters",
    )
    chat = {**shared_values(body), "messages": conversation.finished}
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if tools:
        chat["tools"] = tools
        chat |= {} if body.parallel_tool_calls is None else {"parallel_tool_calls": body.parallel_tool_calls}
    if body.tool_choice is not None and tools:
        chat["tool_choice"] = _tool_choice(body.tool_choice)
    elif body.tool_choice not in (None, "auto", "none"):
        shown = body.model_dump(include={"tool_choice"}, exclude_none=True)["tool_choice"]
        raise InvalidRequest("tool_choice", shown, "absent without tools")
    if body.max_output_tokens is not None:
        chat["max_tokens"] = body.max_output_tokens
    if body.text is not None and body.text.format is not None:
        shape = body.text.format
        chat["response_format"] = {"type": shape.type}
        if isinstance(shape, SchemaFormat):
            schema = shape.model_dump(include={"name", "description", "strict"}, exclude_none=True)
            chat["response_format"]["json_schema"] = {**schema, "schema": shape.json_schema}
    names |= {"messages": "input", "max_tokens": "max_output_tokens", **conversation.names}
    names |= {"response_format": "text.format", "response_format.json_schema": "text.format"}
    names |= {"reasoning_effort": "reasoning.effort", "messages.reasoning_content": "input.content"}
    names |= {"messages.tool_calls": "input.function_call", "messages.tool_call_id": "input.call_id"}
    names |= {"messages.tool_calls.function": "input", "messages.content": "input.content"}
    ignored = dict.fromkeys([*ignored_in(body), *skipped, *unread])
    return Translation(chat, names, tuple(ignored))


def _tool_choice(choice: str | NamedFunction | AllowedFunctions) -> str | Values:
    """The tool choice in chat's words, which have a level more."""
    match choice:
        case NamedFunction(name=name):
            return {"type": "function", "function": {"name": name}}
        case AllowedFunctions(mode=mode, tools=tools):
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*map(_tool_choice, tools)]}}
    return choice
