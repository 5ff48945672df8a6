"""Answers are read alike however they are cut, nothing of them is lost, and what is no call is text."""

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest
from support.requests.recorded_answers import result_of

from gateway.settings import GatewaySettings
from gateway.tools.call_grammar import CallRules, OfferedTool, answer_constraint
from gateway.tools.formats import FORMATS, choose_format
from gateway.tools.reader import AnswerReader, Reading, joined
from outrider.answer import CallArguments, CallBegun, ContentDelta, Delta, ReasoningDelta
from outrider.errors import InvalidRequest

COUNT: Mapping[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}, "of": {"type": "string"}}}
TOOLS = {"count": COUNT, "rest": {}}
CALLING = [name for name, each in FORMATS.items() if each.calls]
# What answers are made of that trouble readers.
SHARDS = (
    *("<tool_call>", "</tool_call>", "<tool_", "call>", "<think>", "</think>", "<function=count>", "<parameter=n>"),
    *("</parameter>", "</function>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "[THINK]", "[/THINK]", "\n", " ", "3"),
    *('{"name": "count", "arguments": {"n": 3}}', '{"name": "count", "parameters": {"of": "</tool_call>"}}', "{", "}"),
    *("<function=count>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>", '[TOOL_CALLS]count[ARGS]{"n": 3}'),
    *("[count(n=1)]", "[count(of='a]')", "count", '"', "\\", "ships", "é", ";", "[", "]", ","),
)
CALL = '{"name": "count", "arguments": {"n": 3}}'


def read(name: str, pieces: list[str], *, is_cut: bool = False, special: tuple[str, ...] = ()) -> list[Delta]:
    """What a format makes of an answer in pieces, with what goes on joined."""
    reader = AnswerReader(Reading(FORMATS[name], TOOLS), special)
    deltas = [delta for piece in pieces for delta in reader.push(piece, is_special=piece in special)]
    return list(joined([*deltas, *reader.finish(is_cut=is_cut)]))


def without_ids(deltas: list[Delta]) -> list[object]:
    return [(each.index, each.name) if isinstance(each, CallBegun) else each for each in deltas]


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLING)
def test_random_answers_are_read_alike_however_they_are_cut(name: str) -> None:
    """In one piece, by characters, and in random pieces; without calls all letters are there."""
    rng = random.Random(f"cuts of {name}")
    num_calls = 0
    for _ in range(600):
        text = "".join(rng.choices(SHARDS, k=rng.randrange(1, 12)))
        whole = read(name, [text])
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), 4)))
        pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert without_ids(read(name, list(text))) == without_ids(whole), text
        assert without_ids(read(name, pieces)) == without_ids(whole), text
        calls = [each for each in whole if isinstance(each, CallBegun)]
        num_calls += len(calls)
        said = "".join(each.text for each in whole if isinstance(each, ContentDelta | ReasoningDelta))
        if not calls and not any(marker in text for pair in FORMATS[name].reasoning for marker in pair):
            assert said == text
        for each in whole:
            if isinstance(each, CallArguments):
                assert isinstance(json.loads(each.text), dict)
    assert num_calls > 5


def test_arguments_are_as_the_model_spelled_them() -> None:
    """Spaces, escapes, long numbers and the order of keys included."""
    spelled = '{ "of":"\\u00e9\\/" , "n" : 12345678901234567890.50 }'
    [begun, arguments] = read("hermes", [f'<tool_call>{{"arguments": {spelled}, "name": "count"}}</tool_call>'])
    assert isinstance(begun, CallBegun)
    assert begun.name == "count"
    assert begun.call_id.startswith("call_")
    assert len(begun.call_id) == 29
    assert arguments == CallArguments(0, spelled)


def test_line_ends_within_strings_become_json() -> None:
    """Models write them, and no strict reader takes them."""
    result = result_of(read("hermes", ['<tool_call>{"name": "count", "arguments": {"of": "a\nb"}}</tool_call>']))
    assert json.loads(result.tool_calls[0].arguments_raw) == {"of": "a\nb"}


def test_a_quoted_object_is_taken_for_what_it_is() -> None:
    """Some models write the arguments as a string."""
    result = result_of(read("hermes", ['<tool_call>{"name": "count", "arguments": "{\\"n\\": 3}"}</tool_call>']))
    assert result.tool_calls[0].arguments_raw == '{"n": 3}'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "count", "arguments": {"n": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "count", "arguments": [1]}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 500),
        ("hermes", "a <tool_call> b"),
        ("json", '{"name": "Ada", "arguments": {"n": 3}}'),
        ("json", '{"name": "count"}'),
        ("json", f"Say {CALL}"),
        ("llama-pythonic", "[count(n=open('x'))]"),
        ("llama-pythonic", "[count(n=1, n=2)]"),
        ("llama-pythonic", "[Ada](n=1)"),
        ("qwen3-xml", "<tool_call>\n<function=count>\n<parameter=n>\n3\n</function"),
        ("mistral", "[TOOL_CALLS]count{]}"),
    ],
)
def test_what_is_no_call_is_text(name: str, text: str) -> None:
    """All of it, letter by letter."""
    assert read(name, [text]) == [ContentDelta(text)]


