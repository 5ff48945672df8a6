"""Random JSON schemas of the kind that people write: settings, records, messages of an API, trees that hold themselves.

Every one is made from its number alone. What of it no grammar can enforce is named beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

Schema = dict[str, Any]

NAMES = (
    "name",
    "id",
    "kind",
    "title",
    "age",
    "price",
    "tags",
    "owner",
    "created_at",
    "is_open",
    "parts",
    "next",
    "notes",
)
WORDS = (
    "fox",
    "king",
    "red",
    "green",
    "small",
    "open",
    "closed",
    "sea",
    "gold",
    "Grüße",
    "in progress",
    'a "b"',
    "x/y",
)
FORMATS = ("date", "time", "date-time", "uuid", "email", "ipv4")
PATTERNS = (
    "^[a-z]{2,8}$",
    "^[A-Z]{3}-[0-9]{4}$",
    "^(fox|sea)+$",
    "[0-9]{3}",
    "^#[0-9a-f]{6}$",
    r"^\S+@\w+\.(com|org)$",
)
DRAFT = "https://json-schema.org/draft/2020-12/schema"
# Keywords that say nothing about the shape of an answer by itself, and what cannot be enforced token by token.
UNENFORCED: dict[str, Any] = {
    "uniqueItems": True,
    "contains": {"type": "string"},
    "not": {"type": "null"},
    "if": {"minProperties": 1},
    "propertyNames": {"pattern": "^[a-z]"},
    "dependentRequired": {"name": ["id"]},
}
ODDS_OF_UNENFORCED = 0.08
DEPTH = 3


@dataclass(frozen=True)
class Made:
    """A schema, and those of its keywords that are refused where all of it is to be kept."""

    schema: Schema
    unenforced: frozenset[str]


def make(number: int) -> Made:
    """The schema of a number: an object or, now and then, whatever else JSON has."""
    maker = Maker(Random(f"schema {number}"))
    others = (maker.array, maker.union, maker.shared, maker.any)
    root = maker.object(DEPTH) if number % 5 else maker.random.choice(others)(DEPTH)
    if maker.definitions:
        root = {**root, "$defs": maker.definitions}
    if maker.random.random() < 0.3:
        root = {"$schema": DRAFT, "title": "Made", "description": f"number {number}", **root}
    unenforced = set()
    if maker.random.random() < ODDS_OF_UNENFORCED:
        unenforced = {maker.random.choice([*UNENFORCED])}
        root |= {each: UNENFORCED[each] for each in unenforced}
    return Made(root, frozenset(unenforced))


@dataclass
class Maker:
    """Makes the parts of one schema; `depth` says how deep they may nest."""

    random: Random
    definitions: dict[str, Schema] = field(default_factory=dict)

    def any(self, depth: int) -> Schema:
        """Anything; deep down, what holds nothing else."""
        flat: list[Callable[[], Schema]] = [self.text, self.text, self.integer, self.number, self.boolean, self.choice]
        deep: list[Callable[[int], Schema]] = [self.object, self.object, self.array, self.union, self.both, self.shared]
        if depth <= 0 or self.random.random() < 0.45:
            made = self.random.choice(flat)()
        else:
            made = self.random.choice(deep)(depth - 1)
        if self.random.random() < 0.15 and "$ref" not in made:
            made = {**made, "description": "what it is", "examples": [None]}
        return made

    def text(self) -> Schema:
        """A string with at most one limit of each kind."""
        match self.random.randrange(5):
            case 0:
                return {"type": "string", "pattern": self.random.choice(PATTERNS), **self._seldom({"maxLength": 24})}
            case 1:
                return {"type": "string", "format": self.random.choice(FORMATS), **self._seldom({"maxLength": 40})}
            case 2:
                return {"type": ["string", "null"], "maxLength": self.random.randint(1, 20)}
            case 3:
                least = self.random.randint(0, 6)
                return {"type": "string", "minLength": least, "maxLength": least + self.random.randint(0, 12)}
        return {"type": "string", "maxLength": 30}

    def integer(self) -> Schema:
        """A whole number between two bounds, or beyond one."""
        least = self.random.randint(-2000, 2000)
        most = least + self.random.randint(0, 5000)
        match self.random.randrange(4):
            case 0:
                return {"type": "integer", "minimum": least, **self._seldom({"maximum": most})}
            case 1:
                return {"type": "integer", "exclusiveMinimum": least, "exclusiveMaximum": most + 2}
            case 2:
                return {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": self.random.choice((5, 10, 25))}
        return {"type": "integer", "minimum": least, "maximum": most}

    def number(self) -> Schema:
        """A number between two bounds; some have few digits."""
        least = round(self.random.uniform(-50, 50), self.random.randint(0, 2))
        most = least + self.random.randint(1, 99)
        if self.random.random() < 0.2:
            return {"type": "number", "minimum": least, "maximum": most}
        return {"type": "number", "minimum": 0, "exclusiveMaximum": 100, "multipleOf": self.random.choice((0.01, 0.5))}

    def boolean(self) -> Schema:
        """True or false, or one of them."""
        return self.random.choice(({"type": "boolean"}, {"const": True}, {"type": ["boolean", "null"]}))

    def choice(self) -> Schema:
        """One of a few values, not always of one type."""
        values: list[Any] = self.random.sample(WORDS, self.random.randint(1, 5))
        if self.random.random() < 0.3:
            values += [None, 7, {"a": [1, 2]}]
        return {"const": values[0]} if len(values) == 1 else {"enum": values}

    def array(self, depth: int) -> Schema:
        """A list of few entries, or a tuple."""
        if self.random.random() < 0.25:
            entries = [self.any(depth) for _ in range(self.random.randint(1, 3))]
            return {"type": "array", "prefixItems": entries, "items": False, "minItems": len(entries)}
        least = self.random.choice((0, 0, 1, 2))
        made = {"type": "array", "items": self.any(depth), "maxItems": least + self.random.randint(0, 2)}
        return {**made, "minItems": least} if least else made

    def object(self, depth: int) -> Schema:
        """Named properties, of which some are required, and what else there may be."""
        names = self.random.sample(NAMES, self.random.randint(1, 5))
        made: Schema = {"type": "object", "properties": {name: self.any(depth - 1) for name in names}}
        required = [name for name in names if self.random.random() < 0.7]
        if required or self.random.random() < 0.3:
            made["required"] = required
        match self.random.randrange(6):
            case 0:
                # How many there are can be counted only after those that are there in any case.
                counted = {"required": names, "maxProperties": len(names) + 2}
                made |= {"patternProperties": {"^x-[a-z]{1,4}$": self.text()}, "additionalProperties": False, **counted}
            case 1:
                made |= self._seldom({"additionalProperties": False}, {"additionalProperties": self.integer()})
            case _:
                made |= self._seldom({"additionalProperties": False})
        return made

    def union(self, depth: int) -> Schema:
        """One of several kinds, distinguished by a constant, by type, or not at all."""
        kinds = [self.random.choice(WORDS[:4]) + str(number) for number in range(self.random.randint(2, 3))]
        match self.random.randrange(3):
            case 0:
                return {"oneOf": [self._told_apart(kind, depth) for kind in kinds]}
            case 1:
                return {"anyOf": [self.any(depth), {"type": "null"}]}
        return {"anyOf": [self.any(depth) for _ in kinds]}

    def _told_apart(self, kind: str, depth: int) -> Schema:
        properties = {"type": {"const": kind}, self.random.choice(NAMES): self.any(depth)}
        return {"type": "object", "properties": properties, "required": ["type"], "additionalProperties": False}

    def both(self, _depth: int) -> Schema:
        """Two schemas that hold together."""
        parts = [{"required": ["id"]}, {"properties": {"name": {"minLength": 1}}, "required": ["name"]}]
        properties = {"id": self.integer(), "name": self.text()}
        return {"type": "object", "properties": properties, "additionalProperties": False, "allOf": parts}

    def _seldom(self, usual: Schema, other: Schema | None = None) -> Schema:
        """A limit, now and then left out: without it the model of the tests hardly comes to an end."""
        return usual if self.random.random() < 0.93 else other or {}

    def shared(self, depth: int) -> Schema:
        """A definition by its name: one that is there already, or a new one, which may hold itself."""
        if not self.definitions or self.random.random() < 0.5:
            name = f"part{len(self.definitions)}"
            # A schema that refers to it meanwhile finds its name.
            self.definitions[name] = {}
            itself = {"$ref": f"#/$defs/{name}"}
            inner = self.object(depth)
            inner.pop("maxProperties", None)
            match self.random.randrange(3):
                case 0:
                    inner["properties"]["next"] = {"anyOf": [{"type": "null"}, itself]}
                case 1:
                    inner["properties"]["parts"] = {"type": "array", "items": itself, "maxItems": 2}
                    inner["required"] = [each for each in inner.get("required", ()) if each != "parts"]
            self.definitions[name] = inner
        return {"$ref": f"#/$defs/{self.random.choice([*self.definitions])}"}
