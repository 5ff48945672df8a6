"""The bodies of calls: each is given characters until it is whole or can no longer become a call, and then is read.

Arguments that are JSON stay as the model spelled them; others are built. Nothing is ever evaluated.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from gateway.tools.formats import Body
from gateway.tools.values import cast, read_calls, refuse_constant

Schema: TypeAlias = Mapping[str, Any]

JSON_CHARACTERS = frozenset('{}[]:,"+-.0123456789eEtrufalsn \t\r\n')
ARGUMENTS = ("arguments", "parameters")
FIRST_KEYS = ("name", "type", "id", *ARGUMENTS)
MAX_HEAD_LEN = 256  # characters of a name, with its id
MAX_DEPTH = 128


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call as the model made it; `arguments` is a JSON object as text."""

    name: str
    arguments: str
    call_id: str = ""


class CallBody(ABC):
    """A body that comes character by character."""

    def __init__(self) -> None:
        self._characters: list[str] = []
        self.is_whole = False
        self.has_failed = False

    @property
    def text(self) -> str:
        """Text of the body until now."""
        return "".join(self._characters)

    def push(self, character: str) -> None:
        """Takes a character, unless it is whole or has failed."""
        self._characters.append(character)

    @abstractmethod
    def calls(self) -> list[ParsedCall] | None:
        """Calls that the body makes when no more of it comes; None when it is no call."""

    def may_call(self, names: Collection[str]) -> bool:
        """Whether what was cut off here would have called one of these tools, as far as can be seen."""
        return True


class JsonBody(CallBody):
    """A JSON value: whole when its brackets are closed. Of a list that was cut off, the calls before the cut count."""

    NAME = re.compile(r'"name"\s*:\s*"(?P<name>[^"\\]*)(?P<end>"?)')
    # No name yet: a first key, whole or not.
    HEAD = re.compile(r'\s*(\[\s*)?(\{\s*("(?P<key>[^"]*)"?\s*)?)?(?P<rest>.*)', re.DOTALL)

    def __init__(self, *, is_bare: bool = False) -> None:
        """A bare one must begin like a call, or else it is an answer in JSON, for which no reader should wait."""
        super().__init__()
        self._closers: list[str] = []
        self._is_in_string = self._is_escaped = False
        self._is_bare = is_bare
        self._key_start = 0

    def push(self, character: str) -> None:
        super().push(character)
        if self._is_in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._is_in_string = False
                if self._is_bare and self._key_start > 0:
                    first_key = "".join(self._characters[self._key_start : -1])
                    self.has_failed = first_key not in FIRST_KEYS
                    self._key_start = -1
        elif character not in JSON_CHARACTERS or (not self._closers and character not in "{[ \t\r\n"):
            self.has_failed = True
        elif character == '"':
            self._is_in_string, self._key_start = True, self._key_start or len(self._characters)
        elif character in "{[":
            self._closers.append("}" if character == "{" else "]")
            self.has_failed = len(self._closers) > MAX_DEPTH
        elif character in "}]":
            self.has_failed = self._closers.pop() != character
            self.is_whole = not self._closers and not self.has_failed

    def may_call(self, names: Collection[str]) -> bool:
        if not self._is_bare:
            return True
        if named := self.NAME.search(self.text):
            return _begins_one(named["name"], names, is_whole=bool(named["end"]))
        head = self.HEAD.match(self.text)
        key = None if head is None else head["key"]
        is_key = key is not None and any(each.startswith(key) for each in ("name", *ARGUMENTS))
        return is_key or (head is not None and key is None and not head["rest"])

    def calls(self) -> list[ParsedCall] | None:
        text = self.text
        is_list = text.lstrip().startswith("[")
        if not self.is_whole and not is_list:
            return None
        calls: list[ParsedCall] = []
        try:
            for value in _entries(text) if is_list else [text]:
                members = _members(value)
                name, call_id = (json.loads(members.get(key, "null")) for key in ("name", "id"))
                spelled = next((members[key] for key in ARGUMENTS if key in members), None)
                is_call = isinstance(name, str) and name and name.isprintable()
                if not is_call or (spelled is None and self._is_bare):
                    return None
                call_id = call_id if isinstance(call_id, str) else ""
                calls.append(ParsedCall(name, strict_object(spelled or "null"), call_id))
        except (ValueError, RecursionError):
            return None
        return calls or None


