"""Request of a conversation: its prompt by the model's template, and how its answer is to be read.

Every dialect that speaks of messages and tools comes here with a body of chat.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.generation.conversation import (
    asked,
    check_variables,
    offered,
    past_arguments,
    prompt_end,
    shown_parameters,
    shows_tools,
    tool_named,
)
from gateway.generation.frontend import Frontend
from gateway.generation.request import GenerationRequest
from gateway.rest.asking.chat_body import (
    AllowedToolsChoice,
    ChatRequest,
    CustomToolCall,
    FunctionToolCall,
    Message,
    NamedTool,
    Tool,
)
from gateway.rest.asking.fields import NO_EFFECT, ignored_in, json_text
from gateway.rest.asking.request import check_prompt_len, generation_request
from gateway.rest.errors import MissingParameter, other_type
from gateway.rest.settings import RestSettings
from gateway.text.chat_template import ChatTemplate
from gateway.text.json_counts import JsonCounts
from gateway.tools.call_grammar import CallRules, OfferedTool
from outrider.errors import InvalidRequest

# Of a message, to the template; there may be thousands of them, and a dump of the model takes three times as long.
SHOWN = tuple(
    name
    for name, info in Message.model_fields.items()
    if name not in {"tool_calls", "function_call", "refusal"} and info.description != NO_EFFECT
)
THINKING = "enable_thinking"
# Roles of what came before, which the client cannot say otherwise.
ANSWERING = ("assistant", "tool", "function")
ABOUT_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Request that a body makes, and what of it was not looked at, for the header x-outrider-ignored."""

    request: GenerationRequest
    ignored: tuple[str, ...] = ()


async def conversation(body: ChatRequest, frontend: Frontend, settings: RestSettings) -> ChatPrompt:
    """Checks and renders a conversation. Raises UnknownModel, MissingParameter, InvalidRequest and Unsupported."""
    shared, template = generation_request(body, frontend.names), frontend.chat_template
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs", body.top_logprobs, "absent unless logprobs is true")
    newer, older = body.max_completion_tokens, body.max_tokens
    if newer is not None and older is not None and newer != older:
        raise InvalidRequest("max_tokens", older, f"absent, or equal to max_completion_tokens, which is {newer}")
    rules = _call_rules(body)
    variables, ignored = _variables(body, template, settings)
    tools = body.tools or () if shows_tools(template, rules) else ()
    if tools and settings.drops_tools and not template.renders_tools:
        tools, rules = (), CallRules()
        ignored += [name for name in ABOUT_TOOLS if getattr(body, name) is not None]
    prompt = await template.prompt(
        template_messages(body.messages, ignored),
        [_template_tool(tool) for tool in tools] or None,
        **prompt_end(begins_turn=body.add_generation_prompt, goes_on=bool(body.continue_final_message)),
        **variables,
    )
    check_prompt_len("messages", prompt.text, settings.max_prompt_chars)
    found = asked(shared, prompt, rules, template)
    if body.parallel_tool_calls and found.rules.max_calls != rules.max_calls:
        ignored.append("parallel_tool_calls")
    request = replace(
        found,
        max_tokens=older if newer is None else newer,
        logprob_count=(body.top_logprobs or 0) if body.logprobs else None,
        # Who says so wants nothing of it kept, whatever it is kept for.
        unrecorded=body.store is False,
    )
    ignored += ignored_in(body)
    for message in body.messages:
        if message.refusal and message.content is not None:
            ignored.append("messages.refusal")
        if (message.reasoning_content or message.reasoning) and not template.shows_reasoning:
            ignored.append("messages.reasoning_content")
        if message.name and not template.shows("name"):
            ignored.append("messages.name")
    return ChatPrompt(request, tuple(dict.fromkeys((*ignored, *request.ignored))))


