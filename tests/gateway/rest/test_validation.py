"""A body that does not fit the request is one error, which names the field, the value and the limit."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from gateway.rest.asking.chat_body import ChatRequest
from gateway.rest.asking.fields import SpeculationFields
from gateway.rest.openai.completions import CompletionRequest
from gateway.rest.validation import error_about
from outrider.errors import OutriderError

USER: dict[str, Any] = {"role": "user", "content": "fox"}
CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"foo": 1}, "UNKNOWN_PARAMETER", "foo is not a known parameter"),
    ({"messages": []}, "INVALID_REQUEST", "messages is [], but must be at least 1 entry long"),
    ({"messages": [{"role": "user", "contents": "x"}]}, "UNKNOWN_PARAMETER", "messages.0.contents is not a known"),
    ({"messages": [{"content": "x"}]}, "MISSING_REQUIRED_PARAMETER", "messages.0.role is missing"),
    ({"messages": [{**USER, "role": "king"}]}, "INVALID_REQUEST", "messages.0.role is 'king', but must be 'system'"),
    ({"messages": [{**USER, "content": [{"url": "x"}]}]}, "MISSING_REQUIRED_PARAMETER", "messages.0.content.0.type is"),
    ({"messages": [{**USER, "content": 5}]}, "INVALID_REQUEST", "messages.0.content is 5, but must be a string or"),
    ({"response_format": {"type": "grammar"}}, "UNSUPPORTED", "response_format.type is 'grammar', but only 'text',"),
    ({"tool_choice": "some"}, "INVALID_REQUEST", "tool_choice is 'some', but must be 'auto', 'none' or 'required'"),
    ({"tool_choice": {"type": "function"}}, "MISSING_REQUIRED_PARAMETER", "tool_choice.function is missing"),
    ({"tool_choice": {"type": "x"}}, "UNSUPPORTED", "tool_choice.type is 'x', but only 'function' is served"),
    ({"chat_template_kwargs": {"a": [1]}}, "INVALID_REQUEST", "chat_template_kwargs.a is [1], but must be"),
    ({"chat_template_kwargs": {"a": "x" * 257}}, "INVALID_REQUEST", "chat_template_kwargs.a is 'xxx"),
    ({"reasoning_effort": "hard"}, "INVALID_REQUEST", "reasoning_effort is 'hard', but must be 'none', 'minimal'"),
    ({"functions": [{}]}, "UNSUPPORTED", "functions is not served; leave it out"),
    ({"store": True}, "UNSUPPORTED", "store is True, but only false is served"),
    ({"service_tier": "flex"}, "UNSUPPORTED", "service_tier is 'flex', but only 'auto' or 'default' is served"),
    ({"temperature": "hot"}, "INVALID_REQUEST", "temperature is 'hot', but must be a valid number"),
    ({"temperature": True}, "INVALID_REQUEST", "temperature is True, but must be a valid number"),
    ({"temperature": -1, "n": 9}, "INVALID_REQUEST", "temperature is -1, but must be greater than or equal to 0"),
    ({"n": 9}, "INVALID_REQUEST", "n is 9, but must be less than or equal to 8"),
    ({"max_tokens": 10**30}, "INVALID_REQUEST", "max_tokens is 1000000000000000000000000000000, but must be less"),
    ({"max_tokens": 1.0}, "INVALID_REQUEST", "max_tokens is 1.0, but must be a valid integer"),
    ({"seed": 2**63}, "INVALID_REQUEST", "seed is 9223372036854775808, but must be less than or equal to 92233"),
    ({"stop": 5}, "INVALID_REQUEST", "stop is 5, but must be a string or a list of strings"),
    ({"stop": ["ok", ""]}, "INVALID_REQUEST", "stop.1 is '', but must be at least 1 character long"),
    ({"stop": ["x"] * 65}, "INVALID_REQUEST", "stop has 65 entries, but must have at most 64"),
    ({"logit_bias": {"fox": 1}}, "INVALID_REQUEST", "logit_bias.fox key is 'fox', but must be text that matches"),
    ({"logit_bias": {"5": 101}}, "INVALID_REQUEST", "logit_bias.5 is 101, but must be less than or equal to 100"),
    ({"logit_bias": {str(key): 1 for key in range(301)}}, "INVALID_REQUEST", "logit_bias has 301 entries, but must"),
    ({"speculation": 3}, "INVALID_REQUEST", "speculation is 3, but must be an object"),
    (
        {"speculation": {"draft_count": "x"}},
        "INVALID_REQUEST",
        "speculation.draft_count is 'x', but must be a valid int",
    ),
    ({"speculation": {"rule": "x"}}, "INVALID_REQUEST", "speculation.rule is 'x', but must be 'match', 'ratio'"),
    ({"logprobs": 1}, "INVALID_REQUEST", "logprobs is 1, but must be a valid boolean"),
]
PROMPTS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "MISSING_REQUIRED_PARAMETER", "prompt is missing"),
    ({"prompt": []}, "INVALID_REQUEST", "prompt is [], but must be a string, a list of strings"),
    ({"prompt": 5}, "INVALID_REQUEST", "prompt is 5, but must be a string, a list of strings"),
    ({"prompt": ""}, "INVALID_REQUEST", "prompt is '', but must be at least 1 character long"),
    ({"prompt": ["a", 5]}, "INVALID_REQUEST", "prompt.1 is 5, but must be a valid string"),
    ({"prompt": [1, "a"]}, "INVALID_REQUEST", "prompt.1 is 'a', but must be a valid integer"),
    ({"prompt": [1, -1]}, "INVALID_REQUEST", "prompt.1 is -1, but must be greater than or equal to 0"),
    ({"prompt": [[1], []]}, "INVALID_REQUEST", "prompt.1 is [], but must be at least 1 entry long"),
    ({"prompt": ["a"] * 65}, "INVALID_REQUEST", "prompt has 65 entries, but must have at most 64"),
    ({"prompt": "a", "skip_special_tokens": False}, "UNSUPPORTED", "skip_special_tokens is False, but only true is"),
    ({"prompt": "a", "logprobs": True}, "INVALID_REQUEST", "logprobs is True, but must be a valid integer"),
    ({"prompt": "x" * 500, "n": "y" * 500}, "INVALID_REQUEST", f"n is '{'y' * 76}..., but must be a valid integer"),
]


def error_of(model: type[BaseModel], body: object) -> OutriderError:
    """The error about a body that does not fit."""
    with pytest.raises(ValidationError) as raised:
        model.model_validate(body)
    return error_about(raised.value.errors(include_url=False), body)


@pytest.mark.parametrize(("fields", "reason", "beginning"), CHAT)
def test_chat_names_what_is_wrong(fields: dict[str, Any], reason: str, beginning: str) -> None:
    """Unknown fields, values out of range and of the wrong type, and what OpenAI has and is not served here."""
    error = error_of(ChatRequest, {"messages": [USER], **fields})
    assert (error.reason, error.message[: len(beginning)]) == (reason, beginning)
    assert beginning.startswith(error.metadata["field"])


@pytest.mark.parametrize(("body", "reason", "beginning"), PROMPTS)
def test_completions_name_what_is_wrong(body: dict[str, Any], reason: str, beginning: str) -> None:
    """A prompt of no kind, and one whose entries are of several."""
    error = error_of(CompletionRequest, body)
    assert (error.reason, error.message[: len(beginning)]) == (reason, beginning)


def test_many_wrong_token_ids_are_one_finding() -> None:
    """A long list of wrong entries costs no more than its first one."""
    with pytest.raises(ValidationError) as raised:
        CompletionRequest.model_validate({"prompt": [1, *["x"] * 100_000]})
    assert len(raised.value.errors()) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [1] * 100_000}]},
        {"messages": [{"role": "assistant", "tool_calls": [1] * 100_000}]},
        {"messages": [1] * 4_096},
        {"tools": [1] * 128},
    ],
)
def test_many_wrong_entries_are_one_finding(fields: dict[str, Any]) -> None:
    """Whatever list of a conversation they are in: a finding takes a thousand times the space of an entry."""
    with pytest.raises(ValidationError) as raised:
        ChatRequest.model_validate({"messages": [USER], **fields})
    assert len(raised.value.errors()) == 1


@pytest.mark.parametrize("place", ["body", "speculation", "messages.0"])
def test_many_unknown_fields_are_one_finding(place: str) -> None:
    """The first of them, wherever they are, beside whatever else is wrong."""
    unknown = {f"k{number}": number for number in range(10_000)}
    bodies: dict[str, dict[str, Any]] = {
        "body": {**unknown, "messages": [USER], "n": 9},
        "speculation": {"messages": [USER], "n": 9, "speculation": unknown},
        "messages.0": {"messages": [{**unknown, **USER}], "n": 9},
    }
    with pytest.raises(ValidationError) as raised:
        ChatRequest.model_validate(bodies[place])
    found = {".".join(map(str, each["loc"])): each["type"] for each in raised.value.errors()}
    assert found == {"n": "less_than_equal", f"{place}.k0".removeprefix("body."): "extra_forbidden"}


def test_null_is_the_same_as_absent() -> None:
    """Clients write null where they mean nothing, for known and for unserved fields."""
    nothing = dict.fromkeys(set(ChatRequest.model_fields) - {"messages"})
    assert ChatRequest.model_validate({"messages": [USER], **nothing}) == ChatRequest.model_validate(
        {"messages": [USER]}
    )
    SpeculationFields.model_validate(dict.fromkeys(SpeculationFields.model_fields))
