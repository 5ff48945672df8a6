"""From what a caller writes to the message that travels."""

import math
from typing import Any

import pytest
from google.protobuf.message import Message

from outrider.beams import BeamSearch
from outrider.client import GenerationOptions, InvalidRequest, PromptTooLong, Rule, Speculation
from outrider.client.requests import CONSTRAINTS, chat_request, generate_request
from outrider.rpc.wire import MAX_MESSAGE_BYTES
from outrider.token_tree import TreeShape
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2

EVERYTHING = GenerationOptions(
    max_tokens=9,
    min_tokens=2,
    ignore_eos=True,
    temperature=0.5,
    top_k=7,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    logit_bias={5: -1.5},
    seed=-3,
    sample_count=2,
    beam_search=BeamSearch(4, 0.5, "never"),
    stop=["x", "y z"],
    stop_token_ids=[5, 6],
    banned_words=["cat"],
    logprob_count=3,
    echo=True,
    cache_salt="mine",
    unrecorded=True,
    speculation=Speculation(
        draft_count=4,
        rule="lenient",
        drafter="sampled",
        shape=TreeShape(4, 2, (2, 1), 3, True),
        lenience=0.25,
        typical_epsilon=0.125,
        typical_delta=math.nan,
        return_rounds=True,
    ),
    regex="[a-z]+",
    prediction="so",
    timeout_s=5,
    metadata={"traceparent": "00-1-1-01"},
)

# Of the one shape of an answer, and what only REST has words for.
OTHER_SHAPES = {"json_schema", "choices", "lark", "gbnf", "structural_tag", "whitespace", "is_lenient"}


def unset(message: Message) -> set[str]:
    """Names of the fields, at any depth, that a message leaves to their defaults."""
    given = {field.name: value for field, value in message.ListFields()}
    inner = [unset(value) for value in given.values() if isinstance(value, Message)]
    return {field.name for field in message.DESCRIPTOR.fields if field.name not in given}.union(*inner)


def test_every_field_has_an_option() -> None:
    """Whatever the protocol lets a client say can be said; even what the gateway will refuse."""
    assert GenerationOptions.__optional_keys__ == EVERYTHING.keys() | CONSTRAINTS
    message = generate_request("Hello", EVERYTHING)
    assert unset(message) == {"token_ids", "drafters", "prediction_token_ids", *OTHER_SHAPES}
    assert (message.text, list(message.stop), message.sampling.logit_bias) == ("Hello", ["x", "y z"], {5: -1.5})
    assert message.speculation.rule == types_pb2.ACCEPTANCE_RULE_LENIENT
    assert math.isnan(message.speculation.acceptance.typical_delta)
    by_ids = generate_request([3, 4], EVERYTHING)
    assert list(by_ids.token_ids.token_ids) == [3, 4]
    assert unset(by_ids) == {"text", "drafters", "prediction_token_ids", *OTHER_SHAPES}
    for several in ({"drafter": ["lookup", "model"]}, {"drafters": ("lookup", "model")}):
        merged = generate_request("a", {"prediction": [7], "speculation": Speculation(**several)})
        assert list(merged.speculation.drafters) == ["lookup", "model"]
    with pytest.raises(InvalidRequest, match=r"speculation.drafters .* absent beside speculation.drafter"):
        generate_request("a", {"speculation": Speculation(drafter="lookup", drafters=["model"])})
    assert list(merged.prediction_token_ids.token_ids) == [7]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"json_schema": '{"type":  "object"}'}, pb.Constraint(json_schema='{"type":  "object"}')),
        ({"json_schema": {"const": None}}, pb.Constraint(json_schema='{"const": null}')),
        ({"regex": "[a-z]+"}, pb.Constraint(regex="[a-z]+")),
        ({"choices": ["fox", "sea"]}, pb.Constraint(choices=pb.Choices(texts=["fox", "sea"]))),
        ({"choices": "fox"}, pb.Constraint(choices=pb.Choices(texts=["fox"]))),
        ({"choices": []}, pb.Constraint(choices=pb.Choices())),
        ({"lark": 'start: "a"'}, pb.Constraint(lark='start: "a"')),
        ({"gbnf": 'root ::= "a"'}, pb.Constraint(gbnf='root ::= "a"')),
    ],
)
def test_a_shape_is_one_of_five(options: GenerationOptions, wanted: pb.Constraint) -> None:
    """A schema goes out as the text that it is, or as JSON; what is no shape is the gateway's to refuse."""
    assert generate_request("Hello", options).constraint == wanted


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"regex": "a", "choices": ["b"]}, "choices is ['b'], but must be absent beside regex"),
        ({"json_schema": {"const": {1}}}, "json_schema is {'const': {1}}, but must be what JSON can carry: "),
        ({"json_schema": 5}, "json_schema is 5, but must be text"),
        ({"choices": ["a", 5]}, "choices.texts is ['a', 5], but must be a list, each text"),
        ({"regex": b"a\xff"}, "regex is b'a\\xff', but must be text"),
    ],
)
def test_what_is_no_shape_is_refused(options: Any, sentence: str) -> None:
    """By its name, before anything is sent."""
    with pytest.raises(InvalidRequest) as refused:
        generate_request("Hello", options)
    assert refused.value.message[: len(sentence)] == sentence


