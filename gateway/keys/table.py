"""The file of keys, read and checked: a table a key, by name, with the key's SHA-256 and what its holder may do.

Keys are random and long, so a plain hash of one tells nothing, and a file that is lost opens no door. No sentence here
repeats what may be a key by mistake.
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
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
SHA256 = re.compile(r"[0-9a-f]{64}")
OF_NOTHING = hashlib.sha256(b"").digest()


class KeysRefused(OutriderError):
    """The operator must mend the file of keys, which the sentence names with the place in it."""

    status = "FAILED_PRECONDITION"
    reason = "KEYS_REFUSED"
    exit_code = 78


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What the holder of a key may use; None is without a limit."""

    concurrent_samples: int | None = None
    """Samples that run or wait at a time."""
    requests_per_minute: int | None = None
    """Requests that generate."""
    tokens_per_minute: int | None = None
    """Of prompts and answers together."""
    max_tokens: int | None = None
    """Of an answer."""


@dataclass(frozen=True, slots=True)
class Key:
    """Who a key belongs to, and what they may do."""

    name: str
    sha256: bytes = field(repr=False)
    limits: KeyLimits
    priority: int = 0
    """Requests of a smaller one get a place before others; vLLM counts so too."""
    metrics: bool = False
    """Whether it opens the figures, which tell of all keys."""


LIMITS = tuple(each.name for each in fields(KeyLimits))


def find_key(keys: Collection[Key], given: bytes) -> Key | None:
    """The key of that text. How long it takes depends on how many keys there are, and on nothing else."""
    digest = hashlib.sha256(given).digest()
    found = None
    for key in keys:
        if hmac.compare_digest(key.sha256, digest):
            found = key
    return found


def read_keys(path: Path) -> tuple[bytes, list[Key]]:
    """What is in a file, and the keys that it lists. Raises KeysRefused about the first thing wrong with it."""
    try:
        if not path.is_file():
            raise KeysRefused(f"{path} is no file of keys: it is missing, or not a regular file", file=path)
        with path.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeysRefused(f"{path} cannot be read as a file of keys: {error.strerror}", file=path) from None
    return content, parse_keys(content, str(path))


def parse_keys(content: bytes, path: str) -> list[Key]:
    """The keys that a file lists; none lets nobody in. Raises KeysRefused about the first thing wrong with it."""
    if len(content) > MAX_FILE_BYTES:
        raise KeysRefused(f"{path} has more than {MAX_FILE_BYTES} bytes, the most of a file of keys", file=path)
    try:
        tables = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        # The parser may quote what it found, which could be a key; where it found it always comes last.
        where = re.search(r"\(at .*\)$", str(error))
        raise KeysRefused(f"{path} is not TOML in UTF-8 {where[0] if where else ''}".rstrip(), file=path) from None
    if len(tables) > MAX_KEYS:
        raise KeysRefused(f"{path} has {len(tables)} keys, but must have at most {MAX_KEYS}", file=path)
    names: dict[bytes, str] = {}
    keys = []
    for number, (name, table) in enumerate(tables.items(), start=1):
        # Neither is repeated: it may be the key itself, written into the wrong place.
        if not NAME.fullmatch(name):
            what = "a name must have 1 to 64 letters, digits, '.', '_' and '-'"
            raise KeysRefused(f"{path}: entry {number} has a name that is none: {what}", file=path)
        if not isinstance(table, dict):
            what = 'a table, [NAME] with sha256 = "..." below it'
            raise KeysRefused(f"{path}: entry {number} is no table, but must be {what}", file=path)
        key = _key(path, name, table)
        if (other := names.setdefault(key.sha256, name)) != name:
            raise _refused(path, name, "sha256", f"is that of [{other}] too, but must be another one for each name")
        keys.append(key)
    return keys


def _key(path: str, name: str, table: Mapping[str, object]) -> Key:
    for other in table:
        if other not in ("sha256", "priority", "metrics", *LIMITS):
            what = f"is unknown; a key has sha256, priority, metrics, {', '.join(LIMITS)}"
            raise _refused(path, name, other[:80], what)
    metrics = table.get("metrics", False)
    if not isinstance(metrics, bool):
        raise _refused(path, name, "metrics", f"is {metrics!r}, but must be true or false")
    limits = {each: _number(path, name, each, table[each], 1) for each in LIMITS if each in table}
    priority = _number(path, name, "priority", table.get("priority", 0), -MAX_LIMIT)
    return Key(name, _sha256(path, name, table), KeyLimits(**limits), priority, metrics)


def _sha256(path: str, name: str, table: Mapping[str, object]) -> bytes:
    given = table.get("sha256")
    if given is None:
        raise _refused(path, name, "sha256", "is missing")
    # Not repeated: it may be the key itself.
    if not isinstance(given, str) or not SHA256.fullmatch(given):
        shape = f"text of {len(given)} characters" if isinstance(given, str) else "no text"
        raise _refused(path, name, "sha256", f"is {shape}, but must be 64 hexadecimal digits in small letters")
    digest = bytes.fromhex(given)
    if digest == OF_NOTHING:
        raise _refused(path, name, "sha256", "is that of an empty text, but must be that of a key")
    return digest


def _number(path: str, name: str, field: str, value: object, least: int) -> int:
    # True is an int in Python, and a mistake here.
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_LIMIT:
        limit = f"a whole number in [{least}, {MAX_LIMIT}]"
        raise _refused(path, name, field, f"is {str(value)[:80]!r}, but must be {limit}")
    return value


def _refused(path: str, name: str, field: str, what: str) -> KeysRefused:
    return KeysRefused(f"{path}: {field} of [{name}] {what}", file=path, table=name, field=field)
