"""Faults of a request, in one error that names the field, its value and the limit.

The application's exception handler is at the end.
"""

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from gateway.rest.asking.fields import AS_USUAL, UNION_KIND
from gateway.rest.asking.json_body import Json, Path, name_of
from gateway.rest.bodies import IGNORED_HEADER, ParsedBodyRoute, ParsedRequest, ignored_header
from gateway.rest.errors import (
    MissingParameter,
    UnknownParameter,
    UnknownRoute,
    WrongMethod,
    error_response,
    not_served,
    other_type,
)
from gateway.rest.settings import RestSettings
from outrider.errors import Field, InvalidRequest, OutriderError, Unsupported
from outrider.parameters import KEY_MARK

Finding: TypeAlias = Mapping[str, Any]
# What pydantic calls a value where only null may stand: the mark of a field that is known but not served.
UNSERVED_MARK = "none_required"
UNKNOWN_MARK = "extra_forbidden"
LENGTHS = {
    "string_too_short": ("at least", "min_length", "character", "characters"),
    "string_too_long": ("at most", "max_length", "character", "characters"),
    "too_short": ("at least", "min_length", "entry", "entries"),
}
METHODS = ("GET", "HEAD", "POST")
# What clients of vLLM send, and its name here. None is ever left out: the answer would be without its bounds.
RENAMED = {
    "bad_words": "banned_words",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_whitespace_pattern": "structured_outputs.whitespace_pattern",
}
# Fields of which only some values are served; the others are not wrong, but not served either.
CHOICES = frozenset(
    (
        *("type", "store", "service_tier", "verbosity", "modalities"),
        *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
    )
)


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
    advice = f"; use {RENAMED[field]}" if field in RENAMED else ""
    unserved: dict[str, OutriderError] = {
        UNKNOWN_MARK: UnknownParameter((Field(field), f" is not a known parameter{advice}"), field=field),
        UNSERVED_MARK: Unsupported((Field(field), " is not served; leave it out"), field=field),
    }
    if kind in unserved:
        return unserved[kind]
    if kind == UNION_KIND and isinstance(value, dict):
        return other_type(field, value, finding["msg"])
    names = [part for part in path if isinstance(part, str)]
    if names and names[-1] in CHOICES and any(each["type"] == "literal_error" for each in at_fault):
        limit = " or ".join(map(_limit, at_fault))
        return not_served(field, value, limit)
    if path[-1:] == (KEY_MARK,):
        field = f"{field} key"
    if kind != "too_long" or not isinstance(value, list | dict):
        return InvalidRequest(field, value, " or ".join(dict.fromkeys(map(_limit, at_fault))))
    return InvalidRequest.too_many(field, len(value), finding["ctx"]["max_length"])


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
    """Limit that the value must keep."""
    if finding["type"] in {"model_type", "model_attributes_type", "dict_type"}:
        return "an object"
    if finding["type"] == UNION_KIND:
        return f"an object whose type is {finding['msg']}"
    if finding["type"] in LENGTHS:
        bound, name, one, several = LENGTHS[finding["type"]]
        number = finding["ctx"][name]
        return f"{bound} {number} {one if number == 1 else several} long"
    if finding["type"] == "string_pattern_mismatch":
        return f"text that matches {finding['ctx']['pattern']}"
    message = str(finding["msg"])
    for prefix in ("Input should be ", "Value error, "):
        message = message.removeprefix(prefix)
    return message[:1].lower() + message[1:]


class TolerantBodyRoute(ParsedBodyRoute):
    """A route that leaves out of a body what is unknown, and what asks for something else than the usual that alone is
    served; it names both in the header of its answer.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        # Not the parsed route's, which knows one try.
        handle, bodies = APIRoute.get_route_handler(self), self.bodies
        fields = getattr(self.body_type, "model_fields", {})
        usual = frozenset(name for name, info in fields.items() if info.description == AS_USUAL)

        async def handle_known(unparsed: Request) -> Response:
            # One for both tries, because the body of a request can be read once.
            request = ParsedRequest(unparsed.scope, unparsed.receive)
            try:
                await request.check(bodies)
                return await handle(request)
            except RequestValidationError as error:
                findings, body = error.errors(), request.state.json
                unusual = usual.intersection(name for each in findings for name in _path(each, body)[:1])
                if bodies is None or not (unusual or any(each["type"] == UNKNOWN_MARK for each in findings)):
                    raise
            for name in unusual:
                del body[name]
            try:
                # What is wrong beside unknown fields is an error even so.
                lenient = bodies.validate_python(body, extra="allow")
            except ValidationError as error:
                raise error_about(error.errors(), body) from None
            names = sorted(unusual) + list(_take_unknown(lenient, body))
            response = await handle(request)
            known = filter(None, response.headers.get(IGNORED_HEADER, "").split(", "))
            response.headers.update(ignored_header([*names, *known]))
            return response

        return handle_known


def route_class(settings: RestSettings) -> type[APIRoute]:
    """Class of routes that take their bodies as the settings say."""
    return TolerantBodyRoute if settings.ignores_unknown else ParsedBodyRoute


def _take_unknown(model: object, value: Json, path: str = "") -> Iterator[str]:
    """Takes what a model does not know out of the value that it was made of; gives the names, without indices."""
    if isinstance(model, BaseModel) and isinstance(value, dict):
        for name in model.model_extra or ():
            if path or name not in RENAMED:
                del value[name]
                yield path + name
        for name, info in type(model).model_fields.items():
            key = info.alias or name
            yield from _take_unknown(getattr(model, name), value.get(key), f"{path}{key}.")
    elif isinstance(model, list) and isinstance(value, list):
        for part, each in zip(model, value, strict=True):
            yield from _take_unknown(part, each, path)


def _methods_at(request: Request, path: str) -> list[str]:
    """The methods that a path takes."""
    asked = ({**request.scope, "path": path, "method": method} for method in METHODS)
    return [
        str(scope["method"])
        for scope in asked
        if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)
    ]


async def handle_error(request: Request, error: Exception) -> Response:
    """The answer to an error of ours, to a body that is not what the route takes, and to what the framework refuses."""
    path = request.url.path[:200]
    match error:
        case OutriderError():
            return error_response(error, path)
        case RequestValidationError():
            return error_response(error_about(error.errors(), error.body), path)
        case HTTPException(status_code=405):
            wrong = WrongMethod(f"{path} does not take {request.method}", method=request.method)
            # The framework names those of one route, and HEAD is another.
            return error_response(wrong, path, {"allow": ", ".join(_methods_at(request, request.url.path))})
        case HTTPException(status_code=404):
            near = (f"/v1{path}", path.removeprefix("/v1"))
            advice = next((f"; {each} is" for each in near if _methods_at(request, each)), "")
            message = f"There is nothing at {path}{advice}; /openapi.json has all routes"
            return error_response(UnknownRoute(message), path)
        case HTTPException():
            response = error_response(OutriderError(str(error.detail)), path, error.headers)
            response.status_code = error.status_code if error.status_code >= 400 else response.status_code
            return response
    raise error
