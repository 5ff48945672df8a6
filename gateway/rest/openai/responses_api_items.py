"""Items of a conversation as OpenAI's newer clients send it to /v1/responses, and their way into one of chat.

What came of earlier answers is evidence, of other servers' too: items of tools that there are none of here become calls
and results, and are named.
"""

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from gateway.rest.asking.fields import MAX_MESSAGES, Ignored, by_any_type, by_type, json_text, text_or_list
from gateway.rest.asking.translation import ChatMessages, Values
from gateway.rest.errors import other_type
from outrider.parameters import Parameters


class InputText(Parameters):
    """Text that the model reads."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: Ignored = None


class OutputText(Parameters):
    """Text of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None
    parsed: Ignored = None


class RefusalText(Parameters):
    """What an assistant of another server said instead of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ReasoningText(Parameters):
    """What the model thought."""

    type: Literal["reasoning_text"]
    text: str


class SummaryText(Parameters):
    """What the model thought, in short."""

    type: Literal["summary_text"]
    text: str


TEXT_PARTS = ("input_text", "output_text", "refusal")
MessagePart = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[OutputText, Tag("<output_text>")]
    | Annotated[RefusalText, Tag("<refusal>")],
    by_type(TEXT_PARTS),
]
TextOrParts = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[MessagePart], Field(fail_fast=True), Tag("<list>")],
    text_or_list("a string or a list of parts"),
]


# What a call gave beside text is left out and named, because the client cannot change what came.
ResultParts = list[
    Annotated[
        Annotated[InputText, Tag("<input_text>")]
        | Annotated[OutputText, Tag("<output_text>")]
        | Annotated[RefusalText, Tag("<refusal>")]
        | Annotated[dict[str, Any], Tag("<other>")],
        by_any_type(TEXT_PARTS),
    ]
]
TextOrResult = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[ResultParts, Field(fail_fast=True), Tag("<list>")],
    text_or_list("a string or a list of parts"),
]


class MessageItem(Parameters):
    """One turn of the conversation."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrParts
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None


class FunctionCallItem(Parameters):
    """A call of an earlier turn; `arguments` is a JSON object, as text or as it is."""

    type: Literal["function_call"]
    call_id: str | None = None
    name: str
    arguments: Any = None
    parsed_arguments: Ignored = None
    id: Ignored = None
    status: Ignored = None
    namespace: Ignored = None
    caller: Ignored = None


class FunctionCallOutputItem(Parameters):
    """What a call of an earlier turn gave; only its text is read."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str | None = None
    output: TextOrResult | None = None
    id: Ignored = None
    status: Ignored = None
    name: Ignored = None
    namespace: Ignored = None
    caller: Ignored = None


class CustomCallItem(Parameters):
    """A call of an earlier turn with any text; the template reads it as one of a function with that `input`."""

    type: Literal["custom_tool_call"]
    call_id: str | None = None
    name: str
    input: str
    id: Ignored = None
    status: Ignored = None
    namespace: Ignored = None
    caller: Ignored = None


class ReasoningItem(Parameters):
    """What the model thought in an earlier turn: its content, else its summary."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], Field(fail_fast=True)] | None = None
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    encrypted_content: Ignored = None
    id: Ignored = None
    status: Ignored = None


ITEM_TYPES = (
    *("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning"),
)
# Others that come back from earlier answers: of tools that a server runs or has a type for, and what they returned.
TOOLS_OF_OTHERS = (
    *("web_search", "file_search", "code_interpreter", "computer", "image_generation", "local_shell", "shell"),
    *("apply_patch", "tool_search", "mcp"),
)
OTHER_ITEMS = frozenset(
    (
        *(f"{name}_call" for name in TOOLS_OF_OTHERS),
        *(f"{name}{end}" for name in TOOLS_OF_OTHERS for end in ("_call_output", "_output")),
        *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "compaction"),
    )
)


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[FunctionCallOutputItem, Tag("<custom_tool_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[dict[str, Any], Tag("<other>")],
    by_type(ITEM_TYPES, "message", others=OTHER_ITEMS.__contains__),
]
Input = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), Tag("<list>")],
    text_or_list("a string or a list of items"),
]


# Of calls of others' tools: what was asked, and what came.
SAID_OF_CALLS = ("action", "actions", "operation", "arguments", "queries", "code", "input")
GIVEN_BY_CALLS = ("output", "outputs", "results")


def take(item: Item, origin: str, conversation: ChatMessages) -> list[str]:
    """Adds an item; gives the names of what of it is not read, or as something else.

    Raises Unsupported about a result without text.
    """
    match item:
        case MessageItem(role="assistant"):
            conversation.say(_joined(item.content), origin)
        case MessageItem(role="system" | "developer"):
            conversation.rule(_joined(item.content), origin)
        case MessageItem():
            conversation.ask(_joined(item.content), origin)
        case FunctionCallItem():
            conversation.call(item.call_id, item.name, json_text(item.arguments), origin)
        case CustomCallItem():
            conversation.call(item.call_id, item.name, json.dumps({"input": item.input}), origin)
            return [f"{origin}=custom_tool_call"]
        case FunctionCallOutputItem():
            given = item.output or ""
            others = [each for each in given if isinstance(each, dict)]
            if others and len(others) == len(given):
                raise other_type(f"{origin}.output.0", others[0], "'input_text', 'output_text' or 'refusal'")
            conversation.answer(item.call_id or None, _joined(given), origin)
            return [f"{origin}.output={each['type']}" for each in others]
        case ReasoningItem():
            thought = "".join(part.text for part in item.content or ()) or "\n".join(
                part.text for part in item.summary or ()
            )
            if thought:
                conversation.think(thought, origin)
        case dict():
            _take_other(item, origin, conversation)
            return [f"{origin}={item['type']}"]
    return []


def _take_other(item: Values, origin: str, conversation: ChatMessages) -> None:
    """Adds a call of a tool of others, and what it gave, as if it were one of a function; all else is left out."""
    kind, call_id = str(item["type"]), item.get("call_id") or item.get("id")
    call_id = call_id if isinstance(call_id, str) else None
    if kind.endswith("_call"):
        said = {name: item[name] for name in SAID_OF_CALLS if item.get(name) is not None}
        arguments = said.get("arguments")
        text = arguments if isinstance(arguments, str) else json_text(said)
        name = item.get("name")
        conversation.call(call_id, name if isinstance(name, str) and name else kind.removesuffix("_call"), text, origin)
    given = next((item[name] for name in GIVEN_BY_CALLS if item.get(name)), "")
    if given or kind.endswith("_output"):
        conversation.answer(call_id, json_text(given), origin)


def _joined(content: str | Iterable[InputText | OutputText | RefusalText | Values]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content if not isinstance(part, dict))
