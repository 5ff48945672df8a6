"""Requests, conversations and events of a generation as messages of generation_service.proto."""

import json
import re
from collections.abc import MutableSequence, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from gateway.generation.conversation import (
    MAX_TEMPLATE_VARIABLES,
    MAX_TOOLS,
    MAX_VARIABLE_LEN,
    TOOL_NAME,
    asked,
    check_variables,
    offered,
    past_arguments,
    prompt_end,
    read_object,
    shown_parameters,
    shows_tools,
    tool_named,
)
from gateway.generation.events import CompletionEvent, RoundEvent, round_facts
from gateway.generation.request import MAX_DRAFTERS, GenerationRequest
from gateway.rounds.round import FallbackReason, TokenOrigin
from gateway.text.chat_template import ChatTemplate
from gateway.text.json_counts import JsonCounts
from gateway.tools.call_grammar import CallRules, OfferedTool
from outrider.answer import CallArguments, CallBegun, ContentDelta, Delta, ReasoningDelta
from outrider.beams import BeamSearch, EarlyStopping
from outrider.constraint import MAX_CHOICES, Constraint, ConstraintKind
from outrider.errors import InvalidRequest, check_count
from outrider.parameters import MAX_BANNED_WORDS, MAX_STOP_TOKEN_IDS, MAX_STOPS
from outrider.rpc.messages.completion import completion_message
from outrider.rpc.messages.round import logprob_message
from outrider.rpc.messages.rules import acceptance_from
from outrider.rpc.messages.session import sampling_from
from outrider.rpc.messages.tree import shape_from
from outrider.v1 import generation_service_pb2 as pb

ORIGINS = {origin: pb.TokenOrigin.Value(f"TOKEN_ORIGIN_{origin.name}") for origin in TokenOrigin}
FALLBACKS = {reason.value: pb.FallbackReason.Value(f"FALLBACK_REASON_{reason.name}") for reason in FallbackReason}
EARLY_STOPPING: dict[int, EarlyStopping] = {
    pb.EARLY_STOPPING_UNSPECIFIED: "heuristic",
    pb.EARLY_STOPPING_HEURISTIC: "heuristic",
    pb.EARLY_STOPPING_FIRST: "first",
    pb.EARLY_STOPPING_NEVER: "never",
}
CONSTRAINTS = {
    "json_schema": ConstraintKind.JSON_SCHEMA,
    "regex": ConstraintKind.REGEX,
    "choices": ConstraintKind.CHOICE,
    "lark": ConstraintKind.LARK,
    "gbnf": ConstraintKind.GBNF,
    "structural_tag": ConstraintKind.STRUCTURAL_TAG,
}
MAX_MESSAGES = 1024
Item = TypeVar("Item")
# As the protocol lists them; "tool" answers calls that only some templates know.
ROLES = ("system", "developer", "user", "assistant", "tool")


def request_from(message: pb.GenerateRequest) -> GenerationRequest:
    """Request that the client wrote; raises InvalidRequest for sampling parameters, the rule and its settings."""
    speculation = message.speculation
    prompt = message.WhichOneof("prompt")
    rule, settings = speculation.rule, speculation.acceptance
    scores = message.echo and message.HasField("max_tokens") and message.max_tokens == 0
    acceptance = acceptance_from(rule, settings, "speculation.rule", "speculation.acceptance.")
    prediction: str | Sequence[int] | None = None
    if message.HasField("prediction_text"):
        prediction = message.prediction_text
    elif message.HasField("prediction_token_ids"):
        prediction = message.prediction_token_ids.token_ids
    return GenerationRequest(
        text=message.text if prompt == "text" else None,
        token_ids=message.token_ids.token_ids if prompt == "token_ids" else None,
        max_tokens=(message.max_tokens or int(scores)) if message.HasField("max_tokens") else None,
        scores=scores,
        sampling=sampling_from(message.sampling),
        seed=message.seed if message.HasField("seed") else None,
        stops=_few("stop", message.stop, MAX_STOPS, "strings"),
        stop_token_ids=_few("stop_token_ids", message.stop_token_ids, MAX_STOP_TOKEN_IDS, "ids"),
        speculation_enabled=speculation.enabled if speculation.HasField("enabled") else True,
        draft_count=speculation.draft_count if speculation.HasField("draft_count") else None,
        acceptance=acceptance,
        drafters=_drafters(speculation),
        shape=shape_from(speculation.shape, "speculation.shape") if speculation.HasField("shape") else None,
        prediction=prediction,
        logprob_count=message.logprob_count if message.HasField("logprob_count") else None,
        sample_count=message.sample_count if message.HasField("sample_count") else None,
        banned_words=_few("banned_words", message.banned_words, MAX_BANNED_WORDS, "strings"),
        echo=message.echo,
        return_rounds=speculation.return_rounds,
        cache_salt=message.cache_salt,
        unrecorded=message.unrecorded,
        beam_search=_beams_from(message.beam_search) if message.HasField("beam_search") else None,
        constraint=_constraint(message.constraint) if message.HasField("constraint") else None,
    )


