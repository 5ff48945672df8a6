"""Grammars in which an answer calls tools as the model's family writes it, with arguments by the tools' schemas.

They are in the syntax of llguidance's Lark. A tool that is not strict is held to its schema too wherever a grammar is
needed anyway, as far as the library knows the schema's words.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.tools.formats import Body
from gateway.tools.reader import Reading
from gateway.tools.values import kinds_of
from outrider.constraint import Constraint, ConstraintKind
from outrider.errors import InvalidRequest

# Unbounded white space is where small models lose themselves.
LINE = "\n"
SPACE = r"[ \n\t]{1,4}"


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


def call_constraint(reading: Reading, rules: CallRules, added_tokens: Mapping[str, int]) -> Constraint | None:
    """Constraint that makes an answer keep to the rules; None where it may say what it likes.

    `added_tokens` are the ids of the tokenizer's added tokens, special or not. Raises InvalidRequest about a tool that
    the family's syntax cannot call.
    """
    is_free = not rules.needs_call and rules.max_calls is None and not any(tool.strict for tool in rules.tools)
    if not rules.tools or is_free:
        return None
    field = rules.tools[0].field if len(rules.tools) == 1 else "tools"
    names = ", ".join(tool.name for tool in rules.tools)
    return Constraint(ConstraintKind.LARK, _Grammar(reading, rules, added_tokens).text(), field, written=names)


class _Grammar:
    """Builder of one grammar, rule by rule."""

    def __init__(self, reading: Reading, rules: CallRules, added_tokens: Mapping[str, int]) -> None:
        self._reading, self._rules, self._added_tokens = reading, rules, added_tokens
        self._lines = ["%llguidance {}", f"SPACE: /{SPACE}/", "TEXT: /(?s:.*)/"]
        # The first is how the family usually writes calls, and a bare one is written bare.
        syntaxes = reading.format.calls
        self._syntax = next((each for each in syntaxes if not each.open), syntaxes[0])

    def text(self) -> str:
        """The whole grammar, in the library's syntax."""
        pairs = dict(self._reading.format.reasoning)
        opener = self._reading.open_reasoning or next(iter(pairs), "")
        # Reasoning must end where the prompt began it, and may come before calls that must come.
        if self._reading.open_reasoning:
            reason = f"{self._until('reasoned', pairs[opener])} SPACE?"
        elif opener and self._rules.needs_call:
            reason = f"({self._marker(opener)} {self._until('reasoned', pairs[opener])} SPACE?)?"
        else:
            reason = ""
        opening, is_once, calls = self._syntax.open, self._rules.max_calls == 1, self._calls()
        if self._rules.needs_call:
            answer = f"{self._marker(opening)} {calls}" if opening else calls
            # Some families write several calls in one list, instead of each in marks of its own.
            if opening and not is_once and self._reading.format.name not in ("mistral-v3", "json", "llama-pythonic"):
                space = "" if self._syntax.body is Body.NAMED else "SPACE?"
                answer = f"{answer} ({space} {answer})*"
        elif opening:
            # Text with calls in it.
            self._lines.append(f"called: {self._until('told', opening)} {calls}")
            rest = "TOLD" if opening in self._added_tokens else "TEXT"
            answer = f"(called SPACE? | {rest})" if is_once else f"called* {rest}"
        else:
            # Where calls are bare, an answer that begins like one is one.
            self._lines.append(r"PLAIN: /[^{\[ \n\t](?s:.*)/")
            answer = f"SPACE? ({calls} SPACE? | PLAIN)?"
        self._lines.append(f"start: {reason} {answer}")
        return "\n".join(self._lines) + "\n"

    def _until(self, rule: str, marker: str) -> str:
        """Expression for any text until a marker, with it. The letters of a marker that is a token are no text."""
        if marker not in self._added_tokens:
            self._lines.append(f"{rule}[lazy]: TEXT {_literal(marker)}")
            return rule
        anywhere = "".join(f"\\u{{{ord(character):x}}}" for character in marker)
        self._lines.append(f"{rule.upper()}: /(?s:.*)/ & ~/(?s:.*){anywhere}(?s:.*)/")
        return f"{rule.upper()} {self._marker(marker)}"

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
        head = _literal(f'{space}{{"name": {json.dumps(tool.name)}, "{key}": ')
        return f"{head} {_json(_schema(tool))} {_literal('}' + space)}"

    def _xml_call(self, rule: str, tool: OfferedTool) -> str:
        """Text stands as it is in its parameter, and all else in JSON."""
        parts = [_literal(f"\n<function={tool.name}>\n")]
        for number, (key, schema) in enumerate(_properties(tool)):
            if any(each in key for each in ">\n"):
                raise InvalidRequest("tools", key, "without > and line ends in names of parameters")
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
        properties, needed = _properties(tool), _needed(tool)
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

    def _argument(self, key: str, schema: Mapping[str, Any], tool: OfferedTool) -> str:
        if not key.isidentifier():
            raise InvalidRequest("tools", key, "an identifier of Python, as names of parameters are for this model")
        return f"{_literal(key + '=')} {_json(_within(schema, tool))}"


def _properties(tool: OfferedTool) -> Sequence[tuple[str, Mapping[str, Any]]]:
    properties: Mapping[str, Any] = tool.parameters.get("properties", {})
    return [(key, schema if isinstance(schema, Mapping) else {}) for key, schema in properties.items()]


def _needed(tool: OfferedTool) -> frozenset[str]:
    required = tool.parameters.get("required", ())
    return frozenset(each for each in required if isinstance(each, str)) if isinstance(required, list) else frozenset()


def _schema(tool: OfferedTool) -> dict[str, Any]:
    """The schema of all arguments of a tool."""
    return {"type": "object", **tool.parameters, "x-guidance": _how(tool)}


def _within(schema: Mapping[str, Any], tool: OfferedTool) -> dict[str, Any]:
    """The schema of one argument, with what it may refer to."""
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    return {**shared, **schema, "x-guidance": _how(tool)}


def _how(tool: OfferedTool) -> dict[str, Any]:
    return {"whitespace_pattern": SPACE, "coerce_one_of": True, "lenient": not tool.strict}


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(schema)}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
