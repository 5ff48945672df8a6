"""What a JSON schema says about an answer, in the words that the grammar library knows, and how much of it can be kept.

A schema is first put into plain words: annotations go, and what says the same in other words is written in those that
are known. What cannot be enforced then is found keyword by keyword, by trying.
"""

import json
import re
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from outrider.constraint import MAX_DEPTH

Schema: TypeAlias = dict[str, Any]
Place: TypeAlias = tuple[str | int, ...]
"""Keys and numbers on the way to a part of a schema."""

# Keywords whose value is a schema, a list of schemas, or schemas by name.
ONE = frozenset(("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"))
ONE |= {"propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
DEFINITIONS = frozenset(("$defs", "definitions"))
NAMED = frozenset((*DEFINITIONS, "properties", "patternProperties", "dependentSchemas", "dependencies"))
# They say nothing about an answer; a dialect is named by its words.
ANNOTATIONS = frozenset(("$comment", "$schema", "default", "deprecated", "description", "example", "examples"))
ANNOTATIONS |= {"readOnly", "title", "writeOnly"}
COUNTS = ("maxItems", "maxLength", "maxProperties", "minContains", "minItems", "minLength", "minProperties")
# What decides which properties or entries are looked at by the words next to it.
APPLICATORS = frozenset(("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "not", "contains"))
LARGEST = sys.float_info.max
ANY: tuple[Any, ...] = (True, {})


def plain(schema: Any, depth: int = 0) -> Any:  # noqa: ANN401 - clients write anything into schemas
    """A schema that allows the same, without annotations and in known words; what is no schema stays as it is.

    So does what is nested deeper than any schema may be.
    """
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return schema
    found: Schema = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            found[key] = {name: plain(each, depth + 1) for name, each in value.items()}
        elif key in LISTS and isinstance(value, list):
            found[key] = [plain(each, depth + 1) for each in value]
        elif key in ONE:
            found[key] = plain(value, depth + 1)
        elif key not in ANNOTATIONS:
            found[key] = value
    for rewrite in (_numbers, _entries, _conditions, _names, _properties):
        rewrite(found)
    return found


def _numbers(schema: Schema) -> None:
    """Counts as whole numbers; without bounds that hold for every number, and with the bounds of older dialects."""
    for name in (*COUNTS, "maxContains"):
        value = schema.get(name)
        if isinstance(value, float) and value.is_integer():
            schema[name] = int(value)
        if name.startswith("min") and name != "minContains" and value == 0:
            del schema[name]
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if schema.get(exclusive) is True and bound in schema:
            schema[exclusive] = schema.pop(bound)
        elif isinstance(schema.get(exclusive), bool):
            del schema[exclusive]
        sign = 1 if bound == "maximum" else -1
        for name in (bound, exclusive):
            value = schema.get(name)
            if isinstance(value, int | float) and sign * value >= LARGEST:
                del schema[name]
    kinds = schema.get("type")
    if kinds in ("integer", "number", "boolean", "null"):
        # Of a number it says how programs keep it.
        schema.pop("format", None)
    if kinds == "integer" and schema.get("multipleOf") == 1:
        del schema["multipleOf"]


def _entries(schema: Schema) -> None:
    """Lists: entries one by one in the words of the newest dialect, and how many of them there must be."""
    if isinstance(schema.get("items"), list) and "prefixItems" not in schema:
        schema["prefixItems"] = schema.pop("items")
        if "additionalItems" in schema:
            schema["items"] = schema["additionalItems"]
    schema.pop("additionalItems", None)
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    least, most = schema.get("minContains", 1), schema.get("maxContains")
    contains = schema.get("contains")
    if "contains" not in schema or (least == 0 and most is None):
        contains = None
    elif contains in ANY and isinstance(least, int) and isinstance(most, int | None):
        schema["minItems"] = max(least, _whole(schema.get("minItems"), 0))
        if most is not None:
            schema["maxItems"] = min(most, _whole(schema.get("maxItems"), most))
        contains = None
    if contains is None:
        for name in ("contains", "minContains", "maxContains"):
            schema.pop(name, None)
    if "unevaluatedItems" in schema and (
        schema["unevaluatedItems"] in ANY or not APPLICATORS.intersection(schema) or "items" in schema
    ):
        value = schema.pop("unevaluatedItems")
        if value not in ANY:
            schema.setdefault("items", value)


def _whole(value: object, other: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else other


def _conditions(schema: Schema) -> None:
    """Without what is always so, and with the one case that counts of a condition on nothing."""
    if schema.get("not") is False:
        del schema["not"]
    for name in ("allOf", "anyOf", "oneOf"):
        if name == "allOf" and schema.get(name) == []:
            del schema[name]
        if name == "oneOf" and isinstance(schema.get(name), list) and len(schema[name]) == 1 and "anyOf" not in schema:
            schema["anyOf"] = schema.pop(name)
    condition = schema.get("if")
    branches = [schema.get(name, True) for name in ("then", "else")]
    if "if" not in schema or all(each in ANY for each in branches) or isinstance(condition, bool) or condition == {}:
        holds = condition is True or condition == {}
        branch = branches[0] if holds else branches[1] if condition is False else True
        for name in ("if", "then", "else"):
            schema.pop(name, None)
        if branch not in ANY and isinstance(schema.get("allOf", []), list):
            schema["allOf"] = [*schema.get("allOf", ()), branch]
    for name in ("dependentRequired", "dependentSchemas", "dependencies"):
        wanted = schema.get(name)
        if isinstance(wanted, dict) and all(each in (*ANY, []) for each in wanted.values()):
            del schema[name]


def _names(schema: Schema) -> None:
    """Names of properties by `properties` and `patternProperties`, where a schema of names says no more than these."""
    names = schema.get("propertyNames")
    if names in ANY:
        schema.pop("propertyNames", None)
        return
    if not isinstance(names, dict):
        return
    wanted = {key: value for key, value in names.items() if (key, value) != ("type", "string")}
    others = schema.get("additionalProperties", True)
    listed = schema.get("properties", {})
    if not wanted:
        del schema["propertyNames"]
    elif "patternProperties" in schema or not isinstance(listed, dict):
        return
    elif wanted.keys() == {"enum"} or wanted.keys() == {"const"}:
        known = wanted.get("enum", [wanted.get("const")])
        if isinstance(known, list):
            strings = [each for each in known if isinstance(each, str)]
            schema["properties"] = {name: listed.get(name, others) for name in strings}
            schema["additionalProperties"] = False
            del schema["propertyNames"]
    elif not listed and (pattern := _pattern_of(wanted)) is not None:
        schema["patternProperties"], schema["additionalProperties"] = {pattern: others}, False
        del schema["propertyNames"]


def _pattern_of(names: Mapping[str, Any]) -> str | None:
    """The pattern of names that a pattern alone or their length describes."""
    if names.keys() == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"]
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if names.keys() <= {"minLength", "maxLength"} and isinstance(least, int) and isinstance(most, int | str):
        return f"^(?s:.){{{least},{most}}}$"
    return None


def _properties(schema: Schema) -> None:
    """Objects: which properties there may be, and how many, by simpler words."""
    listed, required = schema.get("properties", {}), schema.get("required", [])
    if "unevaluatedProperties" in schema and (
        schema["unevaluatedProperties"] in ANY
        or not APPLICATORS.intersection(schema)
        or "additionalProperties" in schema
    ):
        value = schema.pop("unevaluatedProperties")
        if value not in ANY:
            schema.setdefault("additionalProperties", value)
    if isinstance(required, list) and _whole(schema.get("minProperties"), len(required) + 1) <= len(
        {*map(str, required)}
    ):
        del schema["minProperties"]
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if is_closed and isinstance(listed, dict) and _whole(schema.get("maxProperties"), -1) >= len(listed):
        del schema["maxProperties"]


def moved(schema: Any, prefix: str) -> Any:  # noqa: ANN401 - clients write anything into schemas
    """A schema that stands elsewhere in another one: its references to parts of itself begin with a pointer."""
    if isinstance(schema, list):
        return [moved(each, prefix) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: value if key in ("const", "enum") else moved(value, prefix) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and re.match(r"#(/|$)", reference):
        found["$ref"] = f"#{prefix}{reference[1:]}"
    return found


def _places(schema: Any, place: Place = ()) -> Iterator[Place]:  # noqa: ANN401
    """Every keyword of a schema and of those within it, each before those within it; and what stands for a schema and
    is none. Definitions themselves are always kept, whatever is left of them.
    """
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        here = (*place, key)
        if key not in DEFINITIONS:
            yield here
        for name, each in _parts(key, value):
            inner = here if name is None else (*here, name)
            if name is not None and not isinstance(each, dict):
                yield inner
            yield from _places(each, inner)


def _parts(key: str, value: Any) -> Iterator[tuple[str | int | None, Any]]:  # noqa: ANN401
    """The schemas that the value of a keyword has, with their names or numbers in it."""
    if key in NAMED and isinstance(value, dict):
        yield from value.items()
    elif key in LISTS and isinstance(value, list):
        yield from enumerate(value)
    elif key in ONE and isinstance(value, dict):
        yield None, value


def _kept(schema: Any, places: set[Place], place: Place = ()) -> Any:  # noqa: ANN401
    """A schema with no keywords but those at these places."""
    if not isinstance(schema, dict):
        return schema
    found: Schema = {}
    for key, value in schema.items():
        here = (*place, key)
        if here not in places and key not in DEFINITIONS:
            continue
        if key in NAMED and isinstance(value, dict):
            inner = {name: (each, (*here, name)) for name, each in value.items()}
            found[key] = {
                name: _kept(each, places, within)
                for name, (each, within) in inner.items()
                if isinstance(each, dict) or within in places
            }
        elif key in LISTS and isinstance(value, list):
            numbered = [(each, (*here, number)) for number, each in enumerate(value)]
            found[key] = [
                _kept(each, places, within) for each, within in numbered if isinstance(each, dict) or within in places
            ]
        else:
            found[key] = _kept(value, places, here) if key in ONE else value
    return found


def at(schema: Any, place: Place) -> Any:  # noqa: ANN401
    """The part of a schema at a place."""
    for step in place:
        schema = schema[step]
    return schema


@dataclass(slots=True)
class FaultSearch:
    """Search for as much of schemas as can be enforced. `fault` says what is wrong with one, None for nothing.

    All schemas together are tried `tries` times; when these are used up, what is left is not kept.
    """

    tries: int

    async def enforceable(
        self, schema: Schema, fault: Callable[[Schema], Awaitable[str | None]], *, first_only: bool = False
    ) -> tuple[Schema, list[tuple[Place, str]]]:
        """The schema without what cannot be enforced, and the places of that, each with a reason.

        Of two keywords that do not go together the earlier one is kept. With first_only nothing after the first fault
        is looked at.
        """
        kept: set[Place] = set()
        faults: list[tuple[Place, str]] = []
        waiting: list[Sequence[Place]] = [list(_places(schema))]
        while waiting and not (faults and first_only):
            places = waiting.pop()
            if not places:
                continue
            self.tries -= 1
            reason = await fault(_kept(schema, kept.union(places))) if self.tries >= 0 else "too much of it is at fault"
            if reason is None:
                kept.update(places)
            elif len(places) == 1 or self.tries < 0:
                faults.append((places[0], reason))
            else:
                half = len(places) // 2
                waiting += [places[half:], places[:half]]
        return _kept(schema, kept), faults


def size_of(schema: object) -> int:
    """Bytes of a schema as text."""
    return len(json.dumps(schema).encode())
