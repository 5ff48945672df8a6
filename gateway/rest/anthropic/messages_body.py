"""The body of POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients send it, and its translation."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway.rest.asking.conversation import THINKING
from gateway.rest.asking.fields import (
    MAX_CALLS,
    MAX_MESSAGES,
    NO_EFFECT,
    Count,
    Ignored,
    Unserved,
    Word,
    by_any_type,
    by_type,
    ignored_in,
    json_text,
    text_or_list,
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
from gateway.rest.errors import other_type
from outrider.errors import InvalidRequest
from outrider.parameters import Parameters

# Claude Code counts with a block that begins so, and that is another one in every conversation; it would be the
# beginning of each prompt, and none could share it.
BILLING = "x-anthropic-billing-header"
TEXT_OR_BLOCKS = text_or_list("a string or a list of blocks")


class TextBlock(Parameters):
    """Plain text in a turn, in the system prompt or in what a call gave."""

    type: Literal["text"]
    text: str
    cache_control: Ignored = None
    citations: Ignored = None
    parsed_output: Ignored = None


class ThinkingBlock(Parameters):
    """What the assistant thought in an earlier turn; signatures are not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str | None, Field(description=NO_EFFECT)] = None
    cache_control: Ignored = None


class RedactedThinkingBlock(Parameters):
    """What the assistant thought and only its maker can read."""

    type: Literal["redacted_thinking"]
    data: Ignored = None


class ToolUseBlock(Parameters):
    """A call of an earlier turn."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[Any, Field(description="An object; a text is one in JSON, or not all of it.")] = None
    cache_control: Ignored = None
    caller: Ignored = None
    toolset_name: Ignored = None


TextBlocks = Annotated[
    list[Annotated[Annotated[TextBlock, Tag("<text>")], by_type(["text"])]],
    Field(fail_fast=True),
]


# What a call gave beside its text is left out and named, because the client cannot change what came.
ResultBlocks = Annotated[
    list[
        Annotated[
            Annotated[TextBlock, Tag("<text>")] | Annotated[dict[str, Any], Tag("<other>")],
            by_any_type(["text"]),
        ]
    ],
    Field(fail_fast=True),
]


class ToolResultBlock(Parameters):
    """What a call of an earlier turn gave; only its text is read."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        Annotated[Annotated[str, Tag("<text>")] | Annotated[ResultBlocks, Tag("<list>")], TEXT_OR_BLOCKS] | None
    ) = None
    is_error: Annotated[bool | None, Field(description=NO_EFFECT)] = None
    cache_control: Ignored = None
    toolset_name: Ignored = None


BLOCK_TYPES = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
# What a server called by itself in an earlier answer, and what that gave.
OTHERS_CALL, OTHERS_RESULT = ("server_tool_use", "mcp_tool_use"), "_tool_result"


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[dict[str, Any], Tag("<other>")],
    by_type(BLOCK_TYPES, others=lambda kind: kind in OTHERS_CALL or kind.endswith(OTHERS_RESULT)),
]
Blocks = Annotated[list[Block], Field(fail_fast=True)]
System = Annotated[Annotated[str, Tag("<text>")] | Annotated[TextBlocks, Tag("<list>")], TEXT_OR_BLOCKS]


