"""Conversations over gRPC: what is asked of the generation, and which field an error names."""

import json
from typing import Any

import pytest

from gateway.grpc.messages import MAX_MESSAGES, chat_request_from, request_from
from gateway.text.chat_template import ChatTemplate, TemplateFiles
from gateway.tools.call_grammar import OfferedTool, answer_constraint
from outrider.errors import InvalidRequest, Unsupported
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2

PLAIN = ChatTemplate()
STRICT = ChatTemplate(TemplateFiles({"default": "{{ raise_exception('Not you, ' ~ messages[-1].role) }}"}))
USER = pb.ChatMessage(role="user", content="Who?")


async def test_the_conversation_is_the_prompt_and_all_else_is_as_in_generate() -> None:
    """Rendered, with special tokens as the template wants them."""
    generation = pb.GenerateRequest(max_tokens=7, seed=3, stop=["."], speculation=pb.SpeculationSettings(draft_count=2))
    message = pb.ChatRequest(messages=[pb.ChatMessage(role="system", content="Be brief."), USER], generation=generation)
    request = await chat_request_from(message, PLAIN)
    assert (request.text, request.add_special_tokens) == ("System: Be brief.\n\nUser: Who?\n\nAssistant:", True)
    template = ChatTemplate(TemplateFiles({"default": "{{ messages[0].content }} {{ messages[1].content }}"}))
    templated = await chat_request_from(message, template)
    assert (templated.text, templated.add_special_tokens) == ("Be brief. Who?", False)
    generation.text = request.text or ""
    assert request == request_from(generation)


ENDED = ChatTemplate(
    TemplateFiles({"default": "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ '!' if add_generation_prompt }}"})
)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "[Who?][A f]!"),
        ({"add_generation_prompt": False}, "[Who?][A f]"),
        ({"continue_final_message": True}, "[Who?][A f"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "[Who?][A f"),
    ],
)
async def test_the_end_of_a_prompt_is_the_client_s_to_choose(fields: dict[str, bool], expected: str) -> None:
    """The assistant's turn begins there, or nothing does, or the last message goes on."""
    begun = pb.ChatMessage(role="assistant", content="A f")
    request = await chat_request_from(pb.ChatRequest(messages=[USER, begun], **fields), ENDED)
    assert request.text == expected


TOOLS = ChatTemplate(TemplateFiles({"default": "{{ tools | tojson }}{{ messages | tojson }}{{ loud }}"}))
TOOL = pb.Tool(name="count", description="Counts.", parameters='{"type": "object"}')


async def test_a_turn_with_calls_results_and_reasoning_is_what_templates_know() -> None:
    """In OpenAI's form, with arguments as objects; and so are tools."""
    call = pb.ToolCall(id="a", name="count", arguments='{"n": 3}')
    turns = [
        pb.ChatMessage(role="assistant", reasoning="Hm.", tool_calls=[call]),
        pb.ChatMessage(role="tool", content="3", tool_call_id="a", name="count"),
    ]
    message = pb.ChatRequest(messages=[USER, *turns], tools=[TOOL])
    message.template_variables["loud"] = 2
    request = await chat_request_from(message, TOOLS)
    assert request.text is not None
    tools, place = json.JSONDecoder().raw_decode(request.text)
    messages, end = json.JSONDecoder().raw_decode(request.text, place)
    assert request.text[end:] == "2"
    function = {"name": "count", "description": "Counts.", "parameters": {"type": "object"}}
    assert tools == [{"type": "function", "function": function}]
    function = {"name": "count", "arguments": {"n": 3}}
    said = {"role": "assistant", "content": "", "thinking": "Hm.", "reasoning_content": "Hm."}
    assert messages[1] == said | {"tool_calls": [{"id": "a", "type": "function", "function": function}]}
    assert messages[2] == {"role": "tool", "content": "3", "tool_call_id": "a", "name": "count"}
    assert request.reading is not None
    assert request.reading.tools == {"count": {"type": "object"}}
    assert request.rules.tools == (OfferedTool("count", {"type": "object"}, field="tools.0.parameters"),)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"tools": [pb.Tool(name="a b")]}, "tools.0.name"),
        ({"tools": [pb.Tool(name="a", parameters="[]")]}, "tools.0.parameters"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tool_choice": pb.ToolChoice()}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": pb.ToolChoice(names=["dive"])}, "tool_choice.names.0"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"template_variables": {"quiet": True}}, "template_variables.quiet"),
        ({"template_variables": {"loud": None}}, "template_variables.loud"),
    ],
)
async def test_errors_name_the_field_of_a_tool(fields: dict[str, Any], field: str) -> None:
    """Or of what the template does not take."""
    with pytest.raises(InvalidRequest) as caught:
        await chat_request_from(pb.ChatRequest(messages=[USER], **fields), TOOLS)
    assert caught.value.metadata["field"] == field