def _constraint(message: pb.Constraint) -> Constraint:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("constraint", "without a kind", f"with one of {', '.join(CONSTRAINTS)}")
    value = getattr(message, kind)
    # A list that is too long is refused before it is read.
    text = json.dumps(_few("constraint.choices", value.texts, MAX_CHOICES, "strings")) if kind == "choices" else value
    wanted = CONSTRAINTS[kind]
    if wanted is not ConstraintKind.JSON_SCHEMA:
        for name, given in (("whitespace", message.whitespace), ("is_lenient", message.is_lenient)):
            if given:
                raise InvalidRequest(f"constraint.{name}", given, "absent without a json_schema")
    return Constraint(wanted, text, f"constraint.{kind}", message.whitespace, is_lenient=message.is_lenient)


def _drafters(speculation: pb.SpeculationSettings) -> tuple[str, ...]:
    several = _few("speculation.drafters", speculation.drafters, MAX_DRAFTERS, "names")
    if speculation.drafter and several:
        raise InvalidRequest("speculation.drafters", list(several), "empty beside speculation.drafter")
    return several or ((speculation.drafter,) if speculation.drafter else ())


def _few(field: str, values: Sequence[Item], maximum: int, unit: str) -> tuple[Item, ...]:
    """A list that is short, of which a long one is refused before it is read; raises InvalidRequest."""
    check_count(field, len(values), maximum, unit)
    return tuple(values)


def _beams_from(message: pb.BeamSearch) -> BeamSearch:
    if message.early_stopping not in EARLY_STOPPING:
        limit = f"one of {', '.join(dict.fromkeys(EARLY_STOPPING.values()))}"
        raise InvalidRequest("beam_search.early_stopping", message.early_stopping, limit)
    length_penalty = message.length_penalty if message.HasField("length_penalty") else 1.0
    return BeamSearch(message.width, length_penalty, EARLY_STOPPING[message.early_stopping])


async def chat_request_from(message: pb.ChatRequest, template: ChatTemplate) -> GenerationRequest:
    """Request that the client wrote, with the conversation as its prompt.

    Raises InvalidRequest about a prompt beside the conversation, about the messages and tools, and as `request_from`
    does.
    """
    prompt = message.generation.WhichOneof("prompt")
    if prompt is not None:
        raise InvalidRequest(f"generation.{prompt}", "present", "absent, because the messages are the prompt")
    # How long a message may be is the context's to say, and how much of them fits into a request is gRPC's.
    if not message.messages:
        raise InvalidRequest("messages", [], "at least one message")
    check_count("messages", len(message.messages), MAX_MESSAGES, "messages")
    for number, each in enumerate(message.messages):
        if each.role not in ROLES:
            raise InvalidRequest(f"messages.{number}.role", each.role, f"one of {', '.join(ROLES)}")
    counts = JsonCounts()
    check_count("tools", len(message.tools), MAX_TOOLS, "tools")
    schemas = []
    for number, tool in enumerate(message.tools):
        schema = read_object(f"tools.{number}.parameters", tool.parameters, counts)
        if schema is None:
            raise InvalidRequest(f"tools.{number}.parameters", tool.parameters, "a JSON object as text")
        schemas.append(schema)
    request, rules = request_from(message.generation), _call_rules(message, schemas)
    variables = _variables(message, template)
    begins_turn = message.add_generation_prompt if message.HasField("add_generation_prompt") else None
    end = prompt_end(begins_turn=begins_turn, goes_on=message.continue_final_message)
    shown = message.tools if shows_tools(template, rules) else ()
    tools = [_template_tool(tool, schema) for tool, schema in zip(shown, schemas, strict=False)]
    ignored: list[str] = []
    turns = [_template_message(number, each, counts, ignored) for number, each in enumerate(message.messages)]
    rendered = await template.prompt(turns, tools or None, **end, **variables)
    found = asked(request, rendered, rules, template)
    if message.parallel_tool_calls and found.rules.max_calls != rules.max_calls:
        ignored.append("parallel_tool_calls")
    return replace(found, ignored=tuple(dict.fromkeys((*ignored, *found.ignored))))


def _call_rules(message: pb.ChatRequest, schemas: Sequence[dict[str, Any]]) -> CallRules:
    """Rules about the tools, whose parameters have these schemas: which may be called, and whether one must; raises
    InvalidRequest.
    """
    if message.HasField("tool_choice") and not message.tools:
        raise InvalidRequest("tool_choice", "present", "absent without tools")
    tools = offered(
        (f"tools.{number}", OfferedTool(tool.name, schema, tool.strict))
        for number, (tool, schema) in enumerate(zip(message.tools, schemas, strict=True))
    )
    for number, tool in enumerate(message.tools):
        if not re.fullmatch(TOOL_NAME, tool.name):
            raise InvalidRequest(f"tools.{number}.name", tool.name, f"text that matches {TOOL_NAME}")
    choice = message.tool_choice
    if choice.mode not in pb.ToolMode.values():
        limit = f"one of {', '.join(pb.ToolMode.keys())}"
        raise InvalidRequest("tool_choice.mode", choice.mode, limit)
    if choice.mode == pb.TOOL_MODE_NONE:
        return CallRules()
    some = {name: tool_named(f"tool_choice.names.{number}", name, tools) for number, name in enumerate(choice.names)}
    is_single = message.HasField("parallel_tool_calls") and not message.parallel_tool_calls
    is_needed = choice.mode == pb.TOOL_MODE_REQUIRED
    return CallRules(tuple((some or tools).values()), is_needed, 1 if is_single else None)


