"""Continuation of the longest repetition of a text's end, earlier in the same text: a guess that needs no model.

Saxena, "Prompt lookup decoding", 2023; the places of equal keys are chained as in a compressor (Ziv and Lempel, 1977).
"""

from collections.abc import Sequence

KEY_LEN = 2
MAX_PLACES = 16
MAX_MATCH = 8


class TextIndex:
    """Index of the places where each pair of tokens of a text occurred."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}
        # For the end of each pair the place where the same pair ended before, -1 for none.
        self._before: list[int] = []

    def follow(self, token_ids: list[int], length: int) -> None:
        """Makes this the index of the first `length` tokens, whatever it was the index of."""
        known = self._token_ids
        if len(known) > length or token_ids[: len(known)] != known:
            pairs = zip(known, token_ids[:length], strict=False)
            common = next((place for place, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(known), length))
            while len(known) > common:
                key, place = tuple(known[-KEY_LEN:]), self._before.pop()
                if place < 0:
                    del self._last[key]
                else:
                    self._last[key] = place
                known.pop()
        first, last, before = len(known), self._last, self._before
        known += token_ids[first:length]
        for place in range(first, length):
            key = tuple(known[max(place + 1 - KEY_LEN, 0) : place + 1])
            before.append(last.get(key, -1))
            last[key] = place

    def find(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """Number of tokens at the end of these that are repeated, up to MAX_MATCH, and where the repeated ones end.

        The text begins with what is indexed. Of equally long repetitions the last one counts; (0, -1) for none of
        KEY_LEN tokens at the last MAX_PLACES places.
        """
        end = len(token_ids) - 1
        place, best = self._last.get(tuple(token_ids[-KEY_LEN:]), -1), (0, -1)
        for _ in range(MAX_PLACES):
            if place < 0 or best[0] == MAX_MATCH:
                break
            # The end itself is no repetition of it.
            if place != end:
                size = KEY_LEN
                while size < MAX_MATCH and size <= place and token_ids[place - size] == token_ids[end - size]:
                    size += 1
                best = max(best, (size, place), key=lambda found: found[0])
            place = self._before[place]
        return best


def continue_from(token_ids: Sequence[int], place: int, count: int) -> list[int]:
    """The `count` tokens after a place; after the end those that were found so far are repeated."""
    copied = list(token_ids[place + 1 : place + 1 + count])
    period = len(token_ids) - 1 - place
    while len(copied) < count:
        copied.append(copied[len(copied) - period])
    return copied
