"""JSON that every parser reads alike, in Python's values, and the names of places in it."""

import collections
import json
import math
import re
from collections.abc import Iterable
from typing import TypeAlias

from gateway.rest.errors import InvalidJson
from outrider.errors import InvalidRequest

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"
Path: TypeAlias = tuple[str | int, ...]
MAX_NAME_LEN = 200
# Half of a surrogate pair, which no encoding can carry; whole pairs have become characters already.
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# Only such an escape can be one.
HALF = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(text: bytes, max_depth: int) -> Json:
    """The value of a JSON text that every parser would read alike: no repeated keys, NaN, infinity, lone surrogates.

    Raises InvalidJson, and InvalidRequest about a value that is no JSON, naming its path.
    """
    try:
        decoded = text.decode()
    except UnicodeDecodeError as error:
        raise InvalidJson(f"The body is not UTF-8: byte {error.start} is 0x{text[error.start]:02x}") from None
    try:
        value = _loaded(decoded)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise InvalidJson(f"The body is not JSON: {error.msg.lower()} in {place}") from None
    except RecursionError:
        raise InvalidJson(f"The body nests values more than {max_depth} deep") from None
    _check_value(value, (), max_depth, may_be_lone=HALF.search(decoded) is not None)
    return value


def name_of(path: Iterable[str | int]) -> str:
    """The name of a place in the body, of bounded length: keys are the client's."""
    name = ".".join(map(str, path)) or "body"
    return name if len(name) <= MAX_NAME_LEN else name[: MAX_NAME_LEN - 3] + "..."


def _loaded(text: str) -> Json:
    try:
        value: Json = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError:
        raise
    except ValueError:
        # Python converts no integer of more than 4,300 digits. As a float it is infinite, which has a place; and what
        # comes after it is read as well, which may be no JSON.
        value = json.loads(text, object_pairs_hook=_object, parse_int=float)
    return value


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in collections.Counter(key for key, _ in pairs).items() if count > 1)
        name = name_of([twice])
        raise InvalidJson(f"The body names {name!r} twice in one object", field=name)
    return found


def _check_value(value: Json, path: Path, max_depth: int, *, may_be_lone: bool) -> None:
    """Raises an error about what Python takes and JSON does not, and about a value that is nested too deep."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(name_of(path), value, "a finite number")
    if may_be_lone and isinstance(value, str) and LONE_SURROGATE.search(value):
        raise InvalidRequest(name_of(path), value, "text without lone surrogates")
    if not isinstance(value, dict | list):
        return
    if len(path) >= max_depth:
        raise InvalidJson(f"The body nests values more than {max_depth} deep")
    # Token ids come by the million, and there is nothing to see in a number without a fraction.
    if isinstance(value, list) and set(map(type, value)) <= ({int} if may_be_lone else {int, str}):
        return
    entries: Iterable[tuple[str | int, Json]] = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in entries:
        if may_be_lone and isinstance(key, str) and LONE_SURROGATE.search(key):
            place = name_of(path)
            raise InvalidJson(f"{place} has the key {name_of([key])!r}, which is not text", field=place)
        # A call and a path for each of them would take longer than all the rest.
        kind = type(each)
        if kind is dict or kind is list or kind is float or (may_be_lone and kind is str):
            _check_value(each, (*path, key), max_depth, may_be_lone=may_be_lone)
