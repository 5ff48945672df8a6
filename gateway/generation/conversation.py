"""Calls that the answer to a conversation may make, and how it is read: the same for every surface."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from gateway.generation.request import GenerationRequest
from gateway.text.chat_template import ChatTemplate, RenderedPrompt
from gateway.text.json_counts import JsonCounts
from gateway.tools.call_grammar import CallRules, OfferedTool, fitting
from gateway.tools.schemas import plain, size_of
from outrider.errors import InvalidRequest, Unsupported

MAX_TOOLS = 128
TOOL_NAME = r"^[a-zA-Z_][a-zA-Z0-9_.:/-]{0,127}$"
# Of the parameters of a tool, without annotations.
MAX_SCHEMA_BYTES = 1 << 18
OTHER_TYPES = ("array", "string", "number", "integer", "boolean", "null")
# What arguments stand in that are no JSON object, as in answers that were cut off.
PARTIAL = "partial_json"
ARGUMENTS = "messages.tool_calls.function.arguments"
MAX_TEMPLATE_VARIABLES, MAX_VARIABLE_LEN = 16, 256


def offered(tools: Iterable[tuple[str, OfferedTool]]) -> dict[str, OfferedTool]:
    """Tools by their names, each with the field of its parameters; raises InvalidRequest about names, and about
    parameters that describe no object or are too much to look at.
    """
    found: dict[str, OfferedTool] = {}
    for field, tool in tools:
        if tool.name in found:
            raise InvalidRequest(f"{field}.name", tool.name, "unlike those of the tools before it")
        place, parameters = f"{field}.parameters", plain(dict(tool.parameters))
        kind, properties = parameters.get("type", "object"), parameters.get("properties", {})
        is_object = "object" in (kind if isinstance(kind, list) else [kind])
        if not is_object and (tool.strict or kind in OTHER_TYPES):
            raise InvalidRequest(f"{place}.type", kind, "'object'")
        if not isinstance(properties, dict):
            if tool.strict:
                raise InvalidRequest(f"{place}.properties", properties, "an object")
            del parameters["properties"]
        if "type" in parameters:
            parameters["type"] = "object"
        if (size := size_of(parameters)) > MAX_SCHEMA_BYTES:
            raise InvalidRequest.too_many(place, size, MAX_SCHEMA_BYTES, "bytes")
        found[tool.name] = replace(tool, parameters=parameters, field=place)
    return found


def shown_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a tool as templates take them, many of which read properties and required without a look. An
    empty list of properties is how some languages write an object that has none.
    """
    shown = {key: value for key, value in parameters.items() if value is not None}
    return {**shown, "properties": {}} if shown.get("properties") == [] else shown


def tool_named(field: str, name: str, tools: Mapping[str, OfferedTool]) -> OfferedTool:
    """The tool of that name; raises InvalidRequest where there is none."""
    if name not in tools:
        raise InvalidRequest(field, name, f"one of {', '.join(tools)}")
    return tools[name]


def check_variables(field: str, variables: Mapping[str, Any], template: ChatTemplate) -> None:
    """Raises InvalidRequest about what the template does not take from outside."""
    for name, value in variables.items():
        if name not in template.variables:
            known = f"absent; the template takes {', '.join(sorted(template.variables)) or 'none'}"
            raise InvalidRequest(f"{field}.{name}", value, known)


def prompt_end(*, begins_turn: bool | None, goes_on: bool) -> dict[str, bool]:
    """End of a prompt, as the template takes it: with the beginning of the assistant's turn unless it is said
    otherwise, or with the last message, which the answer goes on with; raises InvalidRequest about both.
    """
    if goes_on and begins_turn:
        raise InvalidRequest("add_generation_prompt", True, "false or absent with continue_final_message")
    begins_turn = not goes_on if begins_turn is None else begins_turn
    return {"add_generation_prompt": begins_turn, "continue_final_message": goes_on}


def shows_tools(template: ChatTemplate, rules: CallRules) -> bool:
    """Whether tools go to the template: a model without a place for them can still be made to call one."""
    return template.renders_tools or not (rules.tools and rules.needs_call)


def asked(
    request: GenerationRequest, prompt: RenderedPrompt, rules: CallRules, template: ChatTemplate
) -> GenerationRequest:
    """A request with a rendered prompt, and what the answer to it may call: what the template would not take back is
    not made.

    Raises Unsupported where the gateway looks for no calls and one must come.
    """
    if rules.needs_call and template.tool_format is None:
        raise Unsupported("tool_choice is not served: the gateway runs with --tool-format off", field="tool_choice")
    # Both go with no grammar, which one call would need.
    is_free = request.beam_search is not None or request.sampling.ignore_eos
    if rules.tools and not is_free and template.takes_one_call:
        rules = replace(rules, max_calls=1)
    reading = template.reading(prompt.text, {tool.name: tool.parameters for tool in rules.tools}, prompt.begun)
    # What must call has no other form.
    constraint = None if rules.needs_call else request.constraint
    if reading is not None:
        reading = fitting(replace(reading, is_shaped=constraint is not None), rules)
    return replace(
        request,
        text=prompt.text,
        add_special_tokens=prompt.add_special_tokens,
        reading=reading,
        rules=rules,
        constraint=constraint,
        ignored=prompt.ignored,
    )


def read_object(field: str, text: str, counts: JsonCounts) -> dict[str, Any] | None:
    """The object that a JSON text is, None where it is none; raises InvalidRequest about more than may be parsed of all
    texts that are counted together.

    Clients also send no text at all where there is nothing in it.
    """
    counts.add(field, text.encode())
    try:
        found = json.loads(text or "{}")
        if "\\u" in text:
            # Half of a surrogate pair is no text.
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else {} if found is None else None


def past_arguments(field: str, text: str, counts: JsonCounts, ignored: list[str]) -> dict[str, Any]:
    """The arguments of a call that was made before. A text that is no object stands in one, for what happened cannot
    be mended, and is among the `ignored` then. Raises InvalidRequest as `read_object` does.
    """
    found = read_object(field, text, counts)
    if found is None:
        ignored.append(ARGUMENTS)
        return {PARTIAL: text}
    return found
