"""Finds stop strings in text that arrives in pieces. Never emits text past one, or text that may become one.

Which stop string wins does not depend on how the text is cut: the one that is complete first, and of several that are
complete at the same character the longest. Each stop string is followed by the automaton of Knuth, Morris and Pratt
(1977), whose state is the length of the longest prefix that the text ends with, so the cost per character is constant.
"""

from collections.abc import Sequence


class StopScanner:
    """Passes text through and holds back its tail while that may still turn into a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Takes stop strings, none of them empty."""
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Takes more text; returns the text that is final now. After a stop string was found it returns nothing."""
        if self.found is not None or not self._automata:
            return "" if self.found is not None else piece
        for index, character in enumerate(piece):
            complete = [automaton.stop for automaton in self._automata if automaton.advance(character)]
            if complete:
                self.found = max(complete, key=len)
                return self._release(piece[: index + 1], len(self.found))
        return self._release(piece, max(automaton.matched_len for automaton in self._automata))

    def flush(self) -> str:
        """Returns what is still held: no more text comes, so it cannot become a stop string."""
        return self._release("", 0) if self.found is None else ""

    def _release(self, piece: str, held_len: int) -> str:
        """Emits everything but the last held_len characters, which stay held unless a stop string was found."""
        text = self._held + piece
        cut = len(text) - held_len
        self._held = "" if self.found is not None else text[cut:]
        return text[:cut]


class _Automaton:
    """Follows one stop string; matched_len is how much of it the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched_len = 0
        self._borders = [0] * len(stop)
        for index in range(1, len(stop)):
            self._borders[index] = self._next(self._borders[index - 1], stop[index])

    def advance(self, character: str) -> bool:
        """Takes one character; tells whether the stop string is complete with it."""
        self.matched_len = self._next(self.matched_len, character)
        return self.matched_len == len(self.stop)

    def _next(self, length: int, character: str) -> int:
        while length and self.stop[length] != character:
            length = self._borders[length - 1]
        return length + (self.stop[length] == character)
