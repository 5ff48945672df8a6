"""Ids of tokens, as digests that two services can compare; needs no tokenizer."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Self

from outrider.errors import ModelRefused

IDS_PER_DIGEST = 1024
DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class VocabularyDigests:
    """Size (one more than the largest id) and one 64-bit digest of (id, token) for every 1,024 ids, in order."""

    size: int
    digests: tuple[int, ...]

    @classmethod
    def of(cls, tokens: Iterable[tuple[str, int]]) -> Self:
        """The vocabulary of pairs of token and id."""
        by_id = sorted((token_id, token) for token, token_id in tokens)
        if not by_id:
            raise ModelRefused("The tokenizer has no tokens.")
        size = by_id[-1][0] + 1
        digests = [0] * -(-size // IDS_PER_DIGEST)
        for number, chunk in groupby(by_id, lambda pair: pair[0] // IDS_PER_DIGEST):
            state = hashlib.blake2b(digest_size=DIGEST_BYTES)
            for token_id, token in chunk:
                data = token.encode("utf-8", "surrogatepass")
                # The length goes in too, or a token could borrow bytes from its neighbour.
                state.update(token_id.to_bytes(4, "little") + len(data).to_bytes(4, "little") + data)
            digests[number] = int.from_bytes(state.digest(), "little")
        return cls(size, tuple(digests))

    def difference(self, other: "VocabularyDigests") -> str | None:
        """Sentence about the first difference, or None when the two are the same."""
        if self.size != other.size:
            return f"The vocabularies have {self.size} and {other.size} ids."
        if len(self.digests) != len(other.digests):
            return f"The vocabularies of {self.size} ids have {len(self.digests)} and {len(other.digests)} digests."
        for number, (own, others) in enumerate(zip(self.digests, other.digests, strict=True)):
            if own != others:
                first = number * IDS_PER_DIGEST
                last = min(first + IDS_PER_DIGEST, self.size) - 1
                return f"The vocabularies of {self.size} ids differ between the ids {first} and {last}."
        return None
