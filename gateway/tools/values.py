"""Values of arguments that are not written in JSON: text that a schema casts, and Python's literals.

Nothing that a model says is evaluated: of the syntax of the latter only literals are read.
"""

import ast
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
        value = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        pass
    else:
        return text, value
    try:
        value = read_literal(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False), value
    except ValueError:
        return None


def refuse_constant(constant: str) -> None:
    """Raises ValueError about NaN and infinities, which Python's reader takes."""
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


def read_literal(text: str) -> object:
    """The value of a literal; raises ValueError about anything else."""
    tree, words = _parsed(text)
    if isinstance(tree, ast.Tuple) and not text.lstrip().startswith("("):
        raise ValueError("more than one value")
    return _value(tree, words)


def read_calls(text: str) -> list[tuple[str, dict[str, object]]]:
    """The calls of a list, each with its arguments by name; raises ValueError about anything else."""
    tree, words = _parsed(text)
    if not isinstance(tree, ast.List):
        raise ValueError("not a list of calls")
    calls = []
    for node in tree.elts:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
            raise ValueError("not a call")
        arguments = {words[each.arg or ""]: _value(each.value, words) for each in node.keywords}
        if len(arguments) < len(node.keywords):
            raise ValueError("a parameter is there twice")
        calls.append((words[node.func.id], arguments))
    return calls


def _parsed(text: str) -> tuple[ast.expr, Mapping[str, str]]:
    """The syntax of a text, in which words are numbered, and the words by these names.

    So any word may name a tool or a parameter, those of Python's too, and strings are as models write them.
    """
    spelled: list[str] = []
    words: dict[str, str] = {}
    place, end = 0, len(text.rstrip())
    while place < end:
        found = TOKEN.match(text, place)
        if found is None or found.lastgroup is None:
            raise ValueError(f"{text[place : place + 20]!r} is no literal")
        token, place = found[found.lastgroup], found.end()
        match found.lastgroup:
            case "word":
                spelled.append(f"_{len(words)}")
                words[spelled[-1]] = token
            case "string":
                spelled.append(repr(_unquoted(token)))
            case "number":
                is_whole = re.fullmatch(r"[+-]?\d+", token)
                number = int(token) if is_whole else float(token)
                if not is_whole and not math.isfinite(number):
                    raise ValueError(f"{token} is too large")
                spelled.append(repr(number))
            case _:
                spelled.append(token)
    try:
        return ast.parse(" ".join(spelled), mode="eval").body, words
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("no literal") from error


def _value(node: ast.expr, words: Mapping[str, str], depth: int = 0) -> object:
    if depth > MAX_DEPTH:
        raise ValueError("too deep")
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=name) if words[name] in WORDS:
            return WORDS[words[name]]
        case ast.List(elts=entries) | ast.Tuple(elts=entries):
            return [_value(each, words, depth + 1) for each in entries]
        case ast.Dict(keys=keys, values=entries):
            names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            if len({*names}) == len(keys):
                return {name: _value(each, words, depth + 1) for name, each in zip(names, entries, strict=True)}
    raise ValueError("no value")


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
