"""Size of what a JSON text becomes: counted before it is parsed, in milliseconds where parsing takes seconds.

Three bytes of text, `[],`, become 64 of memory and as long to look at as a prompt of a hundred words.
"""

from dataclasses import dataclass, field

from outrider.errors import check_count

# Each is far more than programs send, and 150 MB of memory at most when all of them come together.
MAX_KEYS = 50_000
"""Keys of all objects together. Unknown ones are found one by one."""
MAX_NODES = 50_000
"""Number of lists and objects."""
MAX_STRINGS = 150_000
"""Number of strings, keys among them."""
MAX_FRACTIONS = 50_000
"""Numbers with a point or an exponent, which take ten times as long to read as whole ones."""
MAX_VALUES = 1 << 20
"""A prompt may be a million token ids."""
# Bytes of memory of each, as Python's value and as what is made of it, by measurement with pydantic's models.
NODE_BYTES, STRING_BYTES, NUMBER_BYTES = 800, 128, 80
# First bytes of characters that make a string of Python's take four bytes for each of its characters.
WIDE = tuple(bytes([each]) for each in range(0xF0, 0xF5))


@dataclass(slots=True)
class JsonCounts:
    """Counts of JSON texts that come together, of which each is added before it is parsed.

    The counts are exact for what is JSON; of anything else a parser takes no more than they say before it stops.
    """

    keys: int = field(default=0, init=False)
    nodes: int = field(default=0, init=False)
    strings: int = field(default=0, init=False)
    fractions: int = field(default=0, init=False)
    values: int = field(default=0, init=False)
    text_bytes: int = field(default=0, init=False)

    def add(self, name: str, text: bytes) -> None:
        """Counts a text; raises InvalidRequest about that name where there is too much to parse."""
        width = 1 if text.isascii() and b"\\u" not in text else 2
        if b"\\u" in text or any(each in text for each in WIDE):
            width = 4
        self.text_bytes += width * len(text)
        if b"\\" in text:
            text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        self.strings += text.count(b'"') // 2
        check_count(name, self.strings, MAX_STRINGS, "strings")
        # What is between two quotes is the text of a string.
        bare = b"".join(text.split(b'"')[::2]) if b'"' in text else text
        nodes = bare.count(b"[") + bare.count(b"{")
        self.nodes += nodes
        check_count(name, self.nodes, MAX_NODES, "lists and objects")
        self.keys += bare.count(b":")
        check_count(name, self.keys, MAX_KEYS, "keys")
        words = bare.count(b"true") + bare.count(b"false")
        self.fractions += bare.count(b".") + bare.count(b"e") + bare.count(b"E") - words
        check_count(name, self.fractions, MAX_FRACTIONS, "numbers with a point or an exponent")
        # Lists and objects have one entry more than commas.
        self.values += bare.count(b",") + nodes + 1
        check_count(name, self.values, MAX_VALUES, "values")

    @property
    def memory_bytes(self) -> int:
        """Most bytes that they become, parsed and checked."""
        numbers = max(0, self.values - self.nodes - (self.strings - self.keys))
        return self.text_bytes + NODE_BYTES * self.nodes + STRING_BYTES * self.strings + NUMBER_BYTES * numbers