def _call_rules(body: ChatRequest) -> CallRules:
    """Rules about which tools may be called, and whether one must; raises InvalidRequest."""
    choice, tools = body.tool_choice, body.tools or []
    if choice not in (None, "none") and not tools:
        shown = choice if isinstance(choice, str) else choice.model_dump()
        raise InvalidRequest("tool_choice", shown, "absent without tools")
    found = offered(
        (f"tools.{number}.function", OfferedTool(each.name, each.parameters or {}, bool(each.strict)))
        for number, each in enumerate(tool.function for tool in tools)
    )
    max_calls = 1 if body.parallel_tool_calls is False else None
    match choice:
        case "none":
            return CallRules()
        case NamedTool():
            named = tool_named("tool_choice.function.name", choice.function.name, found)
            return CallRules((named,), needs_call=True, max_calls=1)
        case AllowedToolsChoice(allowed_tools=allowed):
            field = "tool_choice.allowed_tools.tools.{}.function.name"
            names = enumerate(tool.function.name for tool in allowed.tools)
            some = {name: tool_named(field.format(number), name, found) for number, name in names}
            return CallRules(tuple(some.values()), allowed.mode == "required", max_calls)
    return CallRules(tuple(found.values()), choice == "required", max_calls)


def _variables(body: ChatRequest, template: ChatTemplate, settings: RestSettings) -> tuple[dict[str, Any], list[str]]:
    """Variables of the template beside the conversation, and fields that it has no place for."""
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    ignored = []
    if settings.ignores_unknown:
        ignored = [f"chat_template_kwargs.{name}" for name in variables if name not in template.variables]
        variables = {name: value for name, value in variables.items() if name in template.variables}
    check_variables("chat_template_kwargs", variables, template)
    effort = body.reasoning_effort
    if effort is None:
        return variables, ignored
    if "reasoning_effort" in template.variables:
        return {"reasoning_effort": effort, **variables}, ignored
    if THINKING in template.variables:
        return {THINKING: effort != "none", **variables}, ignored
    return variables, [*ignored, "reasoning_effort"]


def _template_tool(tool: Tool) -> dict[str, Any]:
    """A tool as templates take it."""
    shown = tool.model_dump(exclude_none=True, exclude={"cache_control"})
    if tool.function.parameters is not None:
        shown["function"]["parameters"] = shown_parameters(tool.function.parameters)
    return shown


def template_messages(messages: Sequence[Message], ignored: list[str]) -> list[dict[str, Any]]:
    """A conversation as templates take it, which adds to the `ignored` what is said otherwise; raises MissingParameter
    and InvalidRequest about the message at fault.
    """
    counts = JsonCounts()
    return [_template_message(number, message, counts, ignored) for number, message in enumerate(messages)]


def _template_message(number: int, message: Message, counts: JsonCounts, ignored: list[str]) -> dict[str, Any]:
    """A message as templates take it: its text in one piece, arguments of calls as objects, and no absent field.

    An assistant may have said nothing, and a tool given nothing; raises MissingParameter about others without content.
    """
    said = message.refusal if message.content is None else message.content
    calls: list[FunctionToolCall | CustomToolCall] = [*(message.tool_calls or ())]
    if message.function_call is not None:
        ignored.append("messages.function_call")
        calls.append(FunctionToolCall(function=message.function_call))
    is_empty = calls or message.reasoning_content or message.reasoning
    if said is None and not (message.role == "assistant" and is_empty):
        if message.role not in ANSWERING:
            raise MissingParameter(f"messages.{number}.content")
        said = ""
    plain = {name: value for name in SHOWN if (value := getattr(message, name))}
    plain["role"] = "tool" if message.role == "function" else message.role
    if isinstance(said, str):
        plain["content"] = said
    elif said is not None:
        texts = [part.text for part in said if not isinstance(part, dict)]
        others = [(place, part) for place, part in enumerate(said) if isinstance(part, dict)]
        # A tool or another server's assistant may have said them, where there is something beside them.
        if others and (message.role not in ANSWERING or not (texts or message.tool_calls)):
            raise other_type(f"messages.{number}.content.{others[0][0]}", others[0][1], "'text'")
        ignored += [f"messages.{number}.content={part['type']}" for _, part in others]
        plain["content"] = "".join(texts)
    for call_number, call in enumerate(calls):
        field = f"messages.{number}.tool_calls.{call_number}.function.arguments"
        if isinstance(call, CustomToolCall):
            ignored.append("messages.tool_calls.custom")
            function: dict[str, Any] = {"name": call.custom.name, "arguments": {"input": call.custom.input}}
        else:
            given = call.function.arguments
            arguments = given if isinstance(given, dict) else past_arguments(field, json_text(given), counts, ignored)
            function = {"name": call.function.name, "arguments": arguments}
        made = {"type": "function", "function": function}
        plain.setdefault("tool_calls", []).append({"id": call.id, **made} if call.id else made)
    return plain