class NamedBody(CallBody):
    """A name and its arguments, as `name[ARGS]{...}` or `name[CALL_ID]id[ARGS]{...}`, or JSON without a name ahead."""

    HEAD = re.compile(r"\s*(?P<name>[\w.:/-]+)(\[CALL_ID\](?P<call_id>\w+))?(\[ARGS\])?\s*")
    # What may still become a head: each part may be cut off anywhere.
    BEGINNING = re.compile(r"\s*([\w.:/-]+(\[(C(A(L(L(_(I(D(\]\w*)?)?)?)?)?)?)?)?)?(\[(A(R(G(S(\]\s*)?)?)?)?)?)?\s*)?")

    def __init__(self) -> None:
        super().__init__()
        self._json: JsonBody | None = None
        self._head = ""

    def push(self, character: str) -> None:
        super().push(character)
        if self._json is None:
            head = self.text
            begins_list = character == "[" and not head[:-1].strip()
            if character != "{" and not begins_list:
                self.has_failed = len(head) > MAX_HEAD_LEN or not self.BEGINNING.fullmatch(head)
                return
            self._head, self._json = head[:-1], JsonBody()
        self._json.push(character)
        self.is_whole, self.has_failed = self._json.is_whole, self._json.has_failed

    def calls(self) -> list[ParsedCall] | None:
        if self._json is None:
            return None
        if not self._head.strip():
            return self._json.calls()
        head, arguments = self.HEAD.fullmatch(self._head), self._json.text
        if head is None or not self.is_whole:
            return None
        try:
            return [ParsedCall(head["name"], strict_object(arguments), head["call_id"] or "")]
        except (ValueError, RecursionError):
            return None


class PythonicBody(CallBody):
    """A list of calls in Python's syntax: whole when its bracket is closed."""

    BEGINNING = re.compile(r"\s*(\[\s*([A-Za-z_][\w./-]*\s*(\(.*)?)?)?", re.DOTALL)

    HEAD = re.compile(r"\s*\[\s*(?P<name>[\w./-]*)\s*(?P<end>\(?)")

    def __init__(self) -> None:
        super().__init__()
        self._depth, self._quote, self._is_escaped = 0, "", False

    def push(self, character: str) -> None:
        super().push(character)
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == self._quote:
                self._quote = ""
            return
        if character in "'\"":
            self._quote = character
        elif character in "[({":
            self._depth += 1
        elif character in "])}":
            self._depth -= 1
        if self._depth < 2 and character not in "])":
            # Only the head of the first call distinguishes it from text.
            is_first = "(" not in self._characters
            is_long = len(self._characters) > MAX_HEAD_LEN
            self.has_failed = is_first and (is_long or not self.BEGINNING.fullmatch(self.text))
        self.has_failed = self.has_failed or self._depth > MAX_DEPTH
        self.is_whole = not self.has_failed and self._depth <= 0 and character in "])}"

    def may_call(self, names: Collection[str]) -> bool:
        head = self.HEAD.match(self.text)
        return head is not None and _begins_one(head["name"], names, is_whole=bool(head["end"]))

    def calls(self) -> list[ParsedCall] | None:
        if not self.is_whole:
            return None
        try:
            found = read_calls(self.text)
        except ValueError:
            return None
        return [ParsedCall(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in found] or None


class XmlBody(CallBody):
    """A function element: whole where what closes it stands on a line of its own, or nothing in it has lines."""

    HEAD = re.compile(r"\s*<function=(?P<name>[^>\s]+)>")
    MARK = "<function="
    # After a line's end or a closed parameter, for a value may speak of these marks.
    END = re.compile(r"(?:\n|</parameter>\s*|<function=[^>\s]+>\s*)</function>\s*(?P<next></tool_call>|<tool_call>)$")
    PARAMETER = re.compile(r"\s*<parameter=(?P<name>[^>\n]+)>")
    # A value on lines of its own ends where a line begins with a mark, and else where any mark stands.
    LINES_END = re.compile(
        r"\n</parameter>(?=\s*(?:<parameter=[^>\n]+>|</function>\s*$))|\n(?=<parameter=(?P<next>[^>\n]+)>\n)"
        r"|\n(?=</function>\s*$)"
    )
    INLINE_END = re.compile(r"</parameter>|(?=<parameter=)|(?=</function>\s*$)")

    def __init__(self, schemas: Mapping[str, Schema]) -> None:
        super().__init__()
        self._schemas = schemas
        self._has_begun = False
        self.overlap = ""
        """Marker that closed it, if that opens the next call."""

    def push(self, character: str) -> None:
        super().push(character)
        if not self._has_begun:
            begun = self.text.lstrip()
            self._has_begun = begun == self.MARK
            self.has_failed = not self.MARK.startswith(begun)
        elif character == ">":
            tail = "".join(self._characters[-MAX_HEAD_LEN:])
            end = self.END.search(tail)
            if end:
                self.is_whole, self.overlap = True, end["next"] if end["next"] == "<tool_call>" else ""

    def calls(self) -> list[ParsedCall] | None:
        text = self.text
        if self.is_whole:
            text = text[: text.rindex("<")]
        head = self.HEAD.match(text)
        if head is None or not text.rstrip().endswith("</function>"):
            return None
        schema = self._schemas.get(head["name"], {})
        properties = schema.get("properties")
        known = properties if isinstance(properties, Mapping) else {}
        arguments: dict[str, str] = {}
        place = head.end()
        while parameter := self.PARAMETER.match(text, place):
            has_lines = text.startswith("\n", parameter.end())
            if has_lines:
                # A value that is not closed ends only before a parameter that there is.
                ends = self.LINES_END.finditer(text, parameter.end())
                end = next((each for each in ends if not each["next"] or not known or each["next"] in known), None)
            else:
                end = self.INLINE_END.search(text, parameter.end())
            if end is None:
                return None
            value = text[parameter.end() + has_lines : max(end.start(), parameter.end() + has_lines)]
            arguments[parameter["name"]] = cast(value, schema, parameter["name"])
            place = end.end()
        if text[place:].strip() != "</function>":
            return None
        members = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in arguments.items())
        return [ParsedCall(head["name"], f"{{{', '.join(members)}}}")]