def test_a_call_that_the_limit_cut_off_is_not_told() -> None:
    """Neither as a call nor as text; nor is half a marker. Without a marker it is a call by the name of a tool."""
    cut = '{"name": "count", "arguments": {"n": 3'
    assert read("hermes", ["Yes. <tool_call>" + cut], is_cut=True) == [ContentDelta("Yes.")]
    assert read("hermes", ["<tool_call>" + cut]) == [ContentDelta("<tool_call>" + cut)]
    for length in range(1, len(cut) + 1):
        assert read("json", [cut[:length]], is_cut=True) == []
        assert read("json", [cut[:length]]) == [ContentDelta(cut[:length])]
    for text in ('{"name": "Ada", "arguments": {"n"', '{"type": "ship", "of', '{"name": "counts"', "[1, 2", "[Ada(n="):
        for name in ("json", "llama-pythonic"):
            assert read(name, [text], is_cut=True) == [ContentDelta(text)]
    for length in range(1, len("[count(n=3")):
        assert read("llama-pythonic", ["[count(n=3"[:length]], is_cut=True) == []
    for marker in ("<tool_call>", "</think>", "<think>"):
        for length in range(1, len(marker)):
            begun = "" if marker == "<think>" else "<think>I " if marker == "</think>" else "Yes.\n"
            said = {"<think>I ": [ReasoningDelta("I")], "Yes.\n": [ContentDelta("Yes.")], "": []}[begun]
            assert read("hermes", [begun + marker[:length]], is_cut=True) == said
            assert joined(read("hermes", [begun + marker[:length]])) != said


@pytest.mark.parametrize(("name", "marker"), [("json", ""), ("mistral", "[TOOL_CALLS]")])
@pytest.mark.parametrize("rest", ["", ",", ', {"name": "co', ', {"name": "count", "arguments": {"n": 3}'])
def test_calls_of_a_list_are_told_up_to_where_it_is_cut_off(name: str, marker: str, rest: str) -> None:
    """What is after the last whole one is dropped, as it is for a single call."""
    whole = read(name, [f"{marker}[{CALL}, {CALL}]"])
    assert len(whole) == 4
    assert without_ids(read(name, [f"{marker}[{CALL}, {CALL}{rest}"], is_cut=True)) == without_ids(whole)


def test_an_answer_in_json_does_not_wait_for_its_end() -> None:
    """Its first key shows that it is no call."""
    reader = AnswerReader(Reading(FORMATS["json"], TOOLS), ())
    assert joined(reader.push('{"capital":')) == (ContentDelta('{"capital":'),)


def test_a_special_token_counts_only_as_a_token() -> None:
    """Its letters are text, and where it means nothing it has none."""
    special = ("[TOOL_CALLS]", "[ARGS]", "</s>")
    assert read("mistral", ["a [TOOL", "_CALLS]", "</s>", "b"], special=special) == [ContentDelta("a [TOOL_CALLS]b")]
    [text, begun, arguments] = read("mistral", ["a", "[TOOL_CALLS]", "count", "[ARGS]", '{"n": 3}'], special=special)
    assert (text, arguments) == (ContentDelta("a"), CallArguments(0, '{"n": 3}'))
    assert isinstance(begun, CallBegun)
    assert len(begun.call_id) == 9
    assert begun.call_id.isalnum()
    assert read("mistral", ["[TOOL_CALLS]", " no", "</s>"], special=special) == [ContentDelta(" no")]


def test_an_id_that_the_model_gave_is_kept_where_it_can_be() -> None:
    """Not if it is too long for the template, and not twice."""
    call = '[TOOL_CALLS]count[CALL_ID]{}[ARGS]{{"n": 3}}'
    deltas = read("mistral", [call.format("abcdefgh1"), call.format("abcdefgh1"), call.format("toolong1234")])
    ids = [each.call_id for each in deltas if isinstance(each, CallBegun)]
    assert ids[0] == "abcdefgh1"
    assert len(set(ids)) == 3
    assert {len(each) for each in ids} == {9}


