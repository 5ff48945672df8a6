"""A body of Anthropic's protocol becomes one of chat, and errors come back in its own names."""

from typing import Any

import pytest
from pydantic import ValidationError
from support.requests.agent_bodies import CLAUDE_TOOLS, claude_code_body, parameters

from gateway.rest.anthropic.messages_body import CountTokensRequest, MessagesRequest, translated
from gateway.rest.asking.request import in_names_of
from gateway.rest.asking.translation import Translation
from gateway.rest.validation import error_about
from outrider.errors import InvalidRequest, OutriderError

HI = {"role": "user", "content": "hi"}
SWITCHES = frozenset({"enable_thinking"})
TOOL = {"name": "look", "input_schema": {"type": "object"}}


def translation(variables: frozenset[str] = frozenset(), **fields: Any) -> Translation:
    """What a body becomes."""
    body = {"messages": [HI], "max_tokens": 9, **fields}
    return translated(MessagesRequest.model_validate(body), variables)


def refusal(**fields: Any) -> OutriderError:
    """What is said of a body."""
    body = {"messages": [HI], "max_tokens": 9, **fields}
    try:
        translated(MessagesRequest.model_validate(body), frozenset())
    except ValidationError as error:
        return error_about(error.errors(), body)
    except OutriderError as error:
        return error
    raise AssertionError(f"{fields} was taken")


def test_a_request_of_claude_code_becomes_a_conversation() -> None:
    """One system message, then the turns, with all calls of a turn in one message and each result in its own."""
    body = MessagesRequest.model_validate(claude_code_body())
    found = translated(body, SWITCHES)
    system, user, assistant, *results = found.chat["messages"]
    assert system == {
        "role": "system",
        "content": "You are an agent.\n\n\nYou help users.\n\nAvailable agents:\n- claude: for anything.",
    }
    assert user["content"] == "<system-reminder>\nToday is a Monday.\n</system-reminder>\n\nsay hi"
    assert (assistant["reasoning_content"], assistant["content"]) == ("There may be a file.", "I look.")
    assert assistant["tool_calls"] == [
        {"id": "toolu_1", "type": "function", "function": {"name": "Read", "arguments": '{"value": "é.txt"}'}},
        {"id": "toolu_2", "type": "function", "function": {"name": "Bash", "arguments": '{"value": "ls"}'}},
    ]
    assert results == [
        {"role": "tool", "tool_call_id": "toolu_1", "content": "1\thi"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "a\nb"},
    ]
    assert [tool["function"]["name"] for tool in found.chat["tools"]] == list(CLAUDE_TOOLS)
    assert found.chat["tools"][0] == {
        "type": "function",
        "function": {"name": "Agent", "description": "Does Agent.", "parameters": parameters("Agent")},
    }
    told = {name: found.chat[name] for name in ("model", "max_tokens", "chat_template_kwargs", "reasoning_effort")}
    assert told == {
        "model": "claude-opus-4-8",
        "max_tokens": 64_000,
        "chat_template_kwargs": {"enable_thinking": True},
        "reasoning_effort": "high",
    }
    assert set(found.ignored) == {
        *("messages.content.cache_control", "messages.content.signature", "messages.content.is_error"),
        *("system.cache_control", "system.x-anthropic-billing-header", "context_management", "metadata"),
    }


def test_a_conversation_that_goes_on_begins_as_before() -> None:
    """Else nothing of it would be found in the prefix cache: what comes later changes no message that was there."""
    body = claude_code_body()
    before = translated(MessagesRequest.model_validate(body), frozenset()).chat["messages"]
    body["messages"] += [
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "more"},
        {"role": "system", "content": "A plan is wanted."},
    ]
    after = translated(MessagesRequest.model_validate(body), frozenset()).chat["messages"]
    assert after[: len(before)] == before
    assert after[len(before) :] == [
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "more"},
        {"role": "system", "content": "A plan is wanted."},
    ]


def test_sampling_and_stops_arrive_under_chats_names() -> None:
    """And only what was given."""
    assert translation().chat == {"messages": [HI], "max_tokens": 9}
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 7, "cache_salt": "mine"}
    chat = translation(**fields, stop_sequences=["\n\nHuman:"], speculation={"enabled": False}, system="Be brief.").chat
    assert chat == {
        **fields,
        "messages": [{"role": "system", "content": "Be brief."}, HI],
        "max_tokens": 9,
        "stop": ["\n\nHuman:"],
        "speculation": {"enabled": False},
    }


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
        (
            {"type": "tool", "name": "look", "disable_parallel_tool_use": False},
            {"tool_choice": {"type": "function", "function": {"name": "look"}}, "parallel_tool_calls": True},
        ),
    ],
)
def test_choices_of_tools_have_chats_words(choice: dict[str, Any], expected: dict[str, Any]) -> None:
    """Whether several at once may be called stands beside them there."""
    chat = translation(tools=[TOOL], tool_choice=choice).chat
    assert {name: chat[name] for name in ("tool_choice", "parallel_tool_calls") if name in chat} == expected


