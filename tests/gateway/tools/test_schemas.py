"""Schemas in plain words, and how much of one is kept where not all of it can be enforced."""

import sys
from typing import Any

import jsonschema_rs
import pytest

from gateway.tools.schemas import MAX_DEPTH, FaultSearch, at, moved, plain, size_of

TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
# Each with values that tell it from its neighbours.
SAME: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"propertyNames": {"type": "string"}, "type": "object"}, {"type": "object"}),
    ({"propertyNames": True}, {}),
    (
        {"propertyNames": {"enum": ["a", 3]}, "additionalProperties": WHOLE},
        {"properties": {"a": WHOLE}, "additionalProperties": False},
    ),
    (
        {"propertyNames": {"const": "a"}, "properties": {"b": TEXT, "a": TEXT}},
        {"properties": {"a": TEXT}, "additionalProperties": False},
    ),
    (
        {"propertyNames": {"pattern": "^a"}, "additionalProperties": WHOLE},
        {"patternProperties": {"^a": WHOLE}, "additionalProperties": False},
    ),
    (
        {"propertyNames": {"type": "string", "minLength": 1, "maxLength": 2}},
        {"patternProperties": {"^(?s:.){1,2}$": True}, "additionalProperties": False},
    ),
    ({"uniqueItems": False, "contains": {}, "minContains": 0}, {}),
    ({"contains": True, "minItems": 1, "minContains": 2, "maxContains": 3}, {"minItems": 2, "maxItems": 3}),
    ({"items": [TEXT], "additionalItems": False}, {"prefixItems": [TEXT], "items": False}),
    ({"prefixItems": [TEXT], "unevaluatedItems": False}, {"prefixItems": [TEXT], "items": False}),
    ({"not": False, "dependentRequired": {}, "dependentSchemas": {"a": True}}, {}),
    ({"if": TEXT}, {}),
    ({"then": TEXT, "else": WHOLE}, {}),
    ({"if": True, "then": TEXT, "else": WHOLE}, {"allOf": [TEXT]}),
    ({"if": False, "then": TEXT, "else": WHOLE}, {"allOf": [WHOLE]}),
    ({"oneOf": [TEXT]}, {"anyOf": [TEXT]}),
    (
        {"properties": {"a": TEXT}, "unevaluatedProperties": False},
        {"properties": {"a": TEXT}, "additionalProperties": False},
    ),
    ({"unevaluatedProperties": True}, {}),
    ({"minLength": 2.0, "minItems": 0, "minProperties": 0}, {"minLength": 2}),
    ({"required": ["a"], "minProperties": 1}, {"required": ["a"]}),
    (
        {"properties": {"a": TEXT}, "additionalProperties": False, "maxProperties": 1},
        {"properties": {"a": TEXT}, "additionalProperties": False},
    ),
    ({"minimum": -sys.float_info.max, "maximum": 3}, {"maximum": 3}),
    ({"type": "integer", "format": "int64", "multipleOf": 1}, WHOLE),
)
VALUES: tuple[Any, ...] = (
    *({}, {"a": 1}, {"a": "x"}, {"b": "x"}, {"b": 1}, {"a": "x", "b": 1}, {"abc": 1}, {"": 0}, {"a": 1, "ab": 2}),
    *([], ["x"], [1], ["x", 1], ["x", "x"], [1, 2, 3], [1, 2, 3, 4], "", "x", "xy", 3, 4, -1, 2.5, None, True),
)


@pytest.mark.parametrize(("schema", "wanted"), SAME)
def test_other_words_for_the_same_are_known_ones(schema: dict[str, Any], wanted: dict[str, Any]) -> None:
    """A second validator takes the same values by both."""
    assert plain(schema) == wanted
    before, after = jsonschema_rs.validator_for(_newest(schema)), jsonschema_rs.validator_for(wanted)
    for value in VALUES:
        assert before.is_valid(value) == after.is_valid(value), value


def _newest(schema: dict[str, Any]) -> dict[str, Any]:
    """Of an older dialect where its words are."""
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema} if "additionalItems" in schema else schema


def test_bounds_of_the_oldest_dialect_are_numbers() -> None:
    """Where a boolean says whether a bound itself is left out."""
    assert plain({"minimum": 3, "exclusiveMinimum": True, "maximum": 9, "exclusiveMaximum": False}) == {
        "exclusiveMinimum": 3,
        "maximum": 9,
    }


def test_annotations_are_left_out_and_properties_with_their_names_are_not() -> None:
    """At any depth; values are never looked into."""
    noted = {"title": "A", "description": "x" * 999, "examples": [1], "default": None, "$schema": "urn:none"}
    schema = {**noted, "properties": {"title": {**noted, **TEXT}, "default": {"const": {"title": 1}}}}
    assert plain(schema) == {"properties": {"title": TEXT, "default": {"const": {"title": 1}}}}
    assert size_of(plain(schema)) < 100


@pytest.mark.parametrize("nonsense", [None, 3, "x", [], [3], {"a": 3}, True])
def test_nonsense_stays_as_it_is(nonsense: Any) -> None:
    """Whatever a client wrote, nothing is raised."""
    words = (
        "properties",
        "items",
        "anyOf",
        "if",
        "contains",
        "propertyNames",
        "required",
        "minItems",
        "maximum",
        "type",
    )
    for word in (*words, "unevaluatedItems", "unevaluatedProperties", "dependentRequired", "additionalItems", "oneOf"):
        plain({word: nonsense})
        plain({"properties": {"a": {word: nonsense}}, "minProperties": 1, "additionalProperties": False})
    deep: dict[str, Any] = {}
    for _ in range(4 * MAX_DEPTH):
        deep = {"items": deep, "title": "x"}
    assert plain(deep)["items"]


def test_references_follow_a_schema_that_moves() -> None:
    """Within values they are values."""
    schema = {"properties": {"a": {"$ref": "#/$defs/b"}, "c": {"const": {"$ref": "#"}}}, "items": [{"$ref": "#"}]}
    assert moved(schema, "/x") == {
        "properties": {"a": {"$ref": "#/x/$defs/b"}, "c": {"const": {"$ref": "#"}}},
        "items": [{"$ref": "#/x"}],
    }


@pytest.mark.asyncio
async def test_only_what_is_at_fault_is_left_out() -> None:
    """Whatever it is; and what is then left can be enforced."""
    schema: dict[str, Any] = {
        "type": "object",
        "required": None,
        "properties": {
            "a": {"type": "string", "pattern": "bad"},
            "b": {"type": "array", "items": {"anyOf": [{"type": "bad"}, None, WHOLE]}},
            "c": None,
        },
        "$defs": {"d": {"enum": "bad", "type": "string"}},
    }

    async def fault(tried: dict[str, Any]) -> str | None:
        text = str(tried)
        return "it is bad" if "bad" in text or "None" in text else None

    kept, faults = await FaultSearch(100).enforceable(schema, fault)
    assert kept == {
        "type": "object",
        "properties": {"a": TEXT, "b": {"type": "array", "items": {"anyOf": [{}, WHOLE]}}},
        "$defs": {"d": TEXT},
    }
    assert len(faults) == 6
    assert [at(schema, place) for place, _ in faults] == [None, "bad", "bad", None, None, "bad"]
    kept, faults = await FaultSearch(100).enforceable(schema, fault, first_only=True)
    assert faults == [(("required",), "it is bad")]
    kept, faults = await FaultSearch(3).enforceable(schema, fault)
    assert await fault(kept) is None
    assert faults[-1][1] == "too much of it is at fault"
