"""Pieces of an answer as it grows: text, reasoning, and calls of tools, each apart from the others."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the text that is meant for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool begins; calls of an answer are numbered from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of a call, which together are a JSON object as text."""

    index: int
    text: str


Delta: TypeAlias = ContentDelta | ReasoningDelta | CallBegun | CallArguments


def reasoning_of(deltas: Iterable[Delta]) -> str:
    """All reasoning in some pieces of an answer."""
    return "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
