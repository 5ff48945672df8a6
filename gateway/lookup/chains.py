"""Index of where the last tokens of a text occurred before, by chains, as in zlib (Deutsch, RFC 1951, section 4).

A table has, for each hash of three tokens, the newest place where such a triple ends, and each place has a link to the
one before it. Hashes collide, so every place is compared token by token before it counts.
"""

from array import array
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import numpy as np

KEY_LEN = 3
CONTEXT_LEN = 32  # tokens that are compared
MAX_PLACES = 16  # that are looked for
MAX_STEPS = 2 * MAX_PLACES  # places that are looked at, those of other triples with the same hash included
MIN_BITS, MAX_BITS = 8, 16  # of a hash; numpy sorts numbers of 16 bits many times faster than wider ones
BULK = 96  # tokens; fewer are added faster one by one
SHIFT = 13
FIRST, SECOND, THIRD = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D  # odd and without a pattern
NOWHERE = -1
TOKEN_BITS = 32

# Written as a text, because the class cannot be subscripted when it runs.
Tokens: TypeAlias = "array[int] | memoryview"


class Context:
    """The last tokens of a text, up to CONTEXT_LEN, to find where they occurred before."""

    __slots__ = ("_bits", "_size", "hashed")

    def __init__(self, tokens: Tokens) -> None:
        last = tokens[-CONTEXT_LEN:]
        self._size = len(last)
        # One number of 32 bits a token, the last token's the highest: one comparison instead of 32.
        self._bits = int.from_bytes(last, "little")
        self.hashed: int | None = None
        """Hash of the last three tokens, if there are so many; a table takes the bits that it needs."""
        if self._size >= KEY_LEN:
            self.hashed = last[-3] * FIRST + last[-2] * SECOND + last[-1] * THIRD >> SHIFT

    def agreement(self, tokens: Tokens, place: int) -> int:
        """Number of tokens before a place of a text that are these, counted from the last."""
        start = place - self._size
        if start >= 0:
            bits = int.from_bytes(tokens[start:place], "little")
        else:
            bits = int.from_bytes(tokens[:place], "little") << -TOKEN_BITS * start
        return min(place, self._size - -(-(bits ^ self._bits).bit_length() // TOKEN_BITS))


class Match(NamedTuple):
    """A place in a text: the `length` tokens before tokens[place] are the last ones of what was looked for."""

    tokens: Tokens
    place: int
    length: int


class Chains:
    """A text that grows at its end, and where each triple of it occurred before. Token ids are in [0, 2^31)."""

    def __init__(self, expected_len: int = 0) -> None:
        """expected_len is how long the text may become; the table grows where it becomes longer."""
        self.tokens = array("i")
        self._links = array("i")
        self._heads = array("i")
        self._resize(expected_len)

    @property
    def num_bytes(self) -> int:
        """Bytes of all three tables, what they have reserved included."""
        tables = (self.tokens, self._links, self._heads)
        return sum(table.__sizeof__() for table in tables)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Appends tokens: about 0.5 us each, and 0.05 us of very many."""
        start = len(self.tokens)
        self.tokens.extend(token_ids)
        end = len(self.tokens)
        if end > len(self._heads) and len(self._heads) < 1 << MAX_BITS:
            self._resize(2 * end)
            start = 0
        if end - start >= BULK:
            self._link_all(start)
            return
        tokens, links, heads = self.tokens, self._links, self._heads
        mask = len(heads) - 1
        for place in range(start, end):
            if place < KEY_LEN - 1:
                links.append(NOWHERE)
                continue
            hashed = tokens[place - 2] * FIRST + tokens[place - 1] * SECOND + tokens[place] * THIRD
            key = hashed >> SHIFT & mask
            links.append(heads[key])
            heads[key] = place

    def repeats(self, context: Context) -> list[Match]:
        """Places where three or more tokens before the end, whose context it is, occurred before.

        The newest come first, at most MAX_PLACES.
        """
        # The newest place of all is the end itself.
        return self._follow(self._links[-1], context) if self.tokens else []

    def matches(self, context: Context) -> list[Match]:
        """Places in this text that match the end of another text, the newest first."""
        if context.hashed is None:
            return []
        return self._follow(self._heads[context.hashed & len(self._heads) - 1], context)

    def _follow(self, place: int, context: Context) -> list[Match]:
        tokens, links = self.tokens, self._links
        found: list[Match] = []
        for _ in range(MAX_STEPS):
            if place == NOWHERE or len(found) == MAX_PLACES:
                break
            length = context.agreement(tokens, place + 1)
            if length >= KEY_LEN:
                found.append(Match(tokens, place + 1, length))
            place = links[place]
        return found

    def _resize(self, expected_len: int) -> None:
        bits = min(max((expected_len - 1).bit_length(), MIN_BITS), MAX_BITS)
        self._heads = array("i", [NOWHERE]) * (1 << bits)
        self._links = array("i")

    def _link_all(self, start: int) -> None:
        """Links many places at once: those of one key are found by sorting."""
        first = max(start, KEY_LEN - 1)
        self._links.frombytes(np.full(len(self.tokens) - start, NOWHERE, np.int32).tobytes())
        # These arrays are views, and as long as there is one, what it shows cannot grow.
        tokens = np.frombuffer(self.tokens, np.int32)[first - 2 :].astype(np.int64)
        links, heads = np.frombuffer(self._links, np.int32), np.frombuffer(self._heads, np.int32)
        # Overflows change none of the bits that are used.
        hashed = tokens[:-2] * FIRST + tokens[1:-1] * SECOND + tokens[2:] * THIRD
        keys = (hashed >> SHIFT & len(heads) - 1).astype(np.uint16)
        order = np.argsort(keys, kind="stable")
        keys, places = keys[order], (order + first).astype(np.int32)
        begins = np.concatenate(([True], keys[1:] != keys[:-1]))
        before = np.concatenate(([NOWHERE], places[:-1]))
        links[places] = np.where(begins, heads[keys], before)
        ends = np.concatenate((begins[1:], [True]))
        heads[keys[ends]] = places[ends]
