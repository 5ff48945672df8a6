"""What an answer has to look like, as a request states it: text alone, which `outrider.grammar` compiles."""

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple, Self

from outrider.errors import InvalidRequest

MAX_GRAMMAR_BYTES = 256 << 10
# Of the text of a schema, whose annotations do not count for its size.
MAX_SCHEMA_TEXT_BYTES = 4 * MAX_GRAMMAR_BYTES
MAX_REGEX_BYTES = 8 << 10
MAX_CHOICES = 1024
MAX_DEPTH = 64
# A model that may write any amount of white space between two tokens of JSON often writes nothing else.
WHITESPACE = r"[ \n\t]{1,16}"


class ConstraintKind(StrEnum):
    """Notation of a constraint."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"
    GBNF = "gbnf"
    STRUCTURAL_TAG = "structural_tag"
    LLGUIDANCE = "llguidance"
    """The library's own, which is canonical."""


class StructuralTag(NamedTuple):
    """Stretch of an otherwise free text: what triggers it, how it begins and ends, and a schema of the JSON between."""

    trigger: str
    begin: str
    schema: dict[str, Any]
    end: str


@dataclass(frozen=True, slots=True)
class Constraint:
    """Form that an answer must have; of a choice the text is a JSON list of strings."""

    kind: ConstraintKind
    text: str
    field: str = "constraint"
    """Field of the request that errors are about."""
    whitespace: str = ""
    """Regular expression of what may stand between two tokens of JSON; by default WHITESPACE."""
    whitespace_field: str = "constraint.whitespace"
    is_lenient: bool = False
    """Whether keywords of a schema that cannot be enforced are left out; else they are an error."""
    written: str = ""
    """Text for errors, where that of the constraint is none of the client's."""
    unkept: tuple[str, ...] = ()
    """Keywords of lenient schemas that were left out, because they cannot be enforced."""

    def refused(self, error: Exception) -> InvalidRequest:
        """The error about what cannot be compiled, or followed to the end."""
        return InvalidRequest(self.field, self.written or self.text, f"one that can be enforced: {error}")

    def check_len(self) -> None:
        """Raises InvalidRequest about a text that is empty or too long."""
        limit = MAX_REGEX_BYTES if self.kind is ConstraintKind.REGEX else MAX_GRAMMAR_BYTES
        num_bytes = len(self.text.encode())
        if num_bytes > limit:
            raise InvalidRequest.too_many(self.field, num_bytes, limit, "bytes")
        if not self.text:
            raise InvalidRequest(self.field, self.text, "not empty")

    @property
    def value(self) -> Any:  # noqa: ANN401 - whatever the text says
        """Value of the text as JSON; raises InvalidRequest about other text, and about a list that is nested too deep.

        Of an object, annotations may be.
        """
        num_bytes = len(self.text.encode())
        if num_bytes > MAX_SCHEMA_TEXT_BYTES:
            raise InvalidRequest.too_many(self.field, num_bytes, MAX_SCHEMA_TEXT_BYTES, "bytes")
        if not self.text:
            raise InvalidRequest(self.field, self.text, "not empty")
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(self.field, self.text, f"JSON: {error}") from None
        if not isinstance(value, dict):
            self._check_depth(value)
        return value

    @property
    def schema(self) -> dict[str, Any]:
        """The schema, of which true is the same as an empty one; raises InvalidRequest about anything else."""
        schema = self.value
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise InvalidRequest(self.field, schema, "a JSON schema, which is an object")
        return schema

    def with_schema(self, schema: dict[str, Any]) -> Self:
        """The constraint with another schema; raises InvalidRequest about one that is nested too deep."""
        self._check_depth(schema)
        return replace(self, text=json.dumps(schema), written=self.written or self.text)

    def _check_depth(self, value: object) -> None:
        """Raises InvalidRequest about lists and objects that are nested too deep."""
        depth, level = 0, [value]
        while level := [each for each in level if isinstance(each, dict | list)]:
            depth += 1
            level = [child for each in level for child in (each.values() if isinstance(each, dict) else each)]
        if depth > MAX_DEPTH:
            raise InvalidRequest(self.field, f"nested {depth} deep", f"nested at most {MAX_DEPTH} deep")

    @property
    def choices(self) -> list[str]:
        """Strings of a choice; raises InvalidRequest about anything else."""
        choices = self.value
        if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
            raise InvalidRequest(self.field, choices, "a list of strings, none of them empty")
        if len(choices) > MAX_CHOICES:
            raise InvalidRequest.too_many(self.field, len(choices), MAX_CHOICES, "strings")
        return choices

    @property
    def tags(self) -> list[StructuralTag]:
        """Structural tags as vLLM and SGLang write them: structures of begin, schema and end, and triggers.

        Raises InvalidRequest about anything else.
        """
        tags = self.value
        structures, triggers = (
            (tags.get("structures"), tags.get("triggers")) if isinstance(tags, dict) else (None, None)
        )
        if not isinstance(structures, list) or not isinstance(triggers, list) or not structures or not triggers:
            raise InvalidRequest(self.field, tags, "an object with structures and triggers, neither of them empty")
        found = []
        for number, each in enumerate(structures):
            field = f"{self.field}.structures.{number}"
            if not isinstance(each, dict) or not {"begin", "schema", "end"} >= each.keys() >= {"begin", "end"}:
                raise InvalidRequest(field, each, "an object with begin, schema and end")
            begin, end, schema = each["begin"], each["end"], each.get("schema", {})
            trigger = next(
                (one for one in triggers if isinstance(one, str) and one and str(begin).startswith(one)), None
            )
            if trigger is None or not isinstance(begin, str) or not isinstance(end, str):
                raise InvalidRequest(f"{field}.begin", begin, "text that begins with one of the triggers")
            if not isinstance(schema, dict):
                raise InvalidRequest(f"{field}.schema", schema, "a JSON schema, which is an object")
            found.append(StructuralTag(trigger, begin, schema, end))
        return found
