"""What is wrong with a body, in one error that names the field, its value and the limit: first as JSON, then as a
request. The application's exception handler is at the end.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gateway.rest.errors import (
    InvalidJson,
    MissingParameter,
    UnknownParameter,
    UnknownRoute,
    WrongMethod,
    error_response,
)
from outrider.errors import InvalidRequest, OutriderError, Unsupported, shown
from outrider.parameters import KEY_MARK

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"
Finding: TypeAlias = Mapping[str, Any]
Path: TypeAlias = tuple[str | int, ...]
# Keys of all objects together. Unknown ones are found one by one, which takes the loop's time.
MAX_KEYS = 50_000
MAX_NAME_LEN = 200
# What pydantic calls a value where only null may stand: the mark of a field that is known but not served.
UNSERVED_MARK = "none_required"
# Half of a surrogate pair, which no encoding can carry; whole pairs have become characters already.
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
SHORT = {"string_too_short": "characters", "too_short": "entries"}
# Fields of which only some values are served; the others are not wrong, but not served either.
CHOICES = frozenset({"type", "tool_choice", "store", "service_tier"})


def read_json(text: bytes, max_depth: int) -> Json:
    """The value of a JSON text that every parser would read alike: no repeated keys, NaN, infinity, lone surrogates.

    Raises InvalidJson, and InvalidRequest about a value that is no JSON, naming its path.
    """
    try:
        decoded = text.decode()
    except UnicodeDecodeError as error:
        raise InvalidJson(f"The body is not UTF-8: byte {error.start} is 0x{text[error.start]:02x}") from None
    try:
        value: Json = json.loads(decoded, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise InvalidJson(f"The body is not JSON: {error.msg.lower()} in {place}") from None
    except RecursionError:
        raise InvalidJson(f"The body nests values more than {max_depth} deep") from None
    except ValueError:
        # Python converts no integer of more than 4,300 digits. As a float it is infinite, which has a place below.
        value = json.loads(decoded, object_pairs_hook=_object, parse_int=float)
    if _checked_keys(value, (), max_depth) > MAX_KEYS:
        raise InvalidJson(f"The body has more than {MAX_KEYS} keys")
    return value


def name_of(path: Iterable[str | int]) -> str:
    """The name of a place in the body, of bounded length: keys are the client's."""
    name = ".".join(map(str, path)) or "body"
    return name if len(name) <= MAX_NAME_LEN else name[: MAX_NAME_LEN - 3] + "..."


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        name = name_of([twice])
        raise InvalidJson(f"The body names {name!r} twice in one object", field=name)
    return found


def _checked_keys(value: Json, path: Path, max_depth: int) -> int:
    """How many keys the objects in a value have; raises an error about what Python takes and JSON does not."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(name_of(path), value, "a finite number")
    if isinstance(value, str) and LONE_SURROGATE.search(value):
        raise InvalidRequest(name_of(path), value, "text without lone surrogates")
    if not isinstance(value, dict | list):
        return 0
    if len(path) >= max_depth:
        raise InvalidJson(f"The body nests values more than {max_depth} deep")
    if isinstance(value, list):
        # Token ids come by the million, and there is nothing to see in a number without a fraction.
        return sum(
            _checked_keys(each, (*path, at), max_depth) for at, each in enumerate(value) if type(each) is not int
        )
    for key in value:
        if LONE_SURROGATE.search(key):
            place = name_of(path)
            raise InvalidJson(f"{place} has the key {name_of([key])!r}, which is not text", field=place)
    return len(value) + sum(_checked_keys(each, (*path, key), max_depth) for key, each in value.items())


def error_about(findings: Sequence[Finding], body: object) -> OutriderError:
    """The error about the first field in which pydantic found a fault, and there about the innermost value.

    A value that may be of several kinds is found wrong once for each; these findings become one.
    """
    paths = [_path(finding, body) for finding in findings]
    path = max((path for path in paths if path[:1] == paths[0][:1]), key=len)
    at_fault = [finding for finding, each in zip(findings, paths, strict=True) if each == path]
    finding = at_fault[0]
    kind, value = finding["type"], finding["input"]
    field = name_of(part for part in path if part != KEY_MARK)
    if kind == "missing":
        return MissingParameter(field)
    if kind == "extra_forbidden":
        return UnknownParameter(f"{field} is not a known parameter", field=field)
    if kind == UNSERVED_MARK:
        return Unsupported(f"{field} is not served; leave it out", field=field)
    if path[-1:] and path[-1] in CHOICES and any(each["type"] == "literal_error" for each in at_fault):
        limit = " or ".join(map(_limit, at_fault))
        return Unsupported(f"{field} is {shown(value)}, but only {limit} is served", field=field, limit=limit)
    if kind == "too_long" and isinstance(value, list | dict):
        return InvalidRequest.too_many(field, len(value), finding["ctx"]["max_length"])
    if path[-1:] == (KEY_MARK,):
        field = f"{field} key"
    return InvalidRequest(field, value, " or ".join(dict.fromkeys(map(_limit, at_fault))))


def _path(finding: Finding, body: object) -> Path:
    """The keys and indices that lead to a value of the body, without the names of kinds that pydantic adds."""
    parts = tuple(finding["loc"])
    parts = parts[1:] if parts[:1] == ("body",) else parts
    path: list[str | int] = []
    for part in parts:
        is_index = isinstance(body, list) and isinstance(part, int) and part < len(body)
        if is_index or (isinstance(body, dict) and part in body):
            body = body[part]  # type: ignore[index]
        elif finding["type"] != "missing" or part != parts[-1]:
            continue
        path.append(part)
    return (*path, KEY_MARK) if parts[-1:] == (KEY_MARK,) else tuple(path)


def _limit(finding: Finding) -> str:
    """What the value must be."""
    if finding["type"] in {"model_type", "model_attributes_type", "dict_type"}:
        return "an object"
    if finding["type"] in SHORT:
        return f"at least {finding['ctx']['min_length']} {SHORT[finding['type']]} long"
    if finding["type"] == "string_pattern_mismatch":
        return f"text that matches {finding['ctx']['pattern']}"
    message = str(finding["msg"])
    for prefix in ("Input should be ", "Value error, "):
        message = message.removeprefix(prefix)
    return message[:1].lower() + message[1:]


async def handle_error(request: Request, error: Exception) -> Response:
    """The answer to an error of ours, to a body that is not what the route takes, and to what the framework refuses."""
    path = request.url.path[:200]
    match error:
        case OutriderError():
            return error_response(error)
        case RequestValidationError():
            return error_response(error_about(error.errors(), error.body))
        case HTTPException(status_code=405):
            wrong = WrongMethod(f"{path} does not take {request.method}", method=request.method)
            return error_response(wrong, error.headers)
        case HTTPException(status_code=404):
            return error_response(UnknownRoute(f"There is nothing at {path}"))
        case HTTPException():
            response = error_response(OutriderError(str(error.detail)), error.headers)
            response.status_code = error.status_code if error.status_code >= 400 else response.status_code
            return response
    raise error
