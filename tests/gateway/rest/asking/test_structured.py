"""What a body says about the shape of its answer: the constraint that it becomes, or what is wrong with it.

Its own faults are found without a model; whether a constraint can be enforced is found by compiling it.
"""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pydantic import ValidationError
from support.rest.rest_stack import rest_stack

from gateway.rest.asking.chat_body import ChatRequest
from gateway.rest.asking.request import generation_request
from gateway.rest.asking.structured import ANY_OBJECT
from gateway.rest.openai.completions import CompletionRequest
from gateway.rest.validation import error_about
from outrider.constraint import MAX_CHOICES, MAX_GRAMMAR_BYTES, MAX_REGEX_BYTES, Constraint, ConstraintKind
from outrider.errors import OutriderError

JSON = ConstraintKind.JSON_SCHEMA
SCHEMA = {"type": "object", "properties": {"gold": {"type": ["integer", "null"], "default": None}}}
SCHEMA_TEXT = json.dumps(SCHEMA)
TAG: dict[str, Any] = {"structures": [{"begin": "<call>", "schema": SCHEMA, "end": "</call>"}], "triggers": ["<call"]}
SCHEMA_FIELD, WHITESPACE = "response_format.json_schema.schema", "structured_outputs.whitespace_pattern"
MESSAGES = [{"role": "user", "content": "fox"}]


def named(schema: object = SCHEMA, **fields: Any) -> dict[str, Any]:
    """A response_format with a schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "tale", "schema": schema, **fields}}}


def by_vllm(**fields: Any) -> dict[str, Any]:
    """Fields as structured_outputs, in vLLM's names."""
    return {"structured_outputs": fields}


def of_vllm(kind: ConstraintKind, text: str, name: str, whitespace: str = "") -> Constraint:
    """What becomes of one."""
    return Constraint(kind, text, f"structured_outputs.{name}", whitespace, WHITESPACE)


