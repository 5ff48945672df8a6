"""Bodies as an OpenAPI document describes them, with some values and bytes that it does not. Knows no gateway."""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

EDGES: tuple[Any, ...] = (
    *(0, 1, -1, 2, 64, 65, 4096, 2**31 - 1, 2**31, 2**63, -(2**63), 10**30, 0.0, 1.5, 1e-300, 1e300, None, True, False),
    *("", "x", "auto", "none", "\0", "é" * 300, "x" * 5000, "\U0001f9ff" * 50, [], {}, [[]], [None], {"": None}),
    *({"type": "text"}, {"a": {"b": [1]}}),
)
# What no library writes.
PIECES = (b"NaN", b"1e999", b'"\\ud800"', b"9" * 5000, b"[" * 70, b'{"a":1,"a":2}', b"\0", b"\xff", b'"', b"{", b",")
TEXTS = ("fox", "Once", "user", "a|b", "[a-z]+", "", "é\n")
NAMES = ("a", "12", "-1", "x y", "type", "$ref", "é", "__class__", "guided_json")
MAX_DEPTH = 7


class RandomBodies:
    """Bodies of all routes that take one, the same for the same seed."""

    def __init__(self, document: Mapping[str, Any], seed: int) -> None:
        self._chance = random.Random(seed)
        self._schemas = document["components"]["schemas"]
        self._routes = [
            (path, methods["post"]["requestBody"]["content"]["application/json"]["schema"])
            for path, methods in document["paths"].items()
            if "post" in methods
        ]

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        """Paths and bodies without end."""
        chance = self._chance
        while True:
            path, schema = chance.choice(self._routes)
            body = self._value(schema, chance.choice((0.0, 0.01, 0.05, 0.3)), 0)
            if isinstance(body, dict) and chance.random() < 0.99:
                # Long answers would take the time of many bodies.
                body["max_output_tokens" if path.endswith("responses") else "max_tokens"] = 3
            text = json.dumps(body, ensure_ascii=chance.random() < 0.5).encode()
            yield path, changed(chance, text, PIECES) if chance.random() < 0.25 else text

    def _value(self, schema: Mapping[str, Any], spoiled: float, depth: int) -> Any:
        chance = self._chance
        if depth > MAX_DEPTH or chance.random() < spoiled:
            return chance.choice(EDGES)
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        if choices := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
            return self._value(chance.choice(choices), spoiled, depth)
        if "const" in schema or "enum" in schema:
            return chance.choice(schema.get("enum") or [schema["const"]])
        numbers = (schema.get("minimum", 0), schema.get("maximum", 9), 1, 2, 7)
        kinds: dict[str, Callable[[], Any]] = {
            "object": lambda: self._object(schema, spoiled, depth),
            "array": lambda: self._array(schema, spoiled, depth),
            "string": lambda: chance.choice(TEXTS),
            "integer": lambda: chance.choice(numbers),
            "number": lambda: chance.choice((*numbers, 0.5)),
            "boolean": lambda: chance.random() < 0.5,
            "null": lambda: None,
        }
        return kinds.get(schema.get("type", ""), lambda: chance.choice(EDGES))()

    def _array(self, schema: Mapping[str, Any], spoiled: float, depth: int) -> list[Any]:
        least = schema.get("minItems", 0)
        most = min(schema.get("maxItems", 3), 65) if self._chance.random() < 0.05 else least + 2
        count = self._chance.randint(least, max(least, most))
        return [self._value(schema.get("items", {}), spoiled, depth + 1) for _ in range(count)]

    def _object(self, schema: Mapping[str, Any], spoiled: float, depth: int) -> dict[str, Any]:
        chance, share = self._chance, 0.4 if depth else 0.06
        wanted = {
            name: each
            for name, each in schema.get("properties", {}).items()
            if name in schema.get("required", ()) or chance.random() < share
        }
        others = schema.get("additionalProperties", "properties" not in schema)
        if others or chance.random() < 0.03:
            wanted |= dict.fromkeys(chance.choices(NAMES, k=chance.randrange(3)), others if others is not True else {})
        return {name: self._value(each or {}, spoiled, depth + 1) for name, each in wanted.items()}


def changed(chance: random.Random, text: bytes, pieces: Sequence[bytes]) -> bytes:
    """A text in which bytes, or stretches, are others, gone, twice there, or have a piece before them."""
    found = bytearray(text)
    for _ in range(chance.choice((1, 1, 2, 8))):
        place = chance.randrange(len(found) + 1)
        match chance.randrange(4):
            case 0:
                found[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                del found[place : place + chance.choice((1, 3, 20, len(found)))]
            case 2:
                found[place:place] = found[place : place + 50]
            case 3:
                found[place:place] = chance.choice(pieces)
    return bytes(found)
