"""The file of a datastore: a mark, the length of a head, the head in JSON, and arrays, each from a multiple of 64 on.

All numbers are little-endian. Token ids are u32, with SEPARATOR between two documents and DEPTH times before the first.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from outrider.errors import ModelRefused
from outrider.model_files.vocabulary import Vocabulary

MARK = b"OUTRDST\n"
VERSION = 1
HEAD_START = 16
MAX_HEAD_BYTES = 1 << 24
ALIGNMENT = 64
SEPARATOR = 2**32 - 1
DEPTH = 16  # tokens before a place that it is sorted by
TABLE_WIDTH = 8  # most frequent tokens after each token


@dataclass(frozen=True, slots=True)
class Section:
    """Place of an array after the head, in bytes."""

    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class DatastoreHead:
    """Facts that a file states about itself. `digest` is BLAKE2b, 32 bytes in hex, of everything after the head."""

    vocabulary: Vocabulary
    num_documents: int
    num_tokens: int
    """Number of tokens of the documents, without separators."""
    num_places: int
    place_bytes: int
    sections: Mapping[str, Section]
    digest: str

    @property
    def num_bytes(self) -> int:
        """Number of bytes after the head."""
        return max(section.start + section.num_bytes for section in self.sections.values())

    def packed(self) -> bytes:
        """The beginning of the file, up to where the arrays begin."""
        vocabulary = {"size": self.vocabulary.size, "digests": [f"{digest:016x}" for digest in self.vocabulary.digests]}
        sections = {name: asdict(section) for name, section in self.sections.items()}
        values = {name: getattr(self, name) for name in ("num_documents", "num_tokens", "num_places", "place_bytes")}
        fields = {"version": VERSION, **values, "vocabulary": vocabulary, "sections": sections, "digest": self.digest}
        text = json.dumps(fields).encode()
        text += b" " * (-(HEAD_START + len(text)) % ALIGNMENT)
        return MARK + len(text).to_bytes(8, "little") + text

    @classmethod
    def read(cls, path: Path, file: BinaryIO) -> tuple[Self, int]:
        """The head of a file, and where its arrays begin. Raises ModelRefused."""
        start = file.read(HEAD_START)
        if start[: len(MARK)] != MARK:
            raise ModelRefused(f"{path} is no datastore")
        length = int.from_bytes(start[len(MARK) :], "little")
        text = file.read(min(length, MAX_HEAD_BYTES))
        if len(text) < length:
            raise ModelRefused(f"{path} is cut off within its head")
        try:
            fields: dict[str, Any] = json.loads(text)
            version = fields["version"]
            if version != VERSION:
                raise ModelRefused(f"{path} is a datastore of version {version}; this version reads {VERSION}")
            found = cls._parsed(fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelRefused(f"{path} has a head that is none of a datastore: {error!r}") from None
        return found, HEAD_START + length

    @classmethod
    def _parsed(cls, fields: Mapping[str, Any]) -> Self:
        """Raises ValueError, KeyError, TypeError or AttributeError about fields that cannot be right."""
        size, digests = int(fields["vocabulary"]["size"]), fields["vocabulary"]["digests"]
        sections = {name: Section(**place) for name, place in fields["sections"].items()}
        head = cls(
            vocabulary=Vocabulary(size, tuple(int(digest, 16) for digest in digests)),
            num_documents=int(fields["num_documents"]),
            num_tokens=int(fields["num_tokens"]),
            num_places=int(fields["num_places"]),
            place_bytes=int(fields["place_bytes"]),
            sections=sections,
            digest=fields["digest"],
        )
        expected = {
            "tokens": 4 * (DEPTH + head.num_tokens + head.num_documents),
            "places": head.place_bytes * head.num_places,
            "offsets": 8 * (size + 1),
            "unigram_tokens": 4 * TABLE_WIDTH,
            "unigram_shares": 4 * TABLE_WIDTH,
            "bigram_tokens": 4 * TABLE_WIDTH * size,
            "bigram_shares": 4 * TABLE_WIDTH * size,
        }
        if head.place_bytes not in {4, 8} or not re.fullmatch("[0-9a-f]{64}", head.digest):
            raise ValueError("counts, or the digest")
        for name, num_bytes in expected.items():
            section = sections[name]
            if section.num_bytes != num_bytes or section.start < 0 or section.start % ALIGNMENT:
                raise ValueError(f"the place of {name}")
        return head
