"""Formats of calls of tools and reasoning, as data by family of models, and which of them a chat template speaks of.

The descriptions are in the manner of `response_template` of transformers: regions that open and close with markers,
and what is between these. A marker that is a special token of the model's tokenizer counts only as that token, and
its letters are text; any other marker counts wherever its letters are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum


class Body(StrEnum):
    """Notation of a call."""

    JSON = "json"
    """An object with a name and arguments, or a list of them."""
    NAMED = "named"
    """A name, perhaps an id, and the arguments as an object; or as JSON."""
    XML = "xml"
    """A function element with parameter elements, whose text is cast by the tool's schema."""
    PYTHONIC = "pythonic"
    """A list of calls as Python writes them, with literals."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Syntax of calls: what opens one, its body, and what may close it.

    Without an opening marker the body stands bare: it begins with the answer or after another call, and names a tool
    that was offered, or else it is text. `keeps_open` says that the marker is the beginning of the body.
    """

    body: Body
    open: str = ""
    close: tuple[str, ...] = ()
    keeps_open: bool = False


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Format of a family of models: how it writes calls, and between which markers it reasons.

    `calls_end_reasoning` says that a call stands for the end of reasoning that was not closed; elsewhere a call within
    reasoning is thought of, and not made. `call_id_len` is how many letters and digits an id has where templates look.
    """

    name: str
    calls: tuple[CallSyntax, ...] = ()
    reasoning: tuple[tuple[str, str], ...] = ()
    calls_end_reasoning: bool = False
    call_id_len: int | None = None
    has_channels: bool = False
    """Whether an answer is messages with headers, which say what each is; see channels.py."""

    @property
    def markers(self) -> frozenset[str]:
        """All markers that open or close something."""
        calls = (marker for syntax in self.calls for marker in (syntax.open, *syntax.close))
        return frozenset(marker for marker in (*calls, *(each for pair in self.reasoning for each in pair)) if marker)


THINK = ("<think>", "</think>")
BIG_THINK = ("[THINK]", "[/THINK]")
HERMES = ToolFormat("hermes", (CallSyntax(Body.JSON, "<tool_call>", ("</tool_call>",)),), (THINK,))
QWEN3_XML = ToolFormat(
    "qwen3-xml",
    (
        CallSyntax(Body.XML, "<tool_call>", ("</tool_call>",)),
        # Some models leave out what opens the call.
        CallSyntax(Body.XML, "<function=", ("</tool_call>",), keeps_open=True),
    ),
    (THINK,),
    calls_end_reasoning=True,
)
LLAMA3_JSON = ToolFormat("llama3-json", (CallSyntax(Body.JSON, "<|python_tag|>", (";",)), CallSyntax(Body.JSON)))
LLAMA_PYTHONIC = ToolFormat(
    "llama-pythonic",
    (CallSyntax(Body.PYTHONIC, "<|python_start|>", ("<|python_end|>",)), CallSyntax(Body.PYTHONIC)),
)
_NAMED = (CallSyntax(Body.NAMED, "[TOOL_CALLS]"),)
MISTRAL = ToolFormat("mistral", _NAMED, (BIG_THINK, THINK), call_id_len=9)
MISTRAL_V3 = ToolFormat("mistral-v3", _NAMED, call_id_len=9)
JSON = ToolFormat("json", (CallSyntax(Body.JSON),))
HARMONY = ToolFormat("harmony", has_channels=True)
FORMATS: Mapping[str, ToolFormat] = {
    each.name: each for each in (HERMES, QWEN3_XML, LLAMA3_JSON, LLAMA_PYTHONIC, MISTRAL, MISTRAL_V3, JSON, HARMONY)
}
AUTO, OFF = "auto", "off"
# What only the template of a family says, the most specific first; all of one line must be there.
SIGNS: tuple[tuple[ToolFormat, tuple[str, ...]], ...] = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    (QWEN3_XML, ("<function=", "<parameter=")),
    (MISTRAL, ("[TOOL_CALLS]", "[ARGS]")),
    (MISTRAL_V3, ("[TOOL_CALLS]",)),
    (HERMES, ("<tool_call>",)),
    (LLAMA_PYTHONIC, ("<|python_start|>",)),
    (LLAMA_PYTHONIC, ("[func_name1(",)),
    (LLAMA3_JSON, ("<|python_tag|>",)),
    (LLAMA3_JSON, ('"parameters": ',)),
)


def choose_format(name: str, template: str) -> ToolFormat | None:
    """The format of a model: the one of that name, or for "auto" the one that its chat template speaks of, plain JSON
    where it speaks of none; None for "off". It reasons between the markers that the template knows.

    Raises KeyError about a name that there is not.
    """
    if name == OFF:
        return None
    spoken = next((each for each, signs in SIGNS if all(sign in template for sign in signs)), JSON)
    found = spoken if name == AUTO else FORMATS[name]
    return replace(found, reasoning=tuple(pair for pair in (THINK, BIG_THINK) if pair[1] in template))
