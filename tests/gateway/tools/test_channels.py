"""Answers in channels are read alike however they are cut: reasoning, text, and calls, each apart from the others."""

import random
from dataclasses import replace

import pytest

from gateway.tools.call_grammar import CallRules, OfferedTool, answer_constraint, fitting
from gateway.tools.channels import MARKERS, ChannelReader
from gateway.tools.formats import FORMATS, HARMONY, choose_format
from gateway.tools.reader import Reading, joined
from outrider.answer import CallArguments, CallBegun, ContentDelta, Delta, ReasoningDelta

READING = Reading(HARMONY, {"count": {}})
THOUGHT = "<|channel|>analysis<|message|>They ask for 3."
FINAL = "<|start|>assistant<|channel|>final<|message|>It is 3."
CALL = '<|channel|>commentary to=functions.count <|constrain|>json<|message|>{"n": 3}'
COUNTED = [CallBegun(0, "", "count"), CallArguments(0, '{"n": 3}')]


def read(text: str, reading: Reading = READING, *, is_cut: bool = False, special: bool = True) -> list[Delta]:
    """What is made of an answer a letter at a time, with markers as tokens; calls without their ids."""
    reader, deltas = ChannelReader(reading, MARKERS if special else ()), list[Delta]()
    while text:
        marker = next((each for each in MARKERS if text.startswith(each)), "") if special else ""
        piece = marker or text[0]
        deltas += reader.push(piece, is_special=bool(marker))
        text = text.removeprefix(piece)
    found = joined([*deltas, *reader.finish(is_cut=is_cut)])
    return [replace(each, call_id="") if isinstance(each, CallBegun) else each for each in found]


ANSWERS: dict[str, tuple[str, list[Delta]]] = {
    "reasoning and an answer": (
        f"{THOUGHT}<|end|>{FINAL}<|return|>",
        [ReasoningDelta("They ask for 3."), ContentDelta("It is 3.")],
    ),
    "an answer alone": (FINAL.removeprefix("<|start|>assistant"), [ContentDelta("It is 3.")]),
    "an answer without an end before it": (
        f"{THOUGHT}{FINAL}",
        [ReasoningDelta("They ask for 3."), ContentDelta("It is 3.")],
    ),
    "text without a channel": ("to be or not", [ContentDelta("to be or not")]),
    "a call": (f"{THOUGHT}<|end|><|start|>assistant{CALL}<|call|>", [ReasoningDelta("They ask for 3."), *COUNTED]),
    "a call whose recipient goes first": (
        ' to=functions.count<|channel|>commentary json<|message|>{"n": 3}<|call|>',
        COUNTED,
    ),
    "a call with a preamble": (
        f"<|channel|>commentary<|message|>I count.<|end|><|start|>assistant{CALL}",
        [ContentDelta("I count."), *COUNTED],
    ),
    "two pieces of reasoning": (
        f"{THOUGHT}<|end|><|start|>assistant{THOUGHT}<|end|>",
        [ReasoningDelta("They ask for 3.\nThey ask for 3.")],
    ),
    "a tool that nobody offered": (
        "<|channel|>analysis to=python code<|message|>1 + 2<|call|>",
        [ReasoningDelta("1 + 2")],
    ),
    "arguments that are none": (f"{CALL}, and", [ContentDelta('{"n": 3}, and')]),
}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", ANSWERS)
def test_parts_are_told_apart(name: str, special: bool) -> None:
    """Whether the markers are tokens of the tokenizer or letters."""
    text, found = ANSWERS[name]
    assert read(text, special=special) == found


@pytest.mark.parametrize("name", ANSWERS)
def test_pieces_may_be_cut_anywhere(name: str) -> None:
    """Tokens of several letters, and rounds of several tokens."""
    text, found = ANSWERS[name]
    rng = random.Random(name)
    for _ in range(50):
        cuts = sorted(rng.sample(range(len(text) + 1), 4))
        reader = ChannelReader(READING, ())
        pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        deltas = [delta for piece in pieces for delta in reader.push(piece)]
        told = joined([*deltas, *reader.finish(is_cut=False)])
        assert [replace(each, call_id="") if isinstance(each, CallBegun) else each for each in told] == found


def test_what_is_cut_off_is_no_call() -> None:
    """Not as text either, and no half marker and no half header is shown."""
    assert read(CALL, is_cut=True) == []
    assert read("It is 3.<|chan", is_cut=True, special=False) == [ContentDelta("It is 3.")]
    assert read(f"{THOUGHT}<|end|><|start|>assis", is_cut=True) == [ReasoningDelta("They ask for 3.")]


def test_text_is_streamed_as_it_comes() -> None:
    """Reasoning counts as that from its first letter on, and nothing is held back that is certain."""
    reader = ChannelReader(READING, MARKERS)
    reader.push("<|channel|>", is_special=True)
    assert reader.push("analysis") == []
    reader.push("<|message|>", is_special=True)
    assert reader.is_reasoning
    assert reader.push("They") == [ReasoningDelta("They")]
    assert reader.held_len == 0


def test_the_template_names_the_format() -> None:
    """That of gpt-oss writes channels."""
    template = "{{ '<|start|>assistant<|channel|>final<|message|>' + content }}"
    assert choose_format("auto", template) == FORMATS["harmony"]


def test_calls_that_must_fit_are_written_bare() -> None:
    """By a grammar, as JSON; where tools are only offered the model writes as it learnt it."""
    tool = OfferedTool("count", {"type": "object"})
    for rules in (CallRules((tool,), needs_call=True), CallRules((replace(tool, strict=True),))):
        reading = fitting(READING, rules)
        assert reading.format == FORMATS["json"]
        assert answer_constraint(reading, rules, {}) is not None
    offered = CallRules((tool,), max_calls=1)
    assert fitting(READING, offered) == READING
    assert answer_constraint(READING, offered, {}) is None