def test_reasoning_goes_on_from_the_prompt_and_ends_before_content() -> None:
    """With none of the white space around it."""
    reader = AnswerReader(Reading(FORMATS["hermes"], TOOLS, "<think>"), ())
    assert reader.is_reasoning
    deltas = [*reader.push("\nI count.\n</thi"), *reader.push("nk>\n\nThree.\n"), *reader.finish(is_cut=False)]
    assert joined(deltas) == (ReasoningDelta("I count."), ContentDelta("Three.\n"))


def test_without_tools_nothing_is_taken_for_a_call() -> None:
    """Reasoning is read nevertheless."""
    reader = AnswerReader(Reading(FORMATS["hermes"]), ())
    text = f"<tool_call>{CALL}</tool_call>"
    deltas = [*reader.push(f"<think>No.</think>{text}"), *reader.finish(is_cut=False)]
    assert joined(deltas) == (ReasoningDelta("No."), ContentDelta(text))


def test_values_are_cast_by_the_schema() -> None:
    """Also by one that lies elsewhere in it; and Python's literals are read where JSON was meant."""
    kinds = {"a": {"$ref": "#/$defs/ship"}, "b": {"type": "string"}, "c": {"enum": [1, 2]}, "d": {"type": "boolean"}}
    schema = {"properties": kinds, "$defs": {"ship": {"type": "object"}}}
    values = {"a": "{'x': True, 'y': None}", "b": "7", "c": "2", "d": "True", "e": "7"}
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    reader = AnswerReader(Reading(FORMATS["qwen3-xml"], {"count": schema}), ())
    result = result_of(reader.push(f"<tool_call>\n<function=count>\n{text}</function>\n</tool_call>"))
    found = json.loads(result.tool_calls[0].arguments_raw)
    assert found == {"a": {"x": True, "y": None}, "b": "7", "c": 2, "d": True, "e": "7"}


def test_a_value_may_speak_of_parameters_that_there_are_not() -> None:
    """Only those of the tool end a value that was not closed."""
    schema = {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}}
    value = "See:\n<parameter=x>\n</parameter>\nand more"
    inner = f"<parameter=a>\n{value}\n<parameter=b>\n1\n</parameter>\n"
    text = f"<tool_call>\n<function=count>\n{inner}</function>\n</tool_call>"
    result = result_of(AnswerReader(Reading(FORMATS["qwen3-xml"], {"count": schema}), ()).push(text))
    assert json.loads(result.tool_calls[0].arguments_raw) == {"a": value, "b": "1"}


@pytest.mark.parametrize("word", ["type", "anyOf", "enum", "$ref", "properties", "required"])
@pytest.mark.parametrize("nonsense", [5, {"a": 1}, [{}], [[1]], "#/$defs/a/b", None])
def test_nonsense_in_a_schema_casts_nothing(word: str, nonsense: object) -> None:
    """Whatever a client wrote there, the call comes, and so does a grammar for it."""
    schema: dict[str, Any] = {"properties": {"n": {word: nonsense}}, "required": nonsense}
    if word == "properties" and isinstance(nonsense, dict):
        schema["properties"] = nonsense
    text = "<tool_call>\n<function=count>\n<parameter=n>\nthree\n</parameter>\n</function>\n</tool_call>"
    reading = Reading(FORMATS["qwen3-xml"], {"count": schema})
    result = result_of(AnswerReader(reading, ()).push(text))
    assert json.loads(result.tool_calls[0].arguments_raw) == {"n": "three"}
    rules = CallRules((OfferedTool("count", schema),), needs_call=True)
    assert answer_constraint(reading, rules, {}) is not None


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>\n<function=a>\n<parameter=b>", "qwen3-xml"),
        ("{{ '<tool_call>' }}{{ '</think>' }}", "hermes"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral"),
        ("[TOOL_CALLS] [{", "mistral-v3"),
        ("<|python_start|>", "llama-pythonic"),
        ('{"name": function name, "parameters": dictionary of arguments}', "llama3-json"),
        ("<|im_start|>", "json"),
        ("", "json"),
    ],
)
def test_the_format_is_the_one_that_the_template_speaks_of(template: str, name: str) -> None:
    """And so is the reasoning; a name wins over the template, but not over its reasoning."""
    found, named = choose_format("auto", template), choose_format("json", template)
    assert found is not None
    assert named is not None
    assert found.name == name
    assert named.name == "json"
    assert bool(found.reasoning) == bool(named.reasoning) == ("</think>" in template)


def test_a_format_that_there_is_not_is_refused() -> None:
    """And "off" reads nothing."""
    assert choose_format("off", "<tool_call>") is None
    with pytest.raises(InvalidRequest, match=r"--tool-format is 'xml', but must be one of auto, off, hermes"):
        GatewaySettings(target="host:1", tokenizer="m", tool_format="xml")
