"""What a call grammar lets a model say, the reader of the family reads back as calls that fit the tools' schemas."""

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from support.requests.recorded_answers import result_of
from support.services.reciting import ADDED, marked_tokenizer

from gateway.tools.call_grammar import CallRules, OfferedTool, answer_constraint
from gateway.tools.formats import BIG_THINK, FORMATS, THINK
from gateway.tools.reader import AnswerReader, Reading
from outrider.constraint import Constraint, ConstraintKind
from outrider.errors import InvalidRequest

CLOSED = {"type": "object", "additionalProperties": False}
SHIP = {**CLOSED, "properties": {"big": {"type": "boolean"}}, "required": ["big"]}
COUNT: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": -9, "maximum": 99},
        "of": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["brig", "sloop"]},
        "ship": {"$ref": "#/$defs/ship"},
        "why": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
    },
    "required": ["n", "ship"],
    "additionalProperties": False,
    "$defs": {"ship": SHIP},
}
NOTHING: Mapping[str, Any] = {**CLOSED, "properties": {}}
OPTIONAL: Mapping[str, Any] = {
    **CLOSED,
    "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"enum": [1, 2]}},
}
CALLING = [name for name, each in FORMATS.items() if each.calls]
SCHEMAS = {"count": COUNT, "rest": NOTHING, "maybe": OPTIONAL}
TOOLS = tuple(OfferedTool(name, schema, strict=True) for name, schema in SCHEMAS.items())
SPECIAL = ("<|end|>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<|python_tag|>")
CALLS = {
    "hermes": '<tool_call>\n{"name": "rest", "arguments": {}}\n</tool_call>',
    "qwen3-xml": "<tool_call>\n<function=rest>\n</function>\n</tool_call>",
    "llama3-json": '{"name": "rest", "parameters": {}}',
    "llama-pythonic": "[rest()]",
    "mistral": "[TOOL_CALLS]rest[ARGS]{}",
    "mistral-v3": '[TOOL_CALLS] [{"name": "rest", "arguments": {}}]',
    "json": '[{"name": "rest", "parameters": {}}]',
}
MAX_TOKENS = 600
# What brings an answer nearer to its end.
ENDING = frozenset('"}]),0>')


class Babbler:
    """Says what a grammar lets it say, at random, in haste to come to an end."""

    def __init__(self, special: tuple[str, ...]) -> None:
        self.tokenizer = marked_tokenizer(special)
        self.added = {name: self.tokenizer.token_to_id(name) for name in (*special, *ADDED)}
        self.special = {name: self.tokenizer.token_to_id(name) for name in special}
        self.end_id = self.special["<|end|>"]
        self._ll = LLTokenizer(self.tokenizer.to_str(), eos_token=self.end_id)

    def says(self, grammar: str, rng: random.Random) -> list[int] | None:
        """Tokens without the last, or None if there is no end of them."""
        matcher = LLMatcher(self._ll, LLMatcher.grammar_from_lark(grammar))
        assert not matcher.is_error(), matcher.get_error()
        found: list[int] = []
        for _ in range(MAX_TOKENS):
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = [int(each) for each in np.flatnonzero(bits[: self.tokenizer.get_vocab_size()])]
            assert allowed, matcher.get_error()
            hasty = [each for each in allowed if each == self.end_id or self._ends(each)]
            token_id = rng.choice(hasty if hasty and rng.random() < 0.5 else allowed)
            if token_id == self.end_id:
                return found
            found.append(token_id)
            assert matcher.consume_token(token_id)
        return None

    def takes(self, grammar: str, text: str) -> bool:
        """Whether an answer may be that text, in which special tokens stand by name."""
        matcher = LLMatcher(self._ll, grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def _ends(self, token_id: int) -> bool:
        return self.tokenizer.id_to_token(token_id) in ENDING or token_id in self.special.values()

    def read(self, reader: AnswerReader, token_ids: list[int]) -> Any:
        """What the reader makes of it."""
        deltas = []
        pending: list[int] = []
        for token_id in token_ids:
            if token_id in self.special.values():
                deltas += reader.push(self.tokenizer.decode(pending))
                deltas += reader.push(self.tokenizer.id_to_token(token_id), is_special=True)
                pending = []
            else:
                pending.append(token_id)
        return result_of([*deltas, *reader.push(self.tokenizer.decode(pending)), *reader.finish(is_cut=False)])


@pytest.fixture(scope="module", params=[SPECIAL, SPECIAL[:1]], ids=["special markers", "markers as text"])
def babbler(request: pytest.FixtureRequest) -> Babbler:
    """Once with markers that are tokens, once with markers that are text."""
    return Babbler(request.param)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize("max_calls", [None, 1])
def test_calls_that_must_come_are_read_back(babbler: Babbler, name: str, max_calls: int | None) -> None:
    """At least one, no more than allowed, each with arguments that a second validator takes, and nothing else."""
    reading = Reading(FORMATS[name], SCHEMAS)
    constraint = answer_constraint(reading, CallRules(TOOLS, needs_call=True, max_calls=max_calls), babbler.added)
    assert constraint is not None
    rng = random.Random(f"{name} {max_calls}")
    counts, names = set(), set()
    for _ in range(25):
        said = babbler.says(constraint.text, rng)
        if said is None:
            continue
        result = babbler.read(AnswerReader(reading, babbler.special), said)
        assert not (result.content or "").strip(), babbler.tokenizer.decode(said, skip_special_tokens=False)
        assert result.tool_calls
        counts.add(len(result.tool_calls))
        for call in result.tool_calls:
            names.add(call.name)
            jsonschema.validate(json.loads(call.arguments_raw), SCHEMAS[call.name])
    assert names == set(SCHEMAS)
    assert counts == {1} if max_calls else max(counts) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLING)