async def test_a_call_that_must_come_has_a_grammar() -> None:
    """So has one that must be strict, and the only one that there may be."""
    strict = pb.Tool(name="count", strict=True)
    required = pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED)
    for message in (
        pb.ChatRequest(messages=[USER], tools=[TOOL], tool_choice=required),
        pb.ChatRequest(messages=[USER], tools=[strict]),
        pb.ChatRequest(messages=[USER], tools=[TOOL], parallel_tool_calls=False),
    ):
        request = await chat_request_from(message, TOOLS)
        constraint = answer_constraint(request.reading, request.rules, {})
        assert constraint is not None
        assert '"name\\": \\"count' in constraint.text


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.ChatRequest(), "messages"),
        (pb.ChatRequest(messages=[USER] * (MAX_MESSAGES + 1)), "messages"),
        (pb.ChatRequest(messages=[USER, USER, pb.ChatMessage(role="User", content="x")]), "messages.2.role"),
        (pb.ChatRequest(messages=[pb.ChatMessage(content="x")]), "messages.0.role"),
        (pb.ChatRequest(messages=[USER], generation=pb.GenerateRequest(text="x")), "generation.text"),
        (
            pb.ChatRequest(messages=[USER], generation=pb.GenerateRequest(token_ids=types_pb2.TokenIds())),
            "generation.token_ids",
        ),
        (
            pb.ChatRequest(
                messages=[USER],
                generation=pb.GenerateRequest(sampling=types_pb2.SamplingParameters(temperature=-1)),
            ),
            "sampling.temperature",
        ),
    ],
)
async def test_errors_name_the_field(message: pb.ChatRequest, field: str) -> None:
    """Before anything is rendered."""
    with pytest.raises(InvalidRequest) as caught:
        await chat_request_from(message, STRICT)
    assert caught.value.metadata["field"] == field


async def test_a_template_s_own_objection_comes_through() -> None:
    """Word for word."""
    with pytest.raises(InvalidRequest, match=r"which says: Not you, user$"):
        await chat_request_from(pb.ChatRequest(messages=[USER]), STRICT)
    assert (await chat_request_from(pb.ChatRequest(messages=[USER] * MAX_MESSAGES), PLAIN)).text


async def test_a_model_without_a_place_for_tools_can_only_be_made_to_call_one() -> None:
    """In plain JSON, which is read back; where it may choose, the tools are refused."""
    message = pb.ChatRequest(messages=[USER], tools=[TOOL], tool_choice=pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED))
    request = await chat_request_from(message, PLAIN)
    assert request.text == "User: Who?\n\nAssistant:"
    assert request.reading is not None
    assert request.reading.format.name == "json"
    assert request.rules.needs_call
    with pytest.raises(Unsupported, match="tools is not served"):
        await chat_request_from(pb.ChatRequest(messages=[USER], tools=[TOOL]), PLAIN)


@pytest.mark.parametrize(
    ("field", "entry", "maximum"),
    [("stop", "a", 64), ("stop_token_ids", 5, 64), ("banned_words", "a", 64), ("speculation.drafters", "a", 8)],
)
def test_a_list_that_is_too_long_is_not_read(field: str, entry: Any, maximum: int) -> None:
    """It is refused by its length, for reading a million entries would be felt by other requests."""
    message = pb.GenerateRequest(text="a")
    getattr(message.speculation if "." in field else message, field.rpartition(".")[2]).extend([entry] * (maximum + 1))
    with pytest.raises(InvalidRequest, match=f"{field} has {maximum + 1} .*, but must have at most {maximum}"):
        request_from(message)


def test_token_ids_stay_unread() -> None:
    """Until their number has been looked at."""
    message = pb.GenerateRequest(token_ids=types_pb2.TokenIds(token_ids=[5] * 10))
    message.prediction_token_ids.token_ids.extend([6] * 10)
    request = request_from(message)
    assert request.token_ids is message.token_ids.token_ids
    assert request.prediction is message.prediction_token_ids.token_ids