def _template_tool(tool: pb.Tool, schema: dict[str, Any]) -> dict[str, Any]:
    """A tool as templates take it, which is how OpenAI writes one."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = shown_parameters(schema)
    return {"type": "function", "function": function}


def _template_message(number: int, message: pb.ChatMessage, counts: JsonCounts, ignored: list[str]) -> dict[str, Any]:
    """A message as templates take it, with no absent field; adds to the `ignored` what is said otherwise."""
    calls = []
    for place, call in enumerate(message.tool_calls):
        field = f"messages.{number}.tool_calls.{place}.arguments"
        arguments = past_arguments(field, call.arguments, counts, ignored)
        made = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
        calls.append({"id": call.id, **made} if call.id else made)
    found: dict[str, Any] = {
        "name": message.name,
        "reasoning_content": message.reasoning,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
    }
    return {"role": message.role, "content": message.content, **{key: each for key, each in found.items() if each}}


def _variables(message: pb.ChatRequest, template: ChatTemplate) -> dict[str, Any]:
    """Variables of the template beside the conversation; raises InvalidRequest."""
    fields = message.template_variables.fields
    check_count("template_variables", len(fields), MAX_TEMPLATE_VARIABLES, "entries")
    variables: dict[str, Any] = {}
    for name, value in fields.items():
        kind = value.WhichOneof("kind")
        if kind not in ("bool_value", "number_value", "string_value") or len(value.string_value) > MAX_VARIABLE_LEN:
            limit = f"a boolean, a number, or text of at most {MAX_VARIABLE_LEN} characters"
            raise InvalidRequest(f"template_variables.{name}", kind, limit)
        number = value.number_value
        # The message has only floats, and templates count with whole numbers.
        is_whole = kind == "number_value" and number.is_integer()
        variables[name] = int(number) if is_whole else getattr(value, kind)
    check_variables("template_variables", variables, template)
    return variables


def event_message(event: RoundEvent | CompletionEvent) -> pb.GenerateResponse:
    """Message for an event of a request."""
    if isinstance(event, CompletionEvent):
        completion = completion_message(event)
        completion.text_delta = event.text_delta
        _write_deltas(completion.deltas, event.deltas)
        return pb.GenerateResponse(completion=completion)
    response = pb.GenerateResponse()
    # Filled in place, field by field, because a message that is put into another one is copied.
    message = response.round
    for token in event.tokens:
        each = message.tokens.add(token_id=token.token_id, origin=ORIGINS[token.origin], text=token.text)
        if token.logprob is not None:
            each.logprob.CopyFrom(logprob_message(token.logprob))
        if token.guess is not None:
            each.row, each.drafter = token.guess.row, token.guess.drafter
            if token.guess.draft_logprob is not None:
                each.draft_logprob = token.guess.draft_logprob
            if token.guess.value is not None:
                each.value = token.guess.value
    message.text_delta = "".join([token.text for token in event.tokens])
    message.sample_index = event.sample_index
    _write_deltas(message.deltas, event.deltas)
    facts: dict[str, Any] = round_facts(event.committed) if event.committed is not None else {}
    facts["fallback_reason"] = FALLBACKS.get(facts.get("fallback_reason", ""))
    facts["new_numerics_id"] = event.new_numerics_id
    written = message.facts
    for name, value in facts.items():
        if value:
            setattr(written, name, value)
    for prompt_token in event.prompt_tokens:
        message.prompt_tokens.add(
            token_id=prompt_token.token_id,
            text=prompt_token.text,
            logprob=None if prompt_token.logprob is None else logprob_message(prompt_token.logprob),
        )
    for rejected in event.rejected:
        message.rejected.add(token_id=rejected.token_id, text=rejected.text, **asdict(rejected.guess))
    return response


def _write_deltas(messages: MutableSequence[pb.Delta], deltas: Sequence[Delta]) -> None:
    """Fills in what is new, unless the text says it all."""
    if all(isinstance(delta, ContentDelta) for delta in deltas):
        return
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                messages.append(pb.Delta(content=text))
            case ReasoningDelta(text):
                messages.append(pb.Delta(reasoning=text))
            case CallBegun(index, call_id, name):
                messages.append(pb.Delta(call_begun=pb.CallBegun(index=index, id=call_id, name=name)))
            case CallArguments(index, text):
                messages.append(pb.Delta(call_arguments=pb.CallArguments(index=index, text=text)))
