"""Values of arguments that are not written in JSON: text that a schema casts, and Python's literals.

A small reader of its own takes the latter, because nothing that a model says may be evaluated.
"""

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

MAX_REFERENCES = 8
MAX_DEPTH = 64
KINDS: Mapping[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number", "integer"),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
WORDS: Mapping[str, object] = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
TOKEN = re.compile(
    r"""\s*(?:(?P<string>[rbuf]?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"))"""
    r"""|(?P<number>[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)"""
    r"""|(?P<word>[A-Za-z_][\w./-]*)|(?P<mark>[\[\](){},:=]))""",
    re.DOTALL,
)
ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "b": "\b", "f": "\f", "/": "/", "\n": ""}


def cast(text: str, schema: Mapping[str, Any], name: str) -> str:
    """A parameter's text as JSON, of the kind that the tool's schema gives it; text where it says nothing.

    Numbers, objects and lists in JSON stay as they are spelled.
    """
    properties = schema.get("properties")
    declared = properties.get(name) if isinstance(properties, Mapping) else None
    kinds = set(kinds_of(declared, schema)) if isinstance(declared, Mapping) else {"string"}
    literal = text.strip()
    if kinds != {"string"} and literal:
        spelled = _literal(literal)
        if spelled is not None and (not kinds or kinds.intersection(KINDS[type(spelled[1])])):
            return spelled[0]
    return json.dumps(text, ensure_ascii=False)


def _literal(text: str) -> tuple[str, object] | None:
    """The value of a literal and how it is spelled in JSON; None of what is none."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    else:
        return text, value
    try:
        value = PythonReader(text).value()
        return json.dumps(value, ensure_ascii=False, allow_nan=False), value
    except ValueError:
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not in JSON")


def kinds_of(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    """The kinds of values that a schema takes, as far as it says so in the usual ways."""
    if depth > MAX_REFERENCES:
        return
    kinds = schema.get("type")
    yield from (each for each in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(each, str))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found: Any = root
        for part in reference[2:].split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        if isinstance(found, Mapping):
            yield from kinds_of(found, root, depth + 1)
    for word in ("anyOf", "oneOf", "allOf"):
        for each in _list(schema.get(word)):
            if isinstance(each, Mapping):
                yield from kinds_of(each, root, depth + 1)
    for value in [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else ())]:
        yield KINDS[type(value)][0]


def _list(value: object) -> list[Any]:
    """The entries of a list; clients write anything into schemas."""
    return value if isinstance(value, list) else []


class PythonReader:
    """Reads a literal, or a list of calls with literals; every method raises ValueError about anything else."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._place = 0

    def value(self) -> object:
        """The one value of the text."""
        value = self._value()
        self._expect("end", "")
        return value

    def calls(self) -> list[tuple[str, dict[str, object]]]:
        """The calls of a list, each with its arguments by name."""
        self._expect("mark", "[")
        calls: list[tuple[str, dict[str, object]]] = []
        while not self._takes("]"):
            name = self._expect("word")
            self._expect("mark", "(")
            arguments: dict[str, object] = {}
            while not self._takes(")"):
                key = self._expect("word")
                self._expect("mark", "=")
                if key in arguments:
                    raise ValueError(f"{key} is there twice")
                arguments[key] = self._value()
                self._separate(")")
            calls.append((name, arguments))
            self._separate("]")
        self._expect("end", "")
        return calls

    def _value(self, depth: int = 0) -> object:
        kind, text = self._next()
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        match kind, text:
            case "string", _:
                parts = [text]
                while self._peek()[0] == "string":
                    parts.append(self._next()[1])
                return "".join(map(_unquoted, parts))
            case "number", _:
                return _number(text)
            case "word", _ if text in WORDS:
                return WORDS[text]
            case "mark", "[" | "(":
                return self._list("]" if text == "[" else ")", depth)
            case "mark", "{":
                return self._dict(depth)
        raise ValueError(f"{text!r} is no value")

    def _list(self, closer: str, depth: int) -> list[object]:
        values = []
        while not self._takes(closer):
            values.append(self._value(depth + 1))
            self._separate(closer)
        return values

    def _dict(self, depth: int) -> dict[str, object]:
        members: dict[str, object] = {}
        while not self._takes("}"):
            key = self._value(depth + 1)
            self._expect("mark", ":")
            if not isinstance(key, str) or key in members:
                raise ValueError(f"{key!r} is no key, or is there twice")
            members[key] = self._value(depth + 1)
            self._separate("}")
        return members

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._place]

    def _next(self) -> tuple[str, str]:
        token = self._tokens[self._place]
        # The end stays the end.
        self._place += token[0] != "end"
        return token

    def _expect(self, kind: str, text: str | None = None) -> str:
        found = self._next()
        if found[0] != kind or (text is not None and found[1] != text):
            raise ValueError(f"{found[1]!r} is not expected")
        return found[1]

    def _takes(self, mark: str) -> bool:
        """Whether that mark is next, which is then read."""
        is_next = self._peek() == ("mark", mark)
        self._place += is_next
        return is_next

    def _separate(self, closer: str) -> None:
        """Reads a comma, which only the last entry may lack."""
        if self._peek() != ("mark", closer):
            self._expect("mark", ",") if self._peek() != ("end", "") else self._expect("mark", closer)


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    place, end = 0, len(text.rstrip())
    while place < end:
        found = TOKEN.match(text, place)
        if found is None or found.lastgroup is None or not found[found.lastgroup]:
            raise ValueError(f"{text[place : place + 20]!r} is no literal")
        yield found.lastgroup, found[found.lastgroup]
        place = found.end()
    yield "end", ""


def _unquoted(literal: str) -> str:
    """The text of a literal; an escape that Python does not know stands for itself."""
    prefix = "" if literal[0] in "'\"" else literal[0]
    if prefix in ("b", "f"):
        raise ValueError(f"{literal!r} is no text")
    body = literal[len(prefix) + 1 : -1]

    def unescaped(found: re.Match[str]) -> str:
        code = found[1] or found[2] or found[3]
        if code:
            return chr(min(int(code, 16), sys.maxunicode))
        return ESCAPES.get(found[4], found[4] if found[4] in "'\"\\" else found[0])

    text = body if prefix == "r" else ESCAPE.sub(unescaped, body)
    # Halves of a character, written as escapes, that do not make one have no place in a text.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _number(text: str) -> int | float:
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value