def test_defaults_belong_to_the_gateway() -> None:
    """What is not named, or None, is not set; zero is a value."""
    nothing: Any = dict.fromkeys(GenerationOptions.__optional_keys__)
    assert {field.name for field, _ in generate_request("Hello", nothing).ListFields()} == {"text"}
    zero = generate_request("Hello", {"temperature": 0, "seed": 0})
    assert zero.sampling.HasField("temperature")
    assert zero.HasField("seed")


def test_an_empty_list_of_token_ids_is_still_the_prompt() -> None:
    """So that the gateway refuses it by its name."""
    assert generate_request([], {}).WhichOneof("prompt") == "token_ids"


def test_one_stop_is_not_a_list_of_letters() -> None:
    """A text stands for the list of it."""
    assert list(generate_request("Hello", {"stop": "end"}).stop) == ["end"]


def test_a_conversation_keeps_its_order() -> None:
    """Roles and contents as they were given, and the rest of the request without a prompt."""
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    message = chat_request(turns, {"max_tokens": 3})
    assert [(each.role, each.content) for each in message.messages] == [("system", "Be brief."), ("user", "Hi")]
    assert (message.generation.max_tokens, message.generation.WhichOneof("prompt")) == (3, None)


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("max_tokens", "5", "max_tokens is '5', but must be a whole number of 32 bits"),
        ("max_tokens", 2**31, "max_tokens is 2147483648, but must be a whole number of 32 bits"),
        ("seed", 1.5, "seed is 1.5, but must be a whole number of 64 bits"),
        ("temperature", "warm", "temperature is 'warm', but must be a number"),
        ("stop", "a\udc80", "stop is ['a\\udc80'], but must be a list, each text that UTF-8 can carry"),
        ("stop_token_ids", 5, "stop_token_ids is 5, but must be a list, each a whole number of 32 bits"),
        ("stop_token_ids", b"5", "stop_token_ids is b'5', but must be a list, each a whole number of 32 bits"),
        ("echo", 2**64, "echo is 18446744073709551616, but must be true or false"),
        pytest.param("top_p", 10**400, f"top_p is 1{'0' * 76}..., but must be a number", id="top_p-larger-than-any"),
        ("logit_bias", {5: "x"}, "logit_bias is {5: 'x'}, but must be a mapping of token ids to numbers"),
        (
            "speculation",
            {"enabled": False},
            "speculation is {'enabled': False}, but must be an instance of Speculation",
        ),
        (
            "speculation",
            Speculation(rule="greedy"),
            "speculation.rule is 'greedy', but must be one of match, ratio, block, lenient, typical",
        ),
        (
            "speculation",
            Speculation(lenience="a"),  # type: ignore[arg-type]
            "speculation.lenience is 'a', but must be a number",
        ),
    ],
)
def test_what_no_message_can_carry_is_named(option: str, value: object, sentence: str) -> None:
    """By field, value and kind, and before anything is sent."""
    options: Any = {option: value}
    with pytest.raises(InvalidRequest) as raised:
        generate_request("Hello", options)
    assert raised.value.message == sentence


@pytest.mark.parametrize("prompt", [None, 5, b"Hi", {1: 2}])
def test_a_prompt_is_text_or_a_list(prompt: Any) -> None:
    """Bytes could be either, so they are neither."""
    with pytest.raises(InvalidRequest) as raised:
        generate_request(prompt, {})
    assert raised.value.message == f"prompt is {prompt!r}, but must be text, or a list of token ids"


@pytest.mark.parametrize("messages", [None, 5, "Hi", {"role": "user", "content": "Hi"}])
def test_a_conversation_is_a_list(messages: Any) -> None:
    """One message is named as what it is, and not by its letters or keys."""
    with pytest.raises(
        InvalidRequest, match=r"^messages is .+, but must be a list, each a mapping with role and content"
    ):
        chat_request(messages, {})


@pytest.mark.parametrize("turn", ["Hi", {"role": "user"}, {"role": "user", "content": "Hi", "mood": "good"}])
def test_a_turn_is_a_role_and_a_content(turn: Any) -> None:
    """Nothing is ignored in silence."""
    with pytest.raises(InvalidRequest, match=r"^messages\.1 is "):
        chat_request([{"role": "user", "content": "Hi"}, turn], {})


def test_unknown_options_are_a_programming_error() -> None:
    """As with any function."""
    options: Any = {"temperatur": 1}
    with pytest.raises(TypeError, match="temperatur"):
        generate_request("Hello", options)


def test_what_no_gateway_would_receive_is_not_sent() -> None:
    """A message over the limit is a prompt that is too long."""
    with pytest.raises(PromptTooLong, match=f"at most {MAX_MESSAGE_BYTES} bytes"):
        generate_request("a" * MAX_MESSAGE_BYTES, {})


def test_rules_go_by_name_or_member() -> None:
    """Both are the same."""
    by_name, by_member = (
        generate_request("a", {"speculation": Speculation(rule=rule)}) for rule in ("block", Rule.BLOCK)
    )
    assert by_name == by_member
