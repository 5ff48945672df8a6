"""A body of OpenAI's newer protocol becomes one of chat, and errors come back in its own names."""

from typing import Any

import pytest
from pydantic import ValidationError
from support.requests.agent_bodies import CODEX_TOOLS, codex_body

from gateway.rest.asking.request import in_names_of
from gateway.rest.asking.translation import Translation
from gateway.rest.openai.responses_api_body import ResponsesRequest, translated
from gateway.rest.validation import error_about
from outrider.errors import InvalidRequest, OutriderError

HI = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}


def translation(**fields: Any) -> Translation:
    """What a body becomes."""
    return translated(ResponsesRequest.model_validate({"input": "hi", **fields}))


def refusal(**fields: Any) -> OutriderError:
    """What is said of a body."""
    body = {"input": "hi", **fields}
    try:
        translated(ResponsesRequest.model_validate(body))
    except ValidationError as error:
        return error_about(error.errors(), body)
    except OutriderError as error:
        return error
    raise AssertionError(f"{fields} was taken")


def test_a_request_of_codex_becomes_a_conversation() -> None:
    """What developers say is one system message; reasoning, text and call are one turn of the assistant."""
    found = translated(ResponsesRequest.model_validate(codex_body()))
    system, user, assistant, result = found.chat["messages"]
    assert system == {
        "role": "system",
        "content": "You are a coding agent.\n\n<permissions instructions>\nRead only.",
    }
    assert user["content"] == "<environment_context>\n  <cwd>/work</cwd>\n</environment_context>\nsay hi"
    call = {"id": "call_1", "type": "function", "function": {"name": "exec_command", "arguments": '{"value": "ls"}'}}
    assert assistant == {
        "role": "assistant",
        "reasoning_content": "There may be a file.",
        "content": "I look.",
        "tool_calls": [call],
    }
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "a\nb"}
    assert [tool["function"]["name"] for tool in found.chat["tools"]] == list(CODEX_TOOLS)
    assert found.chat["tools"][0]["function"]["strict"] is False
    assert (found.chat["tool_choice"], found.chat["parallel_tool_calls"]) == ("auto", True)
    assert set(found.ignored) == {
        *("input.id", "reasoning.summary", "prompt_cache_key", "client_metadata"),
        *("tools.6=namespace", "tools.7=web_search"),
    }


def test_text_and_instructions_are_two_messages() -> None:
    """The shortest way to ask."""
    chat = translation(instructions="Be brief.", max_output_tokens=9, temperature=0.5, top_p=0.9, seed=7).chat
    assert chat == {
        "messages": [{"role": "system", "content": "Be brief."}, HI],
        **{"max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "seed": 7},
    }


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    """Its items are items of the next request."""
    items = [
        HI,
        {"id": "rs_1", "type": "reasoning", "status": "completed", "summary": [], "content": []},
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Well.", "annotations": []}],
        },
        {**CALL, "id": "fc_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "3"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So three."}]},
        {"role": "assistant", "content": "Three."},
        HI,
    ]
    called = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    assert translation(input=items).chat["messages"] == [
        HI,
        {"role": "assistant", "content": "Well.", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
        {"role": "assistant", "reasoning_content": "So three.", "content": "Three."},
        HI,
    ]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("required", "required"),
        ({"type": "function", "name": "look"}, {"type": "function", "function": {"name": "look"}}),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "look"}}]},
            },
        ),
    ],
)
def test_choices_of_tools_have_chats_words(choice: object, expected: object) -> None:
    """Which have a level more."""
    assert translation(tools=[TOOL], tool_choice=choice).chat["tool_choice"] == expected


def test_formats_have_chats_words() -> None:
    """A schema stands a level deeper there, and an error about it names its place here."""
    for kind in ("text", "json_object"):
        assert translation(text={"format": {"type": kind}}).chat["response_format"] == {"type": kind}
    shape = {"type": "json_schema", "name": "ship", "schema": {"type": "object"}, "strict": True}
    found = translation(text={"format": shape, "verbosity": "low"})
    assert found.chat["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "ship", "schema": {"type": "object"}, "strict": True},
    }
    assert found.ignored == ("text.verbosity",)
    error = InvalidRequest("response_format.json_schema.schema", {}, "another one")
    assert in_names_of(found.names, error).metadata["field"] == "text.format.schema"


def test_effort_is_chats() -> None:
    """Which knows what the template makes of it; that it makes nothing of it is reported in the name of this body."""
    found = translation(reasoning={"effort": "none"})
    assert found.chat["reasoning_effort"] == "none"
    assert found.names["reasoning_effort"] == "reasoning.effort"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id is not served; leave it out"),
        ({"store": True}, "store is True, but must be false"),
        ({"store": 0}, "store is 0, but must be a valid boolean"),
        ({"background": True}, "background is True, but must be false"),
        ({"truncation": "auto"}, "truncation is 'auto', but must be 'disabled'"),
        ({"include": ["message.output_text.logprobs"]}, "include.0 is 'message.output_text.logprobs', but must be"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options is 'given', but must be absent unless"),
        ({"input": []}, "input is [], but must be at least 1 entry long"),
        (
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            "input.0.type is 'item_reference', but only 'message', 'function_call', 'function_call_output', "
            "'custom_tool_call', 'custom_tool_call_output' or 'reasoning' is served",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type is 'input_image', but only 'input_text', 'output_text' or 'refusal' is served",
        ),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice is {'type': 'web_search'}, but must be none, auto"),
        (
            {"tool_choice": {"type": {}, "name": "look"}},
            "tool_choice is {'type': {}, 'name': 'look'}, but must be none",
        ),
        ({"tool_choice": "required"}, "tool_choice is 'required', but must be absent without tools"),
        (
            {"tool_choice": {"type": "function", "name": "f"}},
            "tool_choice is {'type': 'function', 'name': 'f'}, but must be absent without tools",
        ),
        ({"input": [{"type": [], "role": "user"}]}, "input.0.type is [], but only 'message', 'function_call'"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type is 'grammar', but only 'text', 'json_object' or"),
        ({"max_tokens": 9}, "max_tokens is not a known parameter"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], sentence: str) -> None:
    """With its place in the body as the client wrote it."""
    assert refusal(**fields).message.startswith(sentence)


def test_faults_that_chat_finds_have_the_dialects_names() -> None:
    """Of messages, of calls in them, of tools and of fields that chat calls otherwise."""
    found = translation(instructions="Be brief.", input=[HI, CALL], tools=[{"type": "web_search"}, TOOL])
    places = {
        "messages.0.content": "instructions.content",
        "messages.1.content": "input.0.content",
        "messages.2.tool_calls.0.function.arguments": "input.1.arguments",
        "tools.0.function.parameters.properties": "tools.1.parameters.properties",
        "max_tokens": "max_output_tokens",
        "messages": "input",
    }
    for inner, outer in places.items():
        assert in_names_of(found.names, InvalidRequest(inner, 1, "2")).metadata["field"] == outer
    assert in_names_of(found.gateway_names, InvalidRequest("prompt", 1, "2")).metadata["field"] == "input"