def test_a_free_answer_is_text_or_calls_that_fit(babbler: Babbler, name: str) -> None:
    """And a marker in it is followed by a call."""
    reading = Reading(FORMATS[name], SCHEMAS)
    constraint = answer_constraint(reading, CallRules(TOOLS, max_calls=1), babbler.added)
    assert constraint is not None
    assert babbler.takes(constraint.text, "Three ships.")
    assert babbler.takes(constraint.text, "")
    example = {**CALLS, "json": '{"name": "rest", "parameters": {}}'}[name]
    assert babbler.takes(constraint.text, example)
    wrong = example.replace("rest", "dive")
    assert not babbler.takes(constraint.text, wrong)
    rng = random.Random(name)
    for _ in range(25):
        said = babbler.says(constraint.text, rng)
        if said is not None:
            result = babbler.read(AnswerReader(reading, babbler.special), said)
            assert len(result.tool_calls) <= 1


def test_reasoning_may_come_first_and_must_end_where_the_prompt_began_it(babbler: Babbler) -> None:
    """And calls come after it."""
    call = '<tool_call>\n{"name": "rest", "arguments": {}}\n</tool_call>'
    rules = CallRules(TOOLS, needs_call=True)
    free = answer_constraint(Reading(FORMATS["hermes"], SCHEMAS), rules, babbler.added)
    begun = answer_constraint(Reading(FORMATS["hermes"], SCHEMAS, "<think>"), rules, babbler.added)
    assert free is not None
    assert begun is not None
    assert babbler.takes(free.text, call)
    assert babbler.takes(free.text, f"<think>\nShall I?\n</think>\n\n{call}\n{call}")
    assert not babbler.takes(free.text, f"Shall I? {call}")
    assert babbler.takes(begun.text, f"Shall I?\n</think>\n\n{call}")
    assert not babbler.takes(begun.text, call)