def constraint(model: type[ChatRequest | CompletionRequest], fields: dict[str, Any]) -> Constraint | None:
    """What a body asks for; raises what its client would read."""
    prompt = {"messages": MESSAGES} if model is ChatRequest else {"prompt": "fox"}
    body = {**prompt, **fields}
    try:
        return generation_request(model.model_validate(body), "tales").constraint
    except ValidationError as error:
        raise error_about(error.errors(include_url=False), body) from None


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tales() -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway in front of the small pair."""
    async with rest_stack() as running:
        yield running.http


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint(JSON, ANY_OBJECT, "response_format")),
        (named(), Constraint(JSON, SCHEMA_TEXT, SCHEMA_FIELD, is_lenient=True)),
        (named(strict=None, description="a"), Constraint(JSON, SCHEMA_TEXT, SCHEMA_FIELD, is_lenient=True)),
        (named(strict=True), Constraint(JSON, SCHEMA_TEXT, SCHEMA_FIELD)),
        (named(strict=False), Constraint(JSON, SCHEMA_TEXT, SCHEMA_FIELD, is_lenient=True)),
        (named(schema=True, strict=True), Constraint(JSON, "true", SCHEMA_FIELD)),
        (
            {"response_format": {"type": "structural_tag", **TAG}},
            Constraint(ConstraintKind.STRUCTURAL_TAG, json.dumps(TAG), "response_format"),
        ),
        (by_vllm(json=SCHEMA), of_vllm(JSON, SCHEMA_TEXT, "json")),
        (by_vllm(json=SCHEMA_TEXT), of_vllm(JSON, SCHEMA_TEXT, "json")),
        (by_vllm(json=SCHEMA, whitespace_pattern=" ?"), of_vllm(JSON, SCHEMA_TEXT, "json", " ?")),
        (by_vllm(json_object=True), of_vllm(JSON, ANY_OBJECT, "json_object")),
        (by_vllm(json_object=True, regex=None), of_vllm(JSON, ANY_OBJECT, "json_object")),
        (by_vllm(regex="[a-z]+"), of_vllm(ConstraintKind.REGEX, "[a-z]+", "regex")),
        (by_vllm(choice=["fox", "sea"]), of_vllm(ConstraintKind.CHOICE, '["fox", "sea"]', "choice")),
        (by_vllm(grammar='root ::= "fox"'), of_vllm(ConstraintKind.GBNF, 'root ::= "fox"', "grammar")),
        (by_vllm(structural_tag=TAG), of_vllm(ConstraintKind.STRUCTURAL_TAG, json.dumps(TAG), "structural_tag")),
        (
            by_vllm(structural_tag=json.dumps(TAG)),
            of_vllm(ConstraintKind.STRUCTURAL_TAG, json.dumps(TAG), "structural_tag"),
        ),
        ({**by_vllm(regex="a"), "response_format": {"type": "text"}}, of_vllm(ConstraintKind.REGEX, "a", "regex")),
    ],
)
def test_a_shape_becomes_a_constraint(
    model: type[ChatRequest | CompletionRequest], fields: dict[str, Any], wanted: Constraint | None
) -> None:
    """On both routes; nothing in a schema is lost on the way, not even its nulls."""
    assert constraint(model, fields) == wanted


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type is 'xml', but only 'text', 'json_object', "),
        ({"response_format": {}}, "response_format.type is missing"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is None, but must be present for"),
        ({"response_format": {"type": "text", **TAG}}, "response_format.structures is 'present', but must be absent "),
        (
            {"response_format": {"type": "structural_tag", "structures": []}},
            "response_format.triggers is None, but must be present for the type structural_tag",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name is missing",
        ),
        (named(name="x" * 65), "response_format.json_schema.name is "),
        (named(schema=None), "response_format.json_schema.schema is None, but must be a JSON schema"),
        (named(schema=[]), "response_format.json_schema.schema is [], but must be an object or a valid boolean"),
        (named(strict="yes"), "response_format.json_schema.strict is 'yes', but must be a valid boolean"),
        (named(depth=3), "response_format.json_schema.depth is not a known parameter"),
        (
            {**by_vllm(regex="a"), "response_format": {"type": "json_object"}},
            "structured_outputs is 'present', but must be absent beside a response_format other than text",
        ),
        (by_vllm(), "structured_outputs is 'none of them', but must be exactly one of json, json_object, regex, "),
        (by_vllm(regex="a", choice=["b"]), "structured_outputs is 'regex, choice', but must be exactly one of"),
        (by_vllm(whitespace_pattern=" "), "structured_outputs is 'none of them', but must be exactly one of"),
        (
            by_vllm(regex="a", whitespace_pattern=" "),
            "structured_outputs.whitespace_pattern is ' ', but must be absent without json or json_object",
        ),
        (by_vllm(json=5), "structured_outputs.json is 5, but must be an object or a valid boolean or a valid string"),
        (by_vllm(json_object=False), "structured_outputs.json_object is False, but must be true"),
        (by_vllm(choice="fox"), "structured_outputs.choice is 'fox', but must be a valid list"),
        (by_vllm(choice=["fox", 5]), "structured_outputs.choice.1 is 5, but must be a valid string"),
        (
            by_vllm(choice=["x"] * (MAX_CHOICES + 1)),
            "structured_outputs.choice has 1025 entries, but must have at most",
        ),
        (by_vllm(backend="outlines"), "structured_outputs.backend is not a known parameter"),
        ({"guided_json": SCHEMA}, "guided_json is not a known parameter; use structured_outputs.json"),
        ({"guided_regex": "a"}, "guided_regex is not a known parameter; use structured_outputs.regex"),
        ({"guided_choice": ["a"]}, "guided_choice is not a known parameter; use structured_outputs.choice"),
        ({"guided_grammar": "a"}, "guided_grammar is not a known parameter; use structured_outputs.grammar"),
    ],
)
def test_a_fault_of_the_body_is_named(fields: dict[str, Any], sentence: str) -> None:
    """With its field, its value and its limit; old names with the new ones."""
    with pytest.raises(OutriderError) as refused:
        constraint(ChatRequest, fields)
    assert refused.value.message[: len(sentence)] == sentence
    assert refused.value.status == "INVALID_ARGUMENT"
    assert sentence.startswith(refused.value.metadata["field"])


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        (by_vllm(json="{"), "structured_outputs.json", "must be JSON: "),
        (by_vllm(json="[]"), "structured_outputs.json", "is [], but must be a JSON schema, which is an object"),
        (by_vllm(json=False), "structured_outputs.json", "is False, but must be a JSON schema, which is an object"),
        (by_vllm(json=""), "structured_outputs.json", "is '', but must be not empty"),
        (by_vllm(json='{"a":' * 65 + "1" + "}" * 65), "structured_outputs.json", "is 'nested 65 deep', but must be"),
        (
            by_vllm(regex="a" * (MAX_REGEX_BYTES + 1)),
            "structured_outputs.regex",
            "has 8193 bytes, but must have at most",
        ),
        (
            by_vllm(json_object=True, whitespace_pattern=" " * (MAX_REGEX_BYTES + 1)),
            "structured_outputs.whitespace_pattern",
            "has 8193 bytes, but must have at most 8192",
        ),
        (
            by_vllm(grammar="a" * (MAX_GRAMMAR_BYTES + 1)),
            "structured_outputs.grammar",
            "has 262145 bytes, but must have at most 262144",
        ),
        (named({"const": "x" * MAX_GRAMMAR_BYTES}), SCHEMA_FIELD, "bytes, but must have at most 262144"),
        (by_vllm(choice=[]), "structured_outputs.choice", "is [], but must be a list of strings, none of them empty"),
        (by_vllm(choice=["a", ""]), "structured_outputs.choice", "must be a list of strings, none of them empty"),
        (by_vllm(structural_tag={}), "structured_outputs.structural_tag", "must be an object with structures and trig"),
        (
            {"response_format": {"type": "structural_tag", "structures": [{"begin": "<a>"}], "triggers": ["<a"]}},
            "response_format.structures.0",
            "must be an object with begin, schema and end",
        ),
        (
            {"response_format": {"type": "structural_tag", **TAG, "triggers": ["<b"]}},
            "response_format.structures.0.begin",
            "is '<call>', but must be text that begins with one of the triggers",
        ),
        (
            by_vllm(structural_tag={"structures": [{**TAG["structures"][0], "schema": 5}], "triggers": ["<call"]}),
            "structured_outputs.structural_tag.structures.0.schema",
            "is 5, but must be a JSON schema, which is an object",
        ),
        (named({"not": {"type": "string"}}, strict=True), SCHEMA_FIELD, 'enforced: Unimplemented keys: ["not"]'),
        (
            named(
                {"type": "array", "items": {"type": "array", "uniqueItems": True, "contains": {"const": 1}}},
                strict=True,
            ),
            SCHEMA_FIELD,
            'Unimplemented keys: ["contains", "uniqueItems"]',
        ),
        (
            named({"type": "string", "format": "colour"}, strict=True),
            SCHEMA_FIELD,
            "colour (at format)",
        ),
        (named({"type": "string", "pattern": "(?=a)b"}, strict=True), SCHEMA_FIELD, "look-around, including look-"),
        (named({"type": "string", "minLength": 3, "maxLength": 1}, strict=True), SCHEMA_FIELD, "(at maxLength)"),
        (named({"$ref": "http://example.com/tale"}, strict=True), SCHEMA_FIELD, "does not fetch resources"),
        (named({"$ref": "#/$defs/none"}, strict=True), SCHEMA_FIELD, "Pointer '/$defs/none' does not exist"),
        (named({"type": "tale"}, strict=True), SCHEMA_FIELD, "Invalid type: tale (at type)"),
        (by_vllm(json={"if": {}, "not": {}, "then": {}}), "structured_outputs.json", 'Unimplemented keys: ["not"]'),
        (by_vllm(regex="(fox"), "structured_outputs.regex", "unclosed group"),
        (
            by_vllm(regex="x{200000}"),
            "structured_outputs.regex",
            "takes more than 50,000 steps of the lexer for one token",
        ),
        (by_vllm(grammar="root ::= fox"), "structured_outputs.grammar", "fox"),
        (by_vllm(grammar="start: fox"), "structured_outputs.grammar", 'unknown name: "fox"'),
        (by_vllm(json_object=True, whitespace_pattern="("), WHITESPACE, "is '(', but must be one that can be enforced"),
        ({**by_vllm(regex="a"), "ignore_eos": True}, "ignore_eos", "false with structured_outputs.regex"),
        (
            {**by_vllm(regex="a"), "use_beam_search": True, "n": 2},
            "structured_outputs.regex",
            "is 'present', but must be absent with use_beam_search",
        ),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_cannot_be_enforced_is_a_400(
    tales: httpx.AsyncClient, fields: dict[str, Any], field: str, words: str
) -> None:
    """Before an answer begins; its param is the field, and its sentence the library's."""
    for path, prompt in (("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "fox"})):
        reply = await tales.post(f"/v1/{path}", json={**prompt, "max_tokens": 2, **fields})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (400, field, "invalid_value")
        assert error["message"].startswith(field)
        assert words in error["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_target_without_grammars_refuses_them(http: httpx.AsyncClient) -> None:
    """By the field that asks for one; the tiny services know none."""
    reply = await http.post("/v1/completions", json={"prompt": "fox", **by_vllm(choice=["sea"])})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "structured_outputs.choice")
    assert error["message"].endswith("must be absent: the target serves no grammars")


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        (by_vllm(regex="(fox|sea){2}"), "(fox|sea){2}"),
        (by_vllm(choice=["fox", "sea"]), "fox|sea"),
        (by_vllm(grammar='root ::= "fox" [a-c] "sea"'), "fox[a-c]sea"),
        (by_vllm(grammar='start: "fox" ABC "sea"\nABC: /[a-c]/'), "fox[a-c]sea"),
        (by_vllm(json={"enum": [None, 5, "sea"]}), 'null|5|"sea"'),
        (by_vllm(json={"type": "array", "const": [1, 2]}, whitespace_pattern="_"), r"\[_?1_?,_?2_?\]"),
        (named({"type": "array", "const": []}), r"\[[ \n\t]{0,16}\]"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_has_the_shape_that_was_asked_for(
    tales: httpx.AsyncClient, fields: dict[str, Any], pattern: str
) -> None:
    """Of every kind, and with the white space that was asked for."""
    body = {"prompt": "Once upon a time", "max_tokens": 60, "seed": 1, "n": 3, **fields}
    for choice in (await tales.post("/v1/completions", json=body)).raise_for_status().json()["choices"]:
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, choice["text"])


@pytest.mark.asyncio(loop_scope="module")
async def test_what_a_lenient_schema_loses_is_told(tales: httpx.AsyncClient) -> None:
    """By name, whole and streamed, on both routes; nothing is reported where nothing is lost."""
    schema = {"type": "array", "items": {"enum": ["fox", "sea"]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    loose = {"type": "array", "prefixItems": [{"type": "string", "format": "colour"}, {"not": {}, "const": 1}]}
    lost = [
        (named(schema, strict=False), ["uniqueItems"]),
        (named({**loose, "minItems": 2, "maxItems": 2}, strict=False), ["format colour", "not"]),
        (named({"anyOf": [{"type": "tale"}, {"$ref": "http://example.com/tale"}]}), ["$ref", "type"]),
        (named({"items": {"pattern": "(?=a)b", "minLength": 1}, "maxItems": 2, "required": None}), ["pattern"]),
        (named({"type": "array", "items": {"enum": ["fox"]}}, strict=False), None),
        (by_vllm(regex="a"), None),
        ({}, None),
    ]
    for fields, ignored in lost:
        for path, prompt in (("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "fox"})):
            body = {**prompt, "max_tokens": 4, "seed": 3, **fields}
            whole = (await tales.post(f"/v1/{path}", json=body)).raise_for_status().json()
            assert whole["outrider"].get("ignored_keywords") == ignored
            streamed = await tales.post(f"/v1/{path}", json={**body, "stream": True})
            last = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")][-1]
            assert last["outrider"].get("ignored_keywords") == ignored


@pytest.mark.asyncio(loop_scope="module")
async def test_a_dead_end_is_an_error_of_the_request(tales: httpx.AsyncClient) -> None:
    """Never a silent end: with a status of its own where nothing was sent yet, else as the last event of a stream."""
    banned = ["fox", "f", "fo", "o", "x"]
    body = {"prompt": "Once", "seed": 1, "banned_words": banned, **by_vllm(choice=["fox"])}
    reply = await tales.post("/v1/completions", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (400, "no_token_left", "invalid_request_error")
    assert "structured_outputs.choice, banned_words together leave none" in error["message"]
    # A letter is allowed before the dead end, and then none.
    late = {**body, "banned_words": ["x"], **by_vllm(regex="(The king |The fox )x"), "stream": True}
    streamed = await tales.post("/v1/completions", json=late)
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert streamed.status_code == 200
    assert "".join(each["choices"][0]["text"] for each in events[:-1]) in {"The king ", "The fox "}
    assert events[-1]["error"]["code"] == "no_token_left"
    assert "[DONE]" not in streamed.text
