"""Recorded answers of many models as tokens, and how ours reads them.

The models' tokenizers are not here, but what a reader sees of them is: which tokens are special, and how many ordinary
ones are between two of these. So the text between them is shared out among as many tokens as there were.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from canitoolcall.fixtures import Fixture
from canitoolcall.results import ParsedToolCall, ParseResult

from gateway.tools.formats import FORMATS
from gateway.tools.reader import AnswerReader, Reading
from outrider.answer import CallArguments, CallBegun, ContentDelta, Delta, ReasoningDelta

FAMILIES = ("qwen3-hermes", "qwen3-xml", "llama", "mistral")
# What their tokenizers have as tokens of their own; those of the Qwen models are not special.
MISTRAL_V3 = {5: "[TOOL_CALLS]"}
MISTRAL = {9: "[TOOL_CALLS]", 32: "[ARGS]", 33: "[CALL_ID]", 34: "[THINK]", 35: "[/THINK]"}
LLAMA3 = {128000: "<|begin_of_text|>", 128006: "<|start_header_id|>", 128007: "<|end_header_id|>"} | {
    128008: "<|eom_id|>",
    128009: "<|eot_id|>",
    128010: "<|python_tag|>",
}
LLAMA4 = re.compile(r"<\|python_start\|>|<\|python_end\|>")
QWEN = re.compile(r"</?tool_call>|</?think>")


@dataclass(frozen=True, slots=True)
class Piece:
    """A token as a reader gets it."""

    text: str
    is_special: bool = False


def format_name(fixture: Fixture) -> str:
    """Which of our formats an answer is in."""
    if fixture.family == "qwen3-hermes":
        return "hermes"
    if fixture.family == "llama":
        return "llama-pythonic" if "Llama-4" in fixture.models[0] else "llama3-json"
    if fixture.family == "mistral":
        return "mistral-v3" if "7B-Instruct-v0.3" in fixture.models[0] else "mistral"
    return fixture.family


def special_names(fixture: Fixture) -> frozenset[str]:
    """The special tokens of the model's tokenizer, as far as they matter."""
    name = format_name(fixture)
    if name == "llama-pythonic":
        return frozenset({"<|python_start|>", "<|python_end|>"})
    return frozenset(_special_ids(fixture).values())


def _special_ids(fixture: Fixture) -> dict[int, str]:
    return {"mistral": MISTRAL, "mistral-v3": MISTRAL_V3, "llama3-json": LLAMA3}.get(format_name(fixture), {})


def pieces_of(fixture: Fixture) -> list[Piece]:
    """The tokens of an answer."""
    text, ids = fixture.raw_output, list(fixture.output_token_ids or ())
    special = _special_ids(fixture)
    rng = random.Random(fixture.id)
    if special:
        return list(_aligned(text, [special.get(each) for each in ids], rng))
    marks = QWEN if fixture.family.startswith("qwen") else LLAMA4
    found: list[Piece] = []
    place = 0
    for match in marks.finditer(text):
        found += _shared(text[place : match.start()], None, rng)
        found.append(Piece(match[0], is_special=marks is LLAMA4))
        place = match.end()
    return [*found, *_shared(text[place:], None, rng)]


def _aligned(text: str, names: list[str | None], rng: random.Random) -> Iterator[Piece]:
    """Special tokens where the ids have them, though the text may spell their names elsewhere too."""
    runs: list[tuple[int, str | None]] = [(0, None)]
    for name in names:
        runs[-1] = (runs[-1][0] + (name is None), name)
        if name is not None:
            runs.append((0, None))

    def place(start: int, rest: Sequence[tuple[int, str | None]]) -> list[tuple[int, int]] | None:
        count, name = rest[0]
        if name is None:
            return [] if count <= len(text) - start and (count > 0) == (start < len(text)) else None
        at = text.find(name, start)
        while at >= 0:
            if (count > 0) == (at > start) and count <= 4 * (at - start):
                further = place(at + len(name), rest[1:])
                if further is not None:
                    return [(at, at + len(name)), *further]
            at = text.find(name, at + 1)
        return None

    spans = place(0, runs)
    assert spans is not None, f"no place for the special tokens in {text!r}"
    start = 0
    for (count, _), (begin, end) in zip(runs, spans, strict=False):
        yield from _shared(text[start:begin], count, rng)
        yield Piece(text[begin:end], is_special=True)
        start = end
    yield from _shared(text[start:], runs[-1][0], rng)


def _shared(text: str, count: int | None, rng: random.Random) -> list[Piece]:
    """A text in that many pieces, or in pieces of one to eight characters."""
    if not text:
        return []
    count = max(1, len(text) // 4) if count is None else min(count, len(text))
    cuts = [0, *sorted(rng.sample(range(1, len(text)), count - 1)), len(text)]
    return [Piece(text[begin:end]) for begin, end in pairwise(cuts)]


def reader_of(fixture: Fixture) -> AnswerReader:
    """A reader of that answer, which knows the tools and what the prompt ended with."""
    tools = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in fixture.tools}
    prefilled = (fixture.generation_prompt or "").rstrip().endswith("<think>")
    form = FORMATS[format_name(fixture)]
    reading = Reading(form, tools, "<think>" if prefilled else "")
    return AnswerReader(reading, special_names(fixture))


def read(fixture: Fixture, groups: Sequence[Sequence[Piece]]) -> tuple[ParseResult, list[Delta]]:
    """What an answer says that comes in groups of tokens, neighbours of which come in one piece; and its deltas."""
    reader = reader_of(fixture)
    deltas: list[Delta] = []
    for group in groups:
        for is_special, run in groupby(group, key=lambda each: each.is_special):
            texts = [each.text for each in run]
            for text in texts if is_special else ["".join(texts)]:
                deltas += reader.push(text, is_special=is_special)
    deltas += reader.finish(is_cut="truncated" in fixture.tags)
    return result_of(deltas), deltas


def result_of(deltas: Sequence[Delta]) -> ParseResult:
    """What deltas add up to."""
    content = "".join(each.text for each in deltas if isinstance(each, ContentDelta))
    reasoning = "".join(each.text for each in deltas if isinstance(each, ReasoningDelta))
    names = [each.name for each in deltas if isinstance(each, CallBegun)]
    arguments = [""] * len(names)
    for each in deltas:
        if isinstance(each, CallArguments):
            arguments[each.index] += each.text
    calls = tuple(map(ParsedToolCall, names, arguments))
    return ParseResult(content=content or None, reasoning_content=reasoning or None, tool_calls=calls)
