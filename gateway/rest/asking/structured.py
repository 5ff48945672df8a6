"""`response_format` and `structured_outputs` of a body: OpenAI's and vLLM's ways to say what an answer looks like."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from outrider.constraint import MAX_CHOICES, Constraint, ConstraintKind
from outrider.errors import InvalidRequest
from outrider.parameters import Parameters

ANY_OBJECT = '{"type": "object"}'
WHITESPACE_FIELD = "structured_outputs.whitespace_pattern"


class JsonSchemaFormat(Parameters):
    """A schema and its name. Unless `strict` is true, what cannot be enforced is left out; else it is an error."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    strict: bool | None = None
    # The name of the field would hide a method of pydantic's.
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None


class ResponseFormat(Parameters):
    """How the answer is shaped: free text, a JSON object, JSON by a schema, or calls within free text."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(Parameters):
    """vLLM's form: exactly one of the first six. `grammar` is Lark or GBNF."""

    json_: Annotated[dict[str, Any] | bool | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str] | None, Field(max_length=MAX_CHOICES)] = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: str | None = None


def constraint_of(structured: StructuredOutputs | None, response_format: ResponseFormat | None) -> Constraint | None:
    """Constraint that a body asks for; raises InvalidRequest about fields that do not go together."""
    wanted = None if response_format is None else _of_format(response_format)
    if structured is None:
        return wanted
    if wanted is not None:
        raise InvalidRequest("structured_outputs", "present", "absent beside a response_format other than text")
    present = structured.model_dump(by_alias=True, exclude_none=True)
    whitespace = present.pop("whitespace_pattern", "")
    if len(present) != 1:
        limit = "exactly one of json, json_object, regex, choice, grammar and structural_tag"
        raise InvalidRequest("structured_outputs", ", ".join(present) or "none of them", limit)
    [(name, value)] = present.items()
    field = f"structured_outputs.{name}"
    if whitespace and not name.startswith("json"):
        raise InvalidRequest(WHITESPACE_FIELD, whitespace, "absent without json or json_object")
    if name == "json_object":
        if value is False:
            raise InvalidRequest(field, value, "true")
        return Constraint(ConstraintKind.JSON_SCHEMA, ANY_OBJECT, field, whitespace, WHITESPACE_FIELD)
    kind = {"json": ConstraintKind.JSON_SCHEMA, "grammar": ConstraintKind.GBNF}.get(name) or ConstraintKind(name)
    return Constraint(kind, value if isinstance(value, str) else json.dumps(value), field, whitespace, WHITESPACE_FIELD)


def _of_format(given: ResponseFormat) -> Constraint | None:
    for name, kind in (
        ("json_schema", "json_schema"),
        ("structures", "structural_tag"),
        ("triggers", "structural_tag"),
    ):
        is_given, is_wanted = getattr(given, name) is not None, given.type == kind
        if is_given != is_wanted:
            limit = f"{'present' if is_wanted else 'absent'} for the type {given.type}"
            raise InvalidRequest(f"response_format.{name}", "present" if is_given else None, limit)
    match given.type:
        case "json_object":
            return Constraint(ConstraintKind.JSON_SCHEMA, ANY_OBJECT, "response_format")
        case "structural_tag":
            text = json.dumps({"structures": given.structures, "triggers": given.triggers})
            return Constraint(ConstraintKind.STRUCTURAL_TAG, text, "response_format")
    if given.json_schema is None:
        return None
    schema, field = given.json_schema.schema_, "response_format.json_schema.schema"
    if schema is None:
        raise InvalidRequest(field, None, "a JSON schema")
    is_lenient = not given.json_schema.strict
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema), field, is_lenient=is_lenient)