SHAPES = {
    ConstraintKind.JSON_SCHEMA: (
        '{"type": "object", "properties": {"nature": {"type": "string"}}, "required": ["nature"]}',
        '{"nature": "é"}',
    ),
    ConstraintKind.REGEX: ("a/b+", "a/bb"),
    ConstraintKind.CHOICE: ('[" yes", "no"]', " yes"),
    ConstraintKind.GBNF: ('root ::= "a" b\nb ::= "c"', "ac"),
    ConstraintKind.LARK: ('%llguidance {}\nstart: "a" B\nB: /c+/', "acc"),
    ConstraintKind.STRUCTURAL_TAG: (
        '{"structures": [{"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}], "triggers": ["<a"]}',
        "I say <a>3</a> now",
    ),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, ConstraintKind.JSON_SCHEMA) for name in CALLING), *(("hermes", kind) for kind in SHAPES)],
)
def test_a_form_comes_behind_reasoning_or_instead_of_calls(babbler: Babbler, name: str, kind: ConstraintKind) -> None:
    """Of any notation and in any family; and the reader reads it as content, as it is."""
    text, example = SHAPES[kind]
    shape = Constraint(kind, text, "response_format")
    format_ = replace(FORMATS[name], reasoning=(THINK, BIG_THINK))
    call = CALLS[name]
    for opened, begin in (("", "<think>"), ("", "[THINK]"), ("<think>", ""), ("[THINK]", "")):
        closer = dict(format_.reasoning)[opened or begin]
        for tools in ((), TOOLS, (replace(TOOLS[1], strict=False),)):
            reading = Reading(format_, {tool.name: tool.parameters for tool in tools}, opened, is_shaped=True)
            found = answer_constraint(reading, CallRules(tools), babbler.added, shape)
            assert found is not None
            assert found.field == "response_format"
            # Tags may stand in any text, also in one that begins with the letters of a marker.
            thought = f"{begin}Hm {'' if kind is ConstraintKind.STRUCTURAL_TAG else example}{closer}"
            for answer in (f"{thought}\n\n{example}", f"{thought}{example}", *(() if opened else (example,))):
                assert babbler.takes(found.text, answer), answer
                ids = babbler.tokenizer.encode(answer, add_special_tokens=False).ids
                result = babbler.read(AnswerReader(reading, babbler.special), ids)
                assert (result.content, result.tool_calls) == (example, ())
            assert not tools or babbler.takes(found.text, f"{thought}{call}")
            assert not tools or opened or babbler.takes(found.text, call)
            assert not opened or not babbler.takes(found.text, example)
            if kind is not ConstraintKind.STRUCTURAL_TAG:
                assert not babbler.takes(found.text, f"{thought} no: {example}")
                assert tools or not babbler.takes(found.text, f"{thought}{call}")
            needed = answer_constraint(reading, CallRules(tools, needs_call=True), babbler.added, shape)
            assert needed is not None
            assert not tools or not babbler.takes(needed.text, f"{thought}{example}")
            assert not tools or babbler.takes(needed.text, f"{thought}{call}")


@pytest.mark.parametrize("name", CALLING)
def test_strict_tools_leave_reasoning_free(babbler: Babbler, name: str) -> None:
    """Also where nothing must be called; and thinking of a call makes none."""
    reading = Reading(replace(FORMATS[name], reasoning=(THINK,)), SCHEMAS)
    found = answer_constraint(reading, CallRules(TOOLS), babbler.added)
    assert found is not None
    call = CALLS[name]
    for answer in (f"<think>\nHm.\n</think>\n\n{call}", "<think>Hm.</think>Three ships.", "Three ships.", call):
        assert babbler.takes(found.text, answer), answer
    assert not babbler.takes(found.text, f"<think>Hm.</think>{call.replace('rest', 'dive')}")


def test_nothing_is_demanded_of_a_free_answer() -> None:
    """Without strict tools and limits there is no grammar."""
    reading = Reading(FORMATS["hermes"], SCHEMAS)
    assert answer_constraint(reading, CallRules((OfferedTool("count", COUNT),)), {}) is None
    assert answer_constraint(reading, CallRules(), {}) is None


def test_a_name_that_the_syntax_cannot_write_is_refused() -> None:
    """By the name of the parameter, where the tool is strict; else a call has no such parameter."""
    place = "tools.0.function.parameters"
    odd = OfferedTool("count", {"properties": {"a b": {}, "c": {"type": "boolean"}}}, strict=True, field=place)
    reading = Reading(FORMATS["llama-pythonic"], {})
    with pytest.raises(InvalidRequest, match=rf"{place}.properties.a b is 'a b', but must be an identifier of Python"):
        answer_constraint(reading, CallRules((odd,), needs_call=True), {})
    found = answer_constraint(reading, CallRules((replace(odd, strict=False),), needs_call=True), {})
    assert found is not None
    assert "a b" not in found.text
    assert '"c="' in found.text


def test_errors_about_a_call_name_the_tool() -> None:
    """Where there is one; and never show a grammar that the client has not written."""
    reading = Reading(FORMATS["hermes"], {})
    tools = [OfferedTool("count", COUNT, field="tools.1.function.parameters"), OfferedTool("add", COUNT)]
    one, several = (
        answer_constraint(reading, CallRules(tuple(some), needs_call=True), {}) for some in (tools[:1], tools)
    )
    assert one is not None
    assert several is not None
    refused = [each.refused(ValueError("too much")) for each in (one, several)]
    assert [str(each) for each in refused] == [
        "tools.1.function.parameters is 'count', but must be one that can be enforced: too much",
        "tools is 'count, add', but must be one that can be enforced: too much",
    ]
