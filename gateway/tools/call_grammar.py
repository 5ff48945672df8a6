"""Grammars of whole answers: reasoning, and then calls of tools, text of a certain form, or either of them.

Reasoning and calls are as the model's family writes them, with arguments by the tools' schemas. A tool that is not
strict is held to its schema too wherever a grammar is needed anyway, as far as the library knows the schema's words.
Rules are in the syntax of llguidance's Lark.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.tools.formats import JSON, Body
from gateway.tools.reader import Reading
from gateway.tools.schemas import moved
from gateway.tools.values import kinds_of
from outrider.constraint import WHITESPACE, Constraint, ConstraintKind
from outrider.errors import InvalidRequest
from outrider.grammar import canonical

# Unbounded white space is where small models lose themselves.
LINE = "\n"
SPACE = r"[ \n\t]{1,4}"
ANY_TEXT = "/(?s:.*)/"
SHAPE = "shape"
LISTED = ("mistral-v3", "json", "llama-pythonic")
"""Families that write several calls in one list, instead of each in marks of its own."""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that may be called; a strict one only with arguments that fit its schema."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    field: str = "tools"
    """Field of the request that it is in."""


@dataclass(frozen=True, slots=True)
class CallRules:
    """Rules about calls: which tools may be called, whether one must be, and how often; None for any number."""

    tools: tuple[OfferedTool, ...] = ()
    needs_call: bool = False
    max_calls: int | None = None


def fitting(reading: Reading, rules: CallRules) -> Reading:
    """The reading for these rules: a grammar for calls knows no channels, and writes them as JSON without any."""
    needs_grammar = rules.needs_call or any(tool.strict for tool in rules.tools)
    return replace(reading, format=JSON) if reading.format.has_channels and needs_grammar else reading


def answer_constraint(
    reading: Reading | None, rules: CallRules, added_tokens: Mapping[str, int], shape: Constraint | None = None
) -> Constraint | None:
    """Constraint that makes an answer keep to the rules, and have a form where it is not calls; None where it may say
    what it likes.

    An answer that must call has no other form. Without a reading all of an answer is text. `added_tokens` are the ids
    of the tokenizer's added tokens, special or not. Raises InvalidRequest about a strict tool that the family's syntax
    cannot call, and about a form that cannot be read.
    """
    if reading is None:
        return shape
    tools = rules.tools
    if reading.format.has_channels:
        # A call ends such an answer, and one that must be made or fit is written bare; see `fitting`.
        return shape
    if tools and rules.needs_call:
        shape = None
    if shape is None:
        is_free = not rules.needs_call and rules.max_calls is None and not any(tool.strict for tool in tools)
        if not tools or is_free:
            return None
    elif not tools and not reading.format.reasoning:
        return shape
    space = "" if shape is None else shape.whitespace or WHITESPACE
    lark = _Grammar(reading, rules, added_tokens, space).text()
    if shape is None:
        field = tools[0].field if len(tools) == 1 else "tools"
        names = ", ".join(tool.name for tool in tools)
        return Constraint(ConstraintKind.LARK, lark, field, written=names)
    inner = canonical(shape)
    # Of one grammar the library's text is that, or a list of one.
    [form] = json.loads(inner)["grammars"] if inner.startswith('{"grammars"') else [{"lark_grammar": inner}]
    text = json.dumps({"grammars": [{"lark_grammar": lark}, {**form, "name": SHAPE}]})
    return replace(shape, kind=ConstraintKind.LLGUIDANCE, text=text, whitespace="", written=shape.written or shape.text)


class _Grammar:
    """Builder of one grammar, rule by rule."""

    def __init__(self, reading: Reading, rules: CallRules, added_tokens: Mapping[str, int], shape_space: str) -> None:
        """`shape_space` is the white space in the JSON of a form that there may be; empty without a form."""
        self._reading, self._rules, self._added_tokens = reading, rules, added_tokens
        self._has_shape, self._shape_space = bool(shape_space), shape_space
        # A form may begin with a blank.
        self._space = "LINES?" if self._has_shape else "SPACE?"
        self._lines = ["%llguidance {}", f"SPACE: /{SPACE}/", r"LINES: /\n{1,4}/", f"TEXT: {ANY_TEXT}"]
        # The first is how the family usually writes calls, and a bare one is written bare.
        syntaxes = reading.format.calls
        self._syntax = next((each for each in syntaxes if not each.open), syntaxes[0])

    def text(self) -> str:
        """The whole grammar, in the library's syntax."""
        opening, calls, further = self._syntax.open, "", ""
        is_once = self._rules.max_calls == 1
        if self._rules.tools:
            calls = self._calls()
            if opening and not is_once and self._reading.format.name not in LISTED:
                space = "" if self._syntax.body is Body.NAMED else "SPACE?"
                further = f"({space} {self._marker(opening)} {calls})*"
        marked = f"{self._marker(opening)} {calls} {further}" if opening else calls
        if self._has_shape:
            answer = f"{marked} | @{SHAPE}" if calls else f"@{SHAPE}"
        elif self._rules.needs_call:
            answer = marked
        else:
            answer = self._free(calls)
        self._lines.append(f"answer: {answer}")
        # Answers with the reasoning that may come before them, or must where the prompt began it.
        opened, format_ = self._reading.open_reasoning, self._reading.format
        starts = [] if opened else ["answer"]
        for number, (opener, closer) in enumerate(format_.reasoning):
            if opened in ("", opener):
                begin = "" if opened else opener
                starts.append(f"{self._until(f'reasoned_{number}', closer, begin)} {self._space} answer")
                if format_.calls_end_reasoning and self._rules.tools:
                    thought = self._until(f"thought_{number}", self._syntax.open, begin)
                    starts.append(f"{thought} {calls} {further}")
        self._lines.append(f"start: {' | '.join(starts)}")
        return "\n".join(self._lines) + "\n"

    def _free(self, calls: str) -> str:
        """Any text, with calls in it."""
        opening, is_once = self._syntax.open, self._rules.max_calls == 1
        # What begins as reasoning is no text. Markers that are tokens are none anyway.
        openers = [opener for opener, _ in self._reading.format.reasoning if opener not in self._added_tokens]
        no_thought = "".join(rf" & ~/[ \n\t]*{_pattern(opener)}(?s:.*)/" for opener in openers)
        if not opening:
            # Where calls are bare, an answer that begins like one is one.
            self._lines.append(rf"PLAIN: /[^{{\[ \n\t](?s:.*)/{no_thought}")
            return f"SPACE? ({calls} SPACE? | PLAIN)?"
        text = f"{ANY_TEXT}{self._without(opening) if opening in self._added_tokens else ''}"
        self._lines += [f"FREE: {text}", f"FIRST: {text}{no_thought}"]
        self._lines.append(f"first: {self._until('told_first', opening, text='FIRST')} {calls}")
        if is_once:
            return "first SPACE? | FIRST"
        self._lines.append(f"called: {self._until('told', opening, text='FREE')} {calls}")
        return "first called* FREE | FIRST"

    def _until(self, rule: str, marker: str, begin: str = "", text: str = "TEXT") -> str:
        """Expression for any text until a marker, with it, perhaps after another marker. The letters of a marker that
        is a token are no text.
        """
        head = f"{self._marker(begin)} " if begin else ""
        if marker in self._added_tokens:
            if text == "TEXT":
                text = rule.upper()
                self._lines.append(f"{text}: {ANY_TEXT}{self._without(marker)}")
            return f"{head}{text} {self._marker(marker)}"
        # After letters it is one with them, or other text that begins with some of these would look like it.
        inner = head if begin not in self._added_tokens else ""
        self._lines.append(f"{rule}[lazy]: {inner}{text} {_literal(marker)}")
        return rule if inner else f"{head}{rule}"

    @staticmethod
    def _without(marker: str) -> str:
        """What takes texts with a marker's letters from an expression."""
        return f" & ~/(?s:.*){_pattern(marker)}(?s:.*)/"

    def _marker(self, marker: str) -> str:
        """Marker as a token if it is one: the library takes such tokens for none of the texts that are their names."""
        return f"<[{self._added_tokens[marker]}]>" if marker in self._added_tokens else _literal(marker)

    def _calls(self) -> str:
        """Expression for what follows an opening marker: a call of any of the tools, or several in a list."""
        names = [f"call_{number}" for number in range(len(self._rules.tools))]
        for name, tool in zip(names, self._rules.tools, strict=True):
            self._lines.append(f"{name}: {self._call(name, tool)}")
        self._lines.append(f"call: {' | '.join(names)}")
        match self._reading.format.name:
            case "mistral-v3" | "llama-pythonic":
                start = '"["' if self._reading.format.name == "llama-pythonic" else '" ["'
                further = "" if self._rules.max_calls == 1 else ' (", " call)*'
                return f'({start} call{further} "]")'
            case "json" if self._has_shape and self._rules.max_calls != 1:
                items = [moved(_as_object(tool), f"/items/anyOf/{n}") for n, tool in enumerate(self._rules.tools)]
                several = {
                    "type": "array",
                    "minItems": 1,
                    "items": {"anyOf": items},
                    "x-guidance": self._bare_how(strict=False),
                }
                return f"(call | {_json(several)})"
            case "json":
                # A list where there may be several.
                return "call" if self._rules.max_calls == 1 else '("[" call (", " call)* "]")'
            case "llama3-json":
                return "call" if self._rules.max_calls == 1 else '(call ("; " call)*)'
        return "call"

    def _call(self, rule: str, tool: OfferedTool) -> str:
        match self._reading.format.name:
            case "hermes":
                return f"{self._json_call(tool, 'arguments', space=LINE)} {self._marker(self._syntax.close[0])}"
            case "qwen3-xml":
                return self._xml_call(rule, tool)
            case "llama-pythonic":
                return self._pythonic_call(tool)
            case "mistral":
                return f"{_literal(tool.name)} {self._marker('[ARGS]')} {_json(_schema(tool))}"
            case "mistral-v3":
                return self._json_call(tool, "arguments")
        return self._json_call(tool, "parameters")

    def _json_call(self, tool: OfferedTool, key: str, space: str = "") -> str:
        if self._has_shape and not self._syntax.open:
            # Bare calls are in the words of JSON, as the form may be; letters of their own could hide those of it.
            return _json({**_as_object(tool), "x-guidance": self._bare_how(strict=tool.strict)})
        head = _literal(f'{space}{{"name": {json.dumps(tool.name)}, "{key}": ')
        return f"{head} {_json(_schema(tool))} {_literal('}' + space)}"

    def _bare_how(self, *, strict: bool) -> dict[str, Any]:
        # The library breaks off where two schemas that may both begin differ in their white space.
        return {**_how(strict=strict), "whitespace_pattern": self._shape_space}

    def _xml_call(self, rule: str, tool: OfferedTool) -> str:
        """Text stands as it is in its parameter, and all else in JSON."""
        parts = [_literal(f"\n<function={tool.name}>\n")]
        for number, (key, schema) in enumerate(_properties(tool)):
            if any(each in key for each in ">\n"):
                self._leave_out(tool, key, "without > and line ends, which names of parameters have not for this model")
                continue
            value = f"{rule}_{number}"
            head, end = _literal(f"<parameter={key}>\n"), "\n</parameter>\n"
            kinds = set(kinds_of(schema, tool.parameters))
            words = schema.get("enum")
            if isinstance(words, list) and words and all(isinstance(each, str) for each in words):
                self._lines.append(f"{value}: ({' | '.join(map(_literal, words))}) {_literal(end)}")
            elif "string" in kinds or not kinds:
                self._lines.append(f"{value}[lazy]: TEXT {_literal(end)}")
            else:
                self._lines.append(f"{value}: {_json(_within(schema, tool))} {_literal(end)}")
            part = f"{head} {value}"
            parts.append(part if key in _needed(tool) else f"({part})?")
        return " ".join([*parts, _literal("</function>\n"), self._marker(self._syntax.close[0])])

    def _pythonic_call(self, tool: OfferedTool) -> str:
        """Values are in JSON, which Python reads but for three words that readers know."""
        properties, needed = [], _needed(tool)
        for key, schema in _properties(tool):
            if key.isidentifier():
                properties.append((key, schema))
            else:
                self._leave_out(tool, key, "an identifier of Python, as names of parameters are for this model")
        first = [self._argument(key, schema, tool) for key, schema in properties if key in needed]
        others = [self._argument(key, schema, tool) for key, schema in properties if key not in needed]
        arguments = ' ", " '.join(first)
        if first:
            arguments += "".join(f' (", " {each})?' for each in others)
        elif others:
            # Any of them, in order, with commas only between.
            chains = (
                each + "".join(f' (", " {further})?' for further in others[number + 1 :])
                for number, each in enumerate(others)
            )
            arguments = f"({' | '.join(chains)})?"
        return f'{_literal(tool.name + "(")} {arguments} ")"'

    @staticmethod
    def _leave_out(tool: OfferedTool, key: str, limit: str) -> None:
        """A parameter that the syntax has no way to write; raises InvalidRequest about one of a strict tool."""
        if tool.strict:
            raise InvalidRequest(f"{tool.field}.properties.{key}", key, limit)

    def _argument(self, key: str, schema: Mapping[str, Any], tool: OfferedTool) -> str:
        return f"{_literal(key + '=')} {_json(_within(schema, tool))}"