def test_tools_that_its_maker_runs_are_left_out_by_name() -> None:
    """With nothing left to choose from, a choice that forces nothing is left out too."""
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    found = translation(tools=[search, TOOL])
    assert [tool["function"]["name"] for tool in found.chat["tools"]] == ["look"]
    assert found.ignored == ("tools.0=web_search_20250305",)
    assert found.names["tools.0.function.parameters"] == "tools.1.input_schema"
    assert set(translation(tools=[search], tool_choice={"type": "auto"}).chat) == {"messages", "max_tokens"}


def test_a_schema_for_the_answer_is_strict() -> None:
    """And an error about it names its place in the body."""
    found = translation(output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}})
    assert found.chat["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
    }
    error = InvalidRequest("response_format.json_schema.schema", {}, "another one")
    assert in_names_of(found.names, error).message == "output_config.format.schema is {}, but must be another one"


def test_thinking_is_switched_where_there_is_a_switch() -> None:
    """Nowhere else, which is named; effort is chat's."""
    off = {"thinking": {"type": "disabled"}}
    found = translation(**off, output_config={"effort": "low"})
    assert (found.ignored, found.chat["reasoning_effort"]) == (("thinking",), "low")
    assert found.names["reasoning_effort"] == "output_config.effort"
    found = translation(SWITCHES, **off)
    assert (found.chat["chat_template_kwargs"], found.ignored) == ({"enable_thinking": False}, ())
    budget = {"type": "enabled", "budget_tokens": 2048}
    assert translation(SWITCHES, thinking=budget).ignored == ("thinking.budget_tokens",)


def test_an_assistant_that_only_thought_said_nothing() -> None:
    """Chat wants a content or calls."""
    thought = [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "redacted_thinking", "data": "x"}]
    found = translation(messages=[HI, {"role": "assistant", "content": thought}, HI])
    assert found.chat["messages"][1] == {"role": "assistant", "reasoning_content": "Hm.", "content": ""}
    assert "messages.content.data" in found.ignored


@pytest.mark.slow
def test_many_blocks_are_one_message() -> None:
    """However they are spread over turns of one side; a body has as many as fit into it."""
    blocks = [{"type": "text", "text": "a"}] * 20_000
    found = translation(messages=[{"role": role, "content": blocks} for role in ("user", "system", "user")])
    system, user = found.chat["messages"]
    assert (len(system["content"]), len(user["content"])) == (20_000 + 2 * 19_999, 40_000 + 39_999)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.0.content.0.type is 'image', but only 'text', 'thinking', 'redacted_thinking', 'tool_use' or "
            "'tool_result' is served",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "document"}]}],
                    }
                ]
            },
            "messages.0.content.0.content.0.type is 'document', but only 'text' is served",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
            "messages.0.content.0.type is 'tool_use', but must be the type of a block that the user sends",
        ),
        (
            {"messages": [HI, {"role": "assistant", "content": "{"}]},
            "messages.1.role is 'assistant', but must be user in the last message, because no answer is continued here",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content is 5, but must be a string or a list of"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages.0.content.0.text is 5"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "", "x": 1}]}]}, "messages.0.content.0.x"),
        ({"max_tokens": 0}, "max_tokens is 0, but must be greater than or equal to 1"),
        ({"tools": [{"name": "look"}]}, "tools.0.input_schema is missing"),
        ({"tools": [{"type": {}, "name": "look"}]}, "tools.0 is {'type': {}, 'name': 'look'}, but must be a tool"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is 'absent', but must be given with the type tool"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type is 'any', but must be 'auto' or 'none' without tools"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.type is 'tool', but must be 'auto' or 'none'"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type is 'some', but only 'auto', 'any', 'tool' or 'none'"),
        ({"n": 2}, "n is not a known parameter"),
        ({"container": "c"}, "container is not served; leave it out"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], sentence: str) -> None:
    """With its place in the body as the client wrote it."""
    assert refusal(**fields).message.startswith(sentence)


def test_counting_takes_no_settings() -> None:
    """They would have no effect."""
    with pytest.raises(ValidationError):
        CountTokensRequest.model_validate({"messages": [HI], "max_tokens": 9})
