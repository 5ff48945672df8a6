"""Reads JSON more strictly than Python does. Knows no HTTP.

Every fault names its place: repeated keys, NaN and infinity, text that cannot be encoded, nesting without end. Python's
parser lets all of them through or fails with a bare exception.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from outrider.errors import InvalidRequest, OutriderError

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"
Container: TypeAlias = "list[Json] | dict[str, Json]"
# Keys of all objects together. Unknown ones are found one by one, which takes the loop's time.
MAX_KEYS = 50_000
MAX_NAME_LEN = 200


class InvalidJson(OutriderError):
    """The caller must send JSON that every parser reads alike."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_JSON"
    exit_code = 64


def read_json(text: bytes, max_depth: int) -> Json:
    """The value of a text. Raises InvalidJson, and InvalidRequest about a value that is no JSON, naming its path."""
    decoded = _decoded(text)
    try:
        value: Json = json.loads(decoded, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise InvalidJson(f"The body is not JSON: {error.msg.lower()} in {place}") from None
    except RecursionError:
        raise _too_deep(max_depth) from None
    except ValueError:
        # Python converts no integer of more than 4,300 digits. As a float it is infinite, which has a place below.
        value = json.loads(decoded, object_pairs_hook=_object, parse_int=float)
    _check(value, max_depth)
    return value


def name_of(path: Sequence[str | int]) -> str:
    """How a place in the body is called. Keys are the client's, so they may be of any length."""
    name = ".".join(map(str, path)) or "body"
    return name if len(name) <= MAX_NAME_LEN else name[: MAX_NAME_LEN - 3] + "..."


def _decoded(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise InvalidJson(f"The body is not UTF-8: byte {error.start} is 0x{text[error.start]:02x}") from None


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        name = name_of([twice])
        raise InvalidJson(f"The body names {name!r} twice in one object", field=name)
    return found


def _too_deep(max_depth: int) -> InvalidJson:
    return InvalidJson(f"The body nests values more than {max_depth} deep")


def _check(value: Json, max_depth: int) -> None:
    """Looks at every value, containers in a list of their own because a stack of calls would end before they do."""
    containers: list[tuple[tuple[str | int, ...], Container]] = [((), [value])]
    num_keys = 0
    while containers:
        path, container = containers.pop()
        num_keys += len(container) if isinstance(container, dict) else 0
        if num_keys > MAX_KEYS:
            raise InvalidJson(f"The body has more than {MAX_KEYS} keys")
        if len(path) > max_depth:
            raise _too_deep(max_depth)
        for key, entry in _entries(path, container):
            if isinstance(entry, dict | list):
                containers.append(((*path, key), entry))
            elif (limit := _broken_limit(entry)) is not None:
                # The first step of the path is the list around the whole value.
                raise InvalidRequest(name_of((*path, key)[1:]), entry, limit)


def _broken_limit(entry: Json) -> str | None:
    """What a value must be that Python takes and JSON does not."""
    if isinstance(entry, float) and not math.isfinite(entry):
        return "a finite number"
    return "text without lone surrogates" if isinstance(entry, str) and not _is_text(entry) else None


def _entries(path: Sequence[str | int], container: Container) -> Iterator[tuple[str | int, Json]]:
    if isinstance(container, list):
        yield from enumerate(container)
        return
    for key, entry in container.items():
        if not _is_text(key):
            place = name_of(path[1:])
            raise InvalidJson(f"{place} has the key {name_of([key])!r}, which is not text", field=place)
        yield key, entry


def _is_text(value: str) -> bool:
    """Whether every code point is a character: half a surrogate pair cannot be encoded."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
