"""Errors on their way through gRPC: an OutriderError becomes a google.rpc.Status with ErrorInfo, and one again.

What is not an OutriderError leaves a process as "internal error" and nothing more.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from outrider.errors import Field, InvalidRequest, OutriderError, PeerLost, ProtocolViolation, error_classes
from outrider.v1 import types_pb2

DOMAIN = "outrider.v1"
# The key of a sentence that mentions fields, as a JSON list of [whether it is the name of a field, text].
PARTS = "parts"
# A client that waits this long finds other requests ended, or the service back.
RETRY_DELAYS_S = {"RESOURCE_EXHAUSTED": 1, "UNAVAILABLE": 1}
UNEXPECTED_TEXT = "internal error"

# What a status without ErrorInfo means: it was made by gRPC itself, or by something between the processes.
BARE_STATUSES: dict[grpc.StatusCode, type[OutriderError]] = {
    grpc.StatusCode.UNAVAILABLE: PeerLost,
    grpc.StatusCode.CANCELLED: PeerLost,
    grpc.StatusCode.DEADLINE_EXCEEDED: PeerLost,
    # Also what a write into a stream gets that the other side has just ended.
    grpc.StatusCode.INTERNAL: PeerLost,
    grpc.StatusCode.UNIMPLEMENTED: ProtocolViolation,
}
# gRPC's own text for a message over the limit, on either side; no other field of its status says this.
TOO_LARGE_ANSWER = "CLIENT: Received message larger than max"
TOO_LARGE = re.compile(r"message larger than max \((\d+) vs\.? (\d+)\)")


def status_of(error: OutriderError) -> grpc.Status:
    """The status that ends a call with this error; RetryInfo says when waiting helps."""
    code = grpc.StatusCode[error.status]
    rich = status_pb2.Status(code=code.value[0], message=error.message)
    rich.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=_metadata(error)))
    if error.status in RETRY_DELAYS_S:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.seconds = int(error.metadata.get("retry_after_s", RETRY_DELAYS_S[error.status]))
        rich.details.add().Pack(retry)
    status: grpc.Status = rpc_status.to_status(rich)
    return status


def error_from(error: grpc.RpcError) -> OutriderError:
    """Error that the other side raised, of the same class, text and metadata; PeerLost when there is no other side."""
    info = _error_info(error)
    if info is None:
        details = error.details() or "no details"
        if found := TOO_LARGE.search(details):
            return InvalidRequest("message", f"{found[1]} bytes", f"at most {found[2]} bytes")
        return BARE_STATUSES.get(error.code(), OutriderError)(f"{error.code().name}: {details}")
    return _received(info.reason, error.details() or "", info.metadata)


def is_too_large(error: grpc.RpcError) -> bool:
    """Whether a call ended because a server sent a message over this client's limit."""
    return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and TOO_LARGE_ANSWER in (error.details() or "")


def session_error(error: OutriderError) -> types_pb2.SessionError:
    """The message that ends a session of a link with this error."""
    return types_pb2.SessionError(message=error.message, reason=error.reason, metadata=_metadata(error))


def session_error_from(message: types_pb2.SessionError) -> OutriderError:
    """Error that a service raised about a session, of the same class, text and metadata."""
    return _received(message.reason, message.message, message.metadata)


def _metadata(error: OutriderError) -> dict[str, str]:
    # Most sentences follow from the rest of what is sent; those that mention further fields do not.
    if type(error).received([error.message], error.metadata).parts == error.parts:
        return error.metadata
    return error.metadata | {PARTS: json.dumps([[isinstance(part, Field), part] for part in error.parts])}


def _received(reason: str, message: str, sent: Mapping[str, str]) -> OutriderError:
    metadata = dict(sent)
    parts: list[str] = []
    # None where the peer has sent something else: an error must never fail itself. Deep nesting is the last.
    with suppress(ValueError, TypeError, RecursionError):
        pairs = [(bool(is_field), str(part)) for is_field, part in json.loads(metadata.pop(PARTS, "[]"))]
        # JSON may have half a character, which nothing can write out.
        "".join(part for _, part in pairs).encode()
        parts = [Field(part) if is_field else part for is_field, part in pairs]
    return error_classes().get(reason, OutriderError).received(parts or [message], metadata)


def said_by_peer(error: grpc.RpcError) -> bool:
    """Whether a service of ours made the error; otherwise gRPC did, and it is about this connection."""
    return _error_info(error) is not None


def _error_info(error: grpc.RpcError) -> error_details_pb2.ErrorInfo | None:
    info = error_details_pb2.ErrorInfo()
    try:
        rich = rpc_status.from_call(error)
        found = rich is not None and any(detail.Unpack(info) for detail in rich.details)
    except (ValueError, DecodeError):
        # Somebody between the processes has changed the status, or it was never one; what gRPC says is all there is.
        return None
    return info if found and info.domain == DOMAIN else None
