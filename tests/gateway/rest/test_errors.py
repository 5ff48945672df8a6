"""Every error has the status, the type and the code that OpenAI's clients act on."""

import json

import pytest

from gateway.generation.frontend import ClientStalled
from gateway.rest.errors import (
    BodyTimeout,
    BodyTooLarge,
    ClientGone,
    UnknownModel,
    UnsupportedMedia,
    WrongMethod,
    error_response,
    unexpected,
)
from outrider.errors import (
    CacheFull,
    DeviceFull,
    InvalidKey,
    InvalidRequest,
    KeyForbidden,
    NotReady,
    OutriderError,
    Overloaded,
    PeerLost,
    PromptTooLong,
    ProtocolViolation,
    RateLimited,
    Unsupported,
)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InvalidRequest("n", 9, "less"), 400, "invalid_request_error", "invalid_value"),
        (PromptTooLong("long"), 400, "invalid_request_error", "context_length_exceeded"),
        (Unsupported("no"), 400, "invalid_request_error", "unsupported_parameter"),
        (UnknownModel("other", "markov"), 404, "invalid_request_error", "model_not_found"),
        (WrongMethod("no"), 405, "invalid_request_error", "method_not_allowed"),
        (BodyTimeout("slow"), 408, "invalid_request_error", "body_timeout"),
        (BodyTooLarge("long"), 413, "invalid_request_error", "body_too_large"),
        (UnsupportedMedia("xml"), 415, "invalid_request_error", "unsupported_media_type"),
        (Overloaded("full"), 429, "rate_limit_error", "overloaded"),
        (CacheFull("full"), 429, "rate_limit_error", "kv_cache_full"),
        (InvalidKey("none"), 401, "invalid_request_error", "invalid_api_key"),
        (KeyForbidden("no"), 403, "permission_error", "key_forbidden"),
        (RateLimited("used up", unit="tokens"), 429, "tokens", "rate_limit_exceeded"),
        (RateLimited("used up", unit="requests"), 429, "requests", "rate_limit_exceeded"),
        (ClientGone("gone"), 499, "invalid_request_error", "client_gone"),
        (ProtocolViolation("bug"), 500, "server_error", "protocol_violation"),
        (OutriderError("internal error"), 500, "server_error", "unexpected"),
        (PeerLost("away"), 503, "service_unavailable_error", "peer_lost"),
        (NotReady("soon"), 503, "service_unavailable_error", "not_ready"),
        (DeviceFull("full"), 503, "service_unavailable_error", "device_memory_full"),
        (ClientStalled("late"), 504, "timeout_error", "client_stalled"),
    ],
)
def test_the_status_follows_from_the_error(error: OutriderError, status: int, kind: str, code: str) -> None:
    """And the body has all four fields."""
    response = error_response(error, "/v1/completions")
    told = json.loads(bytes(response.body))["error"]
    assert (response.status_code, told["type"], told["code"]) == (status, kind, code)
    assert told["message"] == error.message
    assert told["param"] == error.metadata.get("field")


def test_clients_are_told_when_to_try_again() -> None:
    """After the seconds of a full queue, after one second otherwise, and not at all where it is no use."""
    assert error_response(Overloaded("full", retry_after_s=7), "/v1/completions").headers["retry-after"] == "7"
    assert error_response(Overloaded("full", retry_after_s=7), "/v1/completions").headers["retry-after-ms"] == "7000"
    assert error_response(PeerLost("away"), "/v1/completions").headers["retry-after"] == "1"
    assert error_response(ProtocolViolation("bug"), "/v1/completions").headers["x-should-retry"] == "false"
    assert "x-should-retry" not in error_response(Overloaded("full"), "/v1/completions").headers


def test_the_text_of_a_surprise_is_not_told() -> None:
    """It may hold what the client wrote, or what it must not read."""
    assert unexpected(ValueError("a secret")).message == "internal error"


def test_a_field_may_have_any_name() -> None:
    """Also one that cannot be encoded."""
    body = bytes(error_response(InvalidRequest("\ud800", "\ud800", "text"), "/v1/completions").body)
    assert json.loads(body)["error"]["param"] == "\ud800"
