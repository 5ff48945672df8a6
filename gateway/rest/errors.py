"""Errors as clients of OpenAI read them, {"error": {"message", "type", "param", "code"}}, and below /v1/messages as
those of Anthropic do, {"type": "error", "error": {"type", "message"}}.

The status follows from what went wrong: gRPC's names are those of `outrider.errors`, and what exists only in HTTP has a
reason of its own. An unexpected error is logged once, and clients read only that it happened.
"""

import json
import math
from collections.abc import Mapping

import structlog
from starlette.responses import Response

from outrider.errors import Field, OutriderError, Unsupported, shown
from outrider.rpc.errors import UNEXPECTED_TEXT

STATUSES: Mapping[str, int] = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
REASONS: Mapping[str, int] = {
    # Of a conversation that had begun, but for what the request itself forbids.
    "NO_TOKEN_LEFT": 400,
    # Clients send what is a server's fault again by themselves.
    "TARGETS_ENDED": 400,
    "METHOD_NOT_ALLOWED": 405,
    # No limit of the client's was reached.
    "DEVICE_MEMORY_FULL": 503,
    "BODY_TIMEOUT": 408,
    "BODY_TOO_LARGE": 413,
    "UNSUPPORTED_MEDIA_TYPE": 415,
    "HEADERS_TOO_LARGE": 431,
}
TYPES: Mapping[int, str] = {
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
# Below this path errors are Anthropic's, with these types.
MESSAGES_PATH = "/v1/messages"
MESSAGES_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Where OpenAI has a code for the same thing; any other code is the reason in small letters.
CODES: Mapping[str, str] = {
    "INVALID_REQUEST": "invalid_value",
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "UNSUPPORTED": "unsupported_parameter",
}
RETRIED = frozenset({408, 429, 503, 504})
RETRY_AFTER_S = 1.0

log = structlog.get_logger()


class HttpRequestError(OutriderError):
    """The caller must send another HTTP request; each kind has a reason of its own."""

    status = "INVALID_ARGUMENT"
    reason = "HTTP_REQUEST"
    exit_code = 64


class UnknownRoute(HttpRequestError):
    """The caller must use another path."""

    status = "NOT_FOUND"
    reason = "UNKNOWN_URL"


class UnknownModel(HttpRequestError):
    """The caller must name the model that is served, or none."""

    status = "NOT_FOUND"
    reason = "MODEL_NOT_FOUND"

    def __init__(self, name: str, served: str) -> None:
        super().__init__(f"The model {shown(name)} is not served here, only {served!r} is", field="model", value=name)


class WrongMethod(HttpRequestError):
    """The caller must use another method."""

    reason = "METHOD_NOT_ALLOWED"


class InvalidHttp(HttpRequestError):
    """The caller must send what HTTP/1.1 allows."""

    reason = "INVALID_HTTP"


class HeadersTooLarge(HttpRequestError):
    """The caller must send shorter headers, or a shorter path."""

    reason = "HEADERS_TOO_LARGE"

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"Path and headers are longer than {max_bytes} bytes", limit=f"at most {max_bytes} bytes")


class AmbiguousBody(HttpRequestError):
    """The caller must say the length of its body in one way, or a proxy may see another request than this server."""

    reason = "AMBIGUOUS_BODY"


class BodyTooLarge(HttpRequestError):
    """The caller must send less."""

    reason = "BODY_TOO_LARGE"


class BodyTimeout(HttpRequestError):
    """The caller must send its body faster."""

    status = "DEADLINE_EXCEEDED"
    reason = "BODY_TIMEOUT"


class UnsupportedMedia(HttpRequestError):
    """The caller must send JSON in UTF-8, and say so."""

    reason = "UNSUPPORTED_MEDIA_TYPE"


class InvalidJson(HttpRequestError):
    """The caller must send JSON that every parser reads alike."""

    reason = "INVALID_JSON"


class MissingParameter(HttpRequestError):
    """The caller must name the field."""

    reason = "MISSING_REQUIRED_PARAMETER"

    def __init__(self, field: str) -> None:
        super().__init__((Field(field), " is missing"), field=field)


def not_served(field: str, value: object, kinds: str) -> Unsupported:
    """The error about a value that is none of those that are served."""
    return Unsupported((Field(field), f" is {shown(value)}, but only {kinds} is served"), field=field, limit=kinds)


def other_type(field: str, value: Mapping[str, object], types: str) -> OutriderError:
    """The error about an object whose type is none of those that are served, or that has none."""
    kind = value.get("type")
    return MissingParameter(f"{field}.type") if kind is None else not_served(f"{field}.type", kind, types)


class UnknownParameter(HttpRequestError):
    """The caller must leave the field out."""

    reason = "UNKNOWN_PARAMETER"


class ClientGone(OutriderError):
    """The client left before its answer was there."""

    status = "CANCELLED"
    reason = "CLIENT_GONE"
    exit_code = 75


def unexpected(error: Exception) -> OutriderError:
    """Error that a client reads in place of an unexpected one, which is logged with its traceback."""
    log.error("unexpected error in a request", exc_info=error)
    return OutriderError(UNEXPECTED_TEXT)


def status_of(error: OutriderError) -> int:
    """HTTP status of an error."""
    return REASONS.get(error.reason) or STATUSES.get(error.status, 500)


def error_json(error: OutriderError) -> str:
    """An error's body, which is also its event in the middle of a stream."""
    param = error.metadata.get("field")
    body = {
        "message": error.message,
        # OpenAI's own says of which there were too many.
        "type": error.metadata.get("unit") or TYPES.get(status_of(error), "invalid_request_error"),
        "param": param.removesuffix(" key") if param else None,
        "code": CODES.get(error.reason, error.reason.lower()),
    }
    # In ASCII: a field's name may hold what no encoding can carry.
    return json.dumps({"error": body})


def messages_error_json(error: OutriderError) -> str:
    """JSON body of an error in Anthropic's shape."""
    status = status_of(error)
    kind = MESSAGES_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return json.dumps({"type": "error", "error": {"type": kind, "message": error.message}})


def error_response(error: OutriderError, path: str, headers: Mapping[str, str] | None = None) -> Response:
    """The answer to a request to a path that failed before its headers were out, with the time to try again where that
    helps.
    """
    status, advice = status_of(error), {}
    if status in {429, 503}:
        wait_s = float(error.metadata.get("retry_after_s", RETRY_AFTER_S))
        advice = {"retry-after": str(math.ceil(wait_s)), "retry-after-ms": str(math.ceil(1000 * wait_s))}
    elif status not in RETRIED:
        advice = {"x-should-retry": "false"}
    if status == 401:
        advice["www-authenticate"] = "Bearer"
    is_of_messages = path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")
    body = messages_error_json(error) if is_of_messages else error_json(error)
    return Response(body, status, {**advice, **(headers or {})}, "application/json")