def _properties(tool: OfferedTool) -> Sequence[tuple[str, Mapping[str, Any]]]:
    properties: Mapping[str, Any] = tool.parameters.get("properties", {})
    return [(key, schema if isinstance(schema, Mapping) else {}) for key, schema in properties.items()]


def _needed(tool: OfferedTool) -> frozenset[str]:
    required = tool.parameters.get("required", ())
    return frozenset(each for each in required if isinstance(each, str)) if isinstance(required, list) else frozenset()


def _schema(tool: OfferedTool) -> dict[str, Any]:
    """The schema of all arguments of a tool."""
    return {"type": "object", **tool.parameters, "x-guidance": _how(strict=tool.strict)}


def _as_object(tool: OfferedTool) -> dict[str, Any]:
    """The schema of a call in JSON."""
    arguments = moved({"type": "object", **tool.parameters}, "/properties/parameters")
    properties = {"name": {"const": tool.name}, "parameters": arguments}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _within(schema: Mapping[str, Any], tool: OfferedTool) -> dict[str, Any]:
    """The schema of one argument, with what it may refer to."""
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    return {**shared, **schema, "x-guidance": _how(strict=tool.strict)}


def _how(*, strict: bool) -> dict[str, Any]:
    return {"whitespace_pattern": SPACE, "coerce_one_of": True, "lenient": not strict}


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(schema)}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pattern(text: str) -> str:
    """A regular expression for a text, whatever its letters mean."""
    return "".join(f"\\u{{{ord(character):x}}}" for character in text)
