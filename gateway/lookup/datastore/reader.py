"""A datastore to look up in (REST, arXiv 2311.08252): places whose context ends like a text's end.

REST sorts places by what follows and searches once for each length of the match. Here they are sorted by what stands
before them, the nearest token first, so that one search finds the longest match, and its neighbours are the next best.
"""

import hashlib
import mmap
from array import array
from bisect import bisect_left
from pathlib import Path
from typing import Self, TypeAlias

from gateway.lookup.datastore.layout import DEPTH, TABLE_WIDTH, DatastoreHead
from outrider.errors import ModelRefused, VocabularyMismatch
from outrider.model_files.vocabulary import Vocabulary

MAX_PLACES = 16
MIN_LENGTH = 3
TOKEN_BITS = 32

# Written as texts, because these classes cannot be subscripted when they run.
Ints: TypeAlias = "array[int] | memoryview[int]"
Shares: TypeAlias = "memoryview[float]"


class Tables:
    """The most frequent tokens of all documents, after each token and at all."""

    def __init__(self, bigrams: tuple[memoryview, Shares], unigrams: tuple[memoryview, Shares]) -> None:
        """Takes two views each, ids and shares: TABLE_WIDTH for each token, with a share of 0 where there are fewer."""
        self._bigrams = bigrams
        self._unigram = _pairs(*unigrams)

    def after(self, token_id: int) -> list[tuple[int, float]]:
        """Most frequent tokens after one, with their shares; the most frequent of all where it never occurs."""
        token_ids, shares = self._bigrams
        row = slice(TABLE_WIDTH * token_id, TABLE_WIDTH * (token_id + 1))
        return _pairs(token_ids[row], shares[row]) or self._unigram


class Datastore:
    """A file, mapped and never written; whatever is not looked at stays on the disk."""

    def __init__(self, path: Path) -> None:
        """Maps the file at a path. Raises ModelRefused when it is none, is cut off, or is of another version."""
        try:
            with path.open("rb") as file:
                head, start = DatastoreHead.read(path, file)
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelRefused(f"{path} cannot be read as a datastore: {error.strerror}") from None
        if len(mapped) != start + head.num_bytes:
            raise ModelRefused(f"{path} has {len(mapped)} bytes, but its head promises {start + head.num_bytes}")
        self.head = head
        self._path = path
        self._arrays = memoryview(mapped)[start:]
        # Signed, so that a separator is below 0, as nothing that can be proposed is.
        self.tokens = self._section("tokens").cast("i")
        """Token ids of all documents, below 0 between them."""
        self._places = self._section("places").cast("I" if head.place_bytes == 4 else "Q")
        self._offsets = self._section("offsets").cast("Q")
        self.tables = Tables(
            (self._section("bigram_tokens").cast("I"), self._section("bigram_shares").cast("f")),
            (self._section("unigram_tokens").cast("I"), self._section("unigram_shares").cast("f")),
        )

    @classmethod
    def open(cls, path: Path | str, vocabulary: Vocabulary) -> Self:
        """Maps a file of this vocabulary. Raises ModelRefused, and VocabularyMismatch about another vocabulary."""
        opened = cls(Path(path))
        difference = opened.head.vocabulary.difference(vocabulary)
        if difference is not None:
            raise VocabularyMismatch(f"The datastore {path} is of another vocabulary than the target: {difference}")
        return opened

    def find(self, tokens: Ints) -> list[tuple[int, int]]:
        """Places after the longest matches with the end of a text, and the lengths of these, the longest first.

        Lengths are MIN_LENGTH to DEPTH; at most MAX_PLACES are found. A token of the text takes 4 bytes.
        """
        last = tokens[-DEPTH:]
        if len(last) < MIN_LENGTH or not 0 <= last[-1] < len(self._offsets) - 1:
            return []
        # One number of 32 bits a token, the last token's the highest: to compare them is to compare token by token.
        wanted = int.from_bytes(last, "little") << TOKEN_BITS * (DEPTH - len(last))
        first, end = self._offsets[last[-1]], self._offsets[last[-1] + 1]
        right = bisect_left(self._places, wanted, first, end, key=self._context)
        left = right - 1
        found: list[tuple[int, int]] = []
        length_left = self._agreement(left, wanted, len(last)) if left >= first else 0
        length_right = self._agreement(right, wanted, len(last)) if right < end else 0
        while len(found) < MAX_PLACES and max(length_left, length_right) >= MIN_LENGTH:
            if length_left > length_right:
                found.append((self._places[left], length_left))
                left -= 1
                length_left = self._agreement(left, wanted, len(last)) if left >= first else 0
            else:
                found.append((self._places[right], length_right))
                right += 1
                length_right = self._agreement(right, wanted, len(last)) if right < end else 0
        return found

    def is_whole(self) -> bool:
        """Whether the arrays are those that the head was written for; reads the whole file."""
        return hashlib.blake2b(self._arrays, digest_size=32).hexdigest() == self.head.digest

    def _context(self, place: int) -> int:
        return int.from_bytes(self.tokens[place - DEPTH : place], "little")

    def _agreement(self, index: int, wanted: int, most: int) -> int:
        differing = self._context(self._places[index]) ^ wanted
        return min(most, DEPTH - -(-differing.bit_length() // TOKEN_BITS))

    def _section(self, name: str) -> memoryview:
        section = self.head.sections[name]
        return self._arrays[section.start : section.start + section.num_bytes]


def _pairs(token_ids: memoryview, shares: Shares) -> list[tuple[int, float]]:
    return [(token_id, share) for token_id, share in zip(token_ids, shares, strict=True) if share > 0]