def new_body(kind: Body, schemas: Mapping[str, Schema], *, is_bare: bool) -> CallBody:
    """An empty body of a kind; `schemas` are those of the parameters of the tools that were offered."""
    match kind:
        case Body.JSON:
            return JsonBody(is_bare=is_bare)
        case Body.NAMED:
            return NamedBody()
        case Body.PYTHONIC:
            return PythonicBody()
        case Body.XML:
            return XmlBody(schemas)


def _begins_one(name: str, names: Collection[str], *, is_whole: bool) -> bool:
    """Whether a name, or the beginning of one, is that of one of these."""
    return name in names if is_whole else any(each.startswith(name) for each in names)


# Line ends within strings are what models write and JSON does not take.
_DECODER = json.JSONDecoder(strict=False, parse_constant=refuse_constant)
_SPACE = re.compile(r"[ \t\r\n]*")


def _skip(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return place if found is None else found.end()


def _entries(text: str) -> list[str]:
    """The entries of a list as they are spelled, up to where it is cut off; raises ValueError about what is no list."""
    entries: list[str] = []
    place = _skip(text, _skip(text, 0) + 1)
    while place < len(text) and text[place] != "]":
        try:
            _, end = _DECODER.raw_decode(text, place)
        except ValueError:
            if entries:
                break
            raise
        entries.append(text[place:end])
        place = _skip(text, end)
        if text[place : place + 1] == ",":
            place = _skip(text, place + 1)
        elif text[place : place + 1] not in {"]", ""}:
            raise ValueError("not a list")
    return entries


def _members(text: str) -> dict[str, str]:
    """The members of an object as they are spelled; raises ValueError about what is none, or has a key twice."""
    found: dict[str, str] = {}
    place = _skip(text, 0)
    if text[place : place + 1] != "{":
        raise ValueError("not an object")
    place = _skip(text, place + 1)
    while text[place : place + 1] != "}":
        key, end = _DECODER.raw_decode(text, place)
        place = _skip(text, end)
        if not isinstance(key, str) or key in found or text[place : place + 1] != ":":
            raise ValueError("not an object")
        start = _skip(text, place + 1)
        _, end = _DECODER.raw_decode(text, start)
        found[key] = text[start:end]
        place = _skip(text, end)
        if text[place : place + 1] == ",":
            place = _skip(text, place + 1)
        elif text[place : place + 1] != "}":
            raise ValueError("not an object")
    if text[place + 1 :].strip():
        raise ValueError("more than an object")
    return found


def strict_object(spelled: str) -> str:
    """Arguments as an object in JSON that every parser reads: as spelled wherever possible; raises ValueError."""
    value = _DECODER.decode(spelled)
    if isinstance(value, str):
        # Some models quote the object.
        spelled, value = value, _DECODER.decode(value)
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise ValueError("arguments are not an object")
    try:
        json.loads(spelled, object_pairs_hook=_unique)
    except ValueError:
        return json.dumps(value)
    return spelled


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError about a key that is there twice, of which readers keep either."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found
