"""One error out of what pydantic found: the field's path, its value and the limit. Knows no model and no route."""

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.rest.json_text import name_of
from outrider.errors import InvalidRequest, OutriderError, Unsupported
from outrider.parameters import KEY_MARK

Finding = Mapping[str, Any]
Path = tuple[str | int, ...]
# What pydantic calls a value where only null may stand: the mark of a field that is known but not served.
UNSERVED_MARK = "none_required"
SHORT = {"string_too_short": "characters", "too_short": "entries"}
# Fields of which only some values are served; the others are not wrong, but not served either.
CHOICES = frozenset({"type", "tool_choice", "store", "service_tier"})


class MissingParameter(OutriderError):
    """The caller must name the field."""

    status = "INVALID_ARGUMENT"
    reason = "MISSING_REQUIRED_PARAMETER"
    exit_code = 64


class UnknownParameter(OutriderError):
    """The caller must leave the field out: nobody knows it."""

    status = "INVALID_ARGUMENT"
    reason = "UNKNOWN_PARAMETER"
    exit_code = 64


def error_about(findings: Sequence[Finding], body: object) -> OutriderError:
    """The error about the first field that is at fault, and there about the innermost value.

    A value that may be of several kinds is found wrong once for each; these findings become one.
    """
    paths = [_path(finding, body) for finding in findings]
    field = paths[0][:1]
    depth = max(len(path) for path in paths if path[:1] == field)
    innermost = next(path for path in paths if path[:1] == field and len(path) == depth)
    at_fault = [finding for finding, path in zip(findings, paths, strict=True) if path == innermost]
    return _error(innermost, at_fault)


def _path(finding: Finding, body: object) -> Path:
    """The way to a value through the body. Names of kinds, which pydantic puts in between, are left out."""
    parts = tuple(finding["loc"])
    parts = parts[1:] if parts[:1] == ("body",) else parts
    path: list[str | int] = []
    for part in parts:
        if _leads_on(part, body):
            body = body[part]  # type: ignore[index]
        elif finding["type"] != "missing" or part != parts[-1]:
            continue
        path.append(part)
    return (*path, KEY_MARK) if parts[-1:] == (KEY_MARK,) else tuple(path)


def _leads_on(part: str | int, body: object) -> bool:
    if isinstance(body, list):
        return isinstance(part, int) and part < len(body)
    return isinstance(body, dict) and part in body


def _error(path: Path, findings: Sequence[Finding]) -> OutriderError:
    finding = findings[0]
    kind, value, kinds = finding["type"], finding["input"], {each["type"] for each in findings}
    field = name_of([part for part in path if part != KEY_MARK])
    if kind == "missing":
        return MissingParameter(f"{field} is missing", field=field)
    if kind == "extra_forbidden":
        return UnknownParameter(f"{field} is not a known parameter", field=field)
    if kind == UNSERVED_MARK:
        return Unsupported(f"{field} is not served; leave it out", field=field)
    if path[-1:] and path[-1] in CHOICES and "literal_error" in kinds:
        limit = " or ".join(map(_limit, findings))
        return Unsupported(f"{field} is {shown(value)}, but only {limit} is served", field=field, limit=limit)
    if kind == "too_long" and isinstance(value, list | dict):
        return InvalidRequest.too_many(field, len(value), finding["ctx"]["max_length"])
    if path[-1:] == (KEY_MARK,):
        field = f"{field} key"
    return InvalidRequest(field, value, " or ".join(dict.fromkeys(map(_limit, findings))))


def shown(value: object) -> str:
    """A value in an error's sentence."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


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
