"""Puts the deltas of an answer together to its parts: stretches of text, of reasoning, and calls, in order."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from outrider.answer import CallArguments, CallBegun, ContentDelta, Delta, ReasoningDelta
from outrider.errors import ProtocolViolation


@dataclass(slots=True)
class Part:
    """A part of an answer; only a call has a name and an id, and its text are its arguments."""

    kind: Literal["text", "reasoning", "call"]
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole text of the part."""
        return "".join(self.pieces)

    @property
    def empty(self) -> "Part":
        """The part as it was before anything of it came."""
        return replace(self, pieces=[])


@dataclass(slots=True)
class Parts:
    """Parts of an answer so far; the last one is the one that still grows."""

    parts: list[Part] = field(default_factory=list)

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> Self:
        """Parts that all deltas make."""
        parts = cls()
        for delta in deltas:
            parts.add(delta)
        return parts

    def add(self, delta: Delta) -> bool:
        """Takes a delta; returns whether a part begins with it. Raises ProtocolViolation about arguments of no call."""
        match delta:
            case ContentDelta():
                return self._grow("text", delta.text)
            case ReasoningDelta():
                return self._grow("reasoning", delta.text)
            case CallBegun():
                self.parts.append(Part("call", len(self.parts), delta.call_id, delta.name))
                return True
            case CallArguments():
                if not self.parts or self.parts[-1].kind != "call":
                    raise ProtocolViolation(f"arguments of call {delta.index} came outside of it")
                self.parts[-1].pieces.append(delta.text)
                return False

    def _grow(self, kind: Literal["text", "reasoning"], text: str) -> bool:
        begins = not self.parts or self.parts[-1].kind != kind
        if begins:
            self.parts.append(Part(kind, len(self.parts)))
        self.parts[-1].pieces.append(text)
        return begins
