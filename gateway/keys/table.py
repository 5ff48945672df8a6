"""The file of keys, read and checked: a table a key, by name, with the key's SHA-256 and what its holder may do.

Keys are random and long, so a plain hash of one reveals nothing, and a file that is lost opens no door. What is refused
may be a key in the wrong place, so no sentence here repeats a word of the file: each says the number of the entry.
"""

import hashlib
import hmac
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from outrider.errors import OutriderError

MAX_FILE_BYTES = 1 << 20
# All are compared with each key that comes, which takes about 0.2 ms then.
MAX_KEYS = 1000
MAX_LIMIT = 1_000_000_000
# The first no dot: workers count in files of these names.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SHA256 = re.compile(r"[0-9a-f]{64}")
OF_NOTHING = hashlib.sha256(b"").digest()
# Of what TOML has beside dates and times.
KINDS = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "a table"}


class KeysRefused(OutriderError):
    """The operator must mend the file of keys, which the sentence names with the place in it."""

    status = "FAILED_PRECONDITION"
    reason = "KEYS_REFUSED"
    exit_code = 78


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of the holder of a key; None is without a limit."""

    concurrent_samples: int | None = None
    """Samples that run or wait at a time."""
    requests_per_minute: int | None = None
    """Number of requests that generate."""
    tokens_per_minute: int | None = None
    """Tokens of prompts and answers together."""
    max_tokens: int | None = None
    """Tokens of one answer."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key, the name of its holder, and what they may do."""

    name: str
    sha256: bytes = field(repr=False)
    limits: KeyLimits
    priority: int = 0
    """Requests of a smaller one get a place before others; vLLM counts so too."""
    metrics: bool = False
    """Whether it opens the figures, which are about all keys."""


LIMITS = tuple(each.name for each in fields(KeyLimits))


def find_key(keys: Collection[Key], given: bytes) -> Key | None:
    """The key of that text. How long it takes depends on how many keys there are, and on nothing else."""
    digest = hashlib.sha256(given).digest()
    found = None
    for key in keys:
        if hmac.compare_digest(key.sha256, digest):
            found = key
    return found


def read_file(path: Path) -> bytes:
    """Contents of a file, as far as a file of keys may be long. Raises KeysRefused about one that cannot be read."""
    try:
        if not path.is_file():
            raise KeysRefused(f"{path} is no file of keys: it is missing, or not a regular file", file=path)
        with path.open("rb") as opened:
            return opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeysRefused(f"{path} cannot be read as a file of keys: {error.strerror}", file=path) from None


def parse_keys(content: bytes, path: str) -> list[Key]:
    """Keys that a file lists; an empty list admits no client. Raises KeysRefused about the first fault that it has."""
    if len(content) > MAX_FILE_BYTES:
        raise KeysRefused(f"{path} has more than {MAX_FILE_BYTES} bytes, the most of a file of keys", file=path)
    try:
        tables = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        # The parser may quote what it found; where it found it always comes last. Tables in tables without end, and
        # numbers of thousands of digits, it refuses in ways of its own.
        where = re.search(r"\(at .*\)$", str(error))
        raise KeysRefused(f"{path} is not TOML in UTF-8 {where[0] if where else ''}".rstrip(), file=path) from None
    if len(tables) > MAX_KEYS:
        raise KeysRefused(f"{path} has {len(tables)} keys, but must have at most {MAX_KEYS}", file=path)
    keys: dict[bytes, Key] = {}
    for number, (name, table) in enumerate(tables.items(), start=1):
        entry = Entry(path, number)
        if not NAME.fullmatch(name):
            what = "1 to 64 letters, digits, '.', '_' and '-', of which the first is a letter or a digit"
            raise entry.refused("name", f"is none, but must have {what}")
        if SHA256.fullmatch(name.lower()):
            raise entry.refused("name", "has the shape of a key or of a hash, but must be one that everybody may read")
        if not isinstance(table, dict):
            raise entry.refused("value", f'is {_kind(table)}, but must be a table, [NAME] with sha256 = "..." below it')
        key = _key(entry, name, table)
        if key.sha256 in keys:
            raise entry.refused("sha256", "is that of another entry too, but must be another one for each name")
        keys[key.sha256] = key
    for number, name in enumerate(tables, start=1):
        if hashlib.sha256(name.encode()).digest() in keys:
            raise Entry(path, number).refused("name", "is a key of this file, but must be one that everybody may read")
    return list(keys.values())


@dataclass(frozen=True, slots=True)
class Entry:
    """Place of a fault: the file, and which of its tables."""

    path: str
    number: int

    def refused(self, field: str, what: str) -> KeysRefused:
        message = f"{self.path}: {field} of entry {self.number} {what}"
        return KeysRefused(message, file=self.path, entry=self.number, field=field)


def _key(entry: Entry, name: str, table: Mapping[str, object]) -> Key:
    for number, other in enumerate(table, start=1):
        if other not in ("sha256", "priority", "metrics", *LIMITS):
            what = f"is unknown; a key has sha256, priority, metrics, {', '.join(LIMITS)}"
            raise entry.refused(f"field {number}", what)
    metrics = table.get("metrics", False)
    if not isinstance(metrics, bool):
        raise entry.refused("metrics", f"is {_kind(metrics)}, but must be true or false")
    limits = {each: _number(entry, each, table[each], 1) for each in LIMITS if each in table}
    priority = _number(entry, "priority", table.get("priority", 0), -MAX_LIMIT)
    given = table.get("sha256")
    if given is None:
        raise entry.refused("sha256", "is missing")
    if not isinstance(given, str) or not SHA256.fullmatch(given):
        shape = f"text of {len(given)} characters" if isinstance(given, str) else _kind(given)
        raise entry.refused("sha256", f"is {shape}, but must be 64 hexadecimal digits in small letters")
    digest = bytes.fromhex(given)
    if digest == OF_NOTHING:
        raise entry.refused("sha256", "is that of an empty text, but must be that of a key")
    return Key(name, digest, KeyLimits(**limits), priority, metrics)


def _number(entry: Entry, field: str, value: object, least: int) -> int:
    # True is an int in Python, and a mistake here.
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_LIMIT:
        raise entry.refused(field, f"is {_kind(value)}, but must be a whole number in [{least}, {MAX_LIMIT}]")
    return value


def _kind(value: object) -> str:
    """Kind of a value, in words."""
    return KINDS.get(type(value), "a date or a time")
