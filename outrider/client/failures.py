"""How a call can fail besides what the gateway says about it. Knows no messages; every failure is an OutriderError."""

import grpc

from outrider.errors import InvalidRequest, OutriderError, PeerLost
from outrider.rpc_errors import error_from, said_by_peer

# What gRPC says when a server of plain HTTP answers it.
HTTP_1 = "http1.x server"


class TimedOut(OutriderError):
    """The caller gave the call less time than it took; a longer timeout_s or fewer tokens help."""

    status = "DEADLINE_EXCEEDED"
    reason = "TIMED_OUT"
    exit_code = 75


class Cancelled(OutriderError):
    """The caller cancelled the call, or closed the client, and then asked for more of the answer."""

    status = "CANCELLED"
    reason = "CANCELLED"
    exit_code = 75


def call_cancelled() -> Cancelled:
    """The end by `cancel`, or of the task that read before."""
    return Cancelled("The call was cancelled before its answer had ended.")


def client_closed() -> Cancelled:
    """The end of a call under way by `close`."""
    return Cancelled("The client was closed before the answer had ended.")


def closed_before() -> Cancelled:
    """What becomes of a call that begins after `close`."""
    return Cancelled("The client is closed; make another one for further requests.")


def failure(error: grpc.RpcError, address: str, timeout_s: float | None, *, is_closed: bool = False) -> OutriderError:
    """The error that the gateway raised, or what became of the connection to it; `is_closed` is about the client.

    A gateway may say PeerLost as well, about a service behind it: that one travels as it is.
    """
    if said_by_peer(error):
        return error_from(error)
    if is_closed and error.code() is grpc.StatusCode.CANCELLED:
        return client_closed()
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        # Often it is that of a model service, which `outrider up` shows too.
        return InvalidRequest("address", address, "that of a gateway")
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
        return TimedOut(
            f"No whole answer within {timeout_s:g} s; allow more time with timeout_s, or ask for fewer tokens.",
            timeout_s=timeout_s,
        )
    if HTTP_1 in (error.details() or ""):
        # Most often the port that a browser takes, of the very same gateway.
        return InvalidRequest("address", address, "where a gateway answers gRPC, and not its REST")
    raised = error_from(error)
    return lost(address) if isinstance(raised, PeerLost) else raised


def lost(address: str) -> PeerLost:
    """The loss of this very connection, in a sentence that helps."""
    return PeerLost(f"Nothing answers on {address} (any more); `outrider up` starts a stack.", address=address)