class Turn(Parameters):
    """What one side of the conversation said, or a system prompt within it."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[str, Tag("<text>")] | Annotated[Blocks, Tag("<list>")], TEXT_OR_BLOCKS]


class CustomTool(Parameters):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Ignored = None
    allowed_callers: Ignored = None
    defer_loading: Ignored = None
    eager_input_streaming: Ignored = None
    input_examples: Ignored = None


def _tool_kind(value: object) -> str | None:
    kind = value.get("type", "custom") if isinstance(value, dict) else 0
    if kind is None or kind == "custom":
        return "<custom>"
    return "<other>" if isinstance(kind, str) else None


MessagesTool = Annotated[
    Annotated[CustomTool, Tag("<custom>")] | Annotated[dict[str, Any], Tag("<other>")],
    Discriminator(_tool_kind, custom_error_type="tool_kind", custom_error_message="Input should be a tool"),
]


class ToolChoice(Parameters):
    """Whether tools are called; `name` belongs to `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Parameters):
    """Whether the model thinks first, where its template has a switch for that."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Ignored = None
    display: Ignored = None


class OutputFormat(Parameters):
    """A schema that the answer has to follow."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Parameters):
    """How hard the model tries, where its template asks for that, and what the answer looks like."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Parameters):
    """A conversation in Anthropic's words. Fields without effect are named in the header x-outrider-ignored."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: System | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    betas: Ignored = None
    cache_control: Ignored = None
    context_management: Ignored = None
    diagnostics: Ignored = None
    inference_geo: Ignored = None
    metadata: Ignored = None
    service_tier: Ignored = None
    speed: Ignored = None
    container: Unserved = None
    mcp_servers: Unserved = None


class MessagesRequest(CountTokensRequest, DialectFields):
    """A conversation in Anthropic's words, and how to go on."""

    max_tokens: Count
    top_k: Annotated[int, Field(ge=0)] | None = None
    stop_sequences: Annotated[list[Word], Field(fail_fast=True)] | None = None


def translated(body: CountTokensRequest, variables: frozenset[str]) -> Translation:
    """The body as one of chat, for a template with these variables. Raises InvalidRequest about what is nowhere in it.

    Blocks of text are joined by line ends, and results of tools become messages of their own.
    """
    if body.messages[-1].role == "assistant":
        place = f"messages.{len(body.messages) - 1}.role"
        raise InvalidRequest(place, "assistant", "user in the last message, because no answer is continued here")
    conversation = ChatMessages()
    system = [TextBlock(type="text", text=body.system)] if isinstance(body.system, str) else body.system or []
    rules = [block.text for block in system if not block.text.startswith(BILLING)]
    for text in rules:
        conversation.rule(text, "system")
    unread = [f"system.{BILLING}"] if len(rules) < len(system) else []
    for number, turn in enumerate(body.messages):
        unread += _take(turn, f"messages.{number}", conversation)
    kept = {"name", "description", "strict"}
    tools, names, skipped = tools_of(
        enumerate(body.tools or ()),
        lambda tool: {**tool.model_dump(include=kept, exclude_none=True), "parameters": tool.input_schema},
        "input_schema",
    )
    output = body.output_config or OutputConfig()
    chat = {**shared_values(body), "messages": conversation.finished}
    unswitched = ["thinking"] if body.thinking is not None and THINKING not in variables else []
    if body.thinking is not None and not unswitched:
        chat["chat_template_kwargs"] = {THINKING: body.thinking.type != "disabled"}
    chat |= {} if output.effort is None else {"reasoning_effort": output.effort}
    if tools:
        chat["tools"] = tools
    chat |= _tool_choice(body.tool_choice, bool(tools))
    if output.format is not None:
        shape = {"name": "output", "schema": output.format.json_schema, "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": shape}
    if isinstance(body, MessagesRequest):
        chat["max_tokens"] = body.max_tokens
        chat |= {} if body.top_k is None else {"top_k": body.top_k}
        chat |= {"stop": body.stop_sequences} if body.stop_sequences else {}
    ignored = dict.fromkeys([*ignored_in(body), *unswitched, *skipped, *unread])
    names |= {**conversation.names, "stop": "stop_sequences", "response_format": "output_config.format"}
    names |= {"response_format.json_schema": "output_config.format", "parallel_tool_calls": "tool_choice"}
    names |= {"reasoning_effort": "output_config.effort", "messages.reasoning_content": "messages.content.thinking"}
    names |= {"messages.tool_calls": "messages.content.tool_use", "messages.tool_calls.function": "messages.content"}
    names |= {"messages.tool_calls.function.arguments": "messages.content.input"}
    names |= {"messages.tool_call_id": "messages.content.tool_use_id", "messages.content": "messages.content.text"}
    return Translation(chat, names, tuple(ignored))


def _take(turn: Turn, origin: str, conversation: ChatMessages) -> list[str]:
    """Adds a turn; gives the names of what of it is not read, or as something else."""
    unread: list[str] = []
    speak = {"user": conversation.ask, "assistant": conversation.say, "system": conversation.rule}[turn.role]
    if isinstance(turn.content, str):
        speak(turn.content, origin)
        return unread
    if turn.role == "user" and not turn.content:
        conversation.ask("", origin)
    for number, block in enumerate(turn.content):
        place = f"{origin}.content.{number}"
        match block:
            case TextBlock():
                speak(block.text, origin)
            case ToolResultBlock() if turn.role == "user":
                content = block.content or ""
                texts = [content] if isinstance(content, str) else [b.text for b in content if isinstance(b, TextBlock)]
                others = [each for each in content if isinstance(each, dict)]
                if others and not texts:
                    raise other_type(f"{place}.content.0", others[0], "'text'")
                unread += [f"{place}.content={each['type']}" for each in others]
                conversation.answer(block.tool_use_id, "\n".join(texts), place)
            case ThinkingBlock() if turn.role == "assistant":
                conversation.think(block.thinking, place)
            case ToolUseBlock() if turn.role == "assistant":
                conversation.call(block.id, block.name, json_text(block.input), place)
            case dict() if turn.role == "assistant":
                unread.append(f"{place}={block['type']}")
                _take_other(block, place, conversation)
            case RedactedThinkingBlock() if turn.role == "assistant":
                pass  # no code here can read it, and the answer's header says so
            case _:
                limit = f"the type of a block that the {turn.role} sends"
                raise InvalidRequest(f"{place}.type", type_of(block), limit)
    return unread


def _take_other(block: Values, place: str, conversation: ChatMessages) -> None:
    """Adds a call that a server made by itself, or what it gave, as if it were one of a client's tool."""
    kind, name = str(block["type"]), block.get("name")
    if kind in OTHERS_CALL:
        said = json_text(block.get("input"))
        conversation.call(_id(block.get("id")), name if isinstance(name, str) and name else kind, said, place)
    else:
        conversation.answer(_id(block.get("tool_use_id")), json_text(block.get("content")), place)


def _id(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _tool_choice(choice: ToolChoice | None, has_tools: bool) -> Values:
    """Chat's fields for it; what does not force anything is nothing where there are no tools."""
    if choice is None:
        return {}
    if (choice.name is None) == (choice.type == "tool"):
        value = "absent" if choice.name is None else choice.name
        raise InvalidRequest("tool_choice.name", value, "given with the type tool, and only with it")
    if not has_tools:
        if choice.type not in {"auto", "none"}:
            raise InvalidRequest("tool_choice.type", choice.type, "'auto' or 'none' without tools")
        return {}
    named = {"type": "function", "function": {"name": choice.name}}
    values: Values = {"tool_choice": {"any": "required", "tool": named}.get(choice.type, choice.type)}
    if choice.disable_parallel_tool_use is not None:
        values["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return values
