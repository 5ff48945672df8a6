"""One call of the gateway: its address, deadline and metadata, and how its end becomes a typed error."""

import threading
from dataclasses import dataclass, field
from numbers import Real

import grpc

from outrider.client.requests import GenerationOptions, Metadata, Pairs, key_pairs, pairs
from outrider.errors import InvalidRequest, OutriderError, PeerLost
from outrider.rpc.errors import error_from, said_by_peer
from outrider.rpc.tls import Tls, TlsFailed, TlsFiles, has_no_connection, why_refused
from outrider.rpc.wire import check_address

# What gRPC says when a server of plain HTTP answers it, without TLS and with it.
HTTP_1 = ("http1.x server", "missing selected ALPN")
# Thirty years. gRPC counts the nanoseconds of deadlines since 1970 in 64 bits, and some centuries ahead they are past.
MAX_TIMEOUT_S = 1_000_000_000


class TimedOut(OutriderError):
    """The caller gave the call less time than it took; a longer timeout_s or fewer tokens help."""

    status = "DEADLINE_EXCEEDED"
    reason = "TIMED_OUT"
    exit_code = 75


class Cancelled(OutriderError):
    """The caller cancelled the call, or closed the client, and then read more of the answer."""

    status = "CANCELLED"
    reason = "CANCELLED"
    exit_code = 75


# Why a call was cancelled: by `cancel` or the end of the task that read before, by `close`, and by an earlier `close`.
CALL_CANCELLED = "The call was cancelled before its answer had ended."
CLIENT_CLOSED = "The client was closed before the answer had ended."
CLOSED_BEFORE = "The client is closed; make another one for further requests."


def unreadable(address: str) -> PeerLost:
    """The error for a message that cannot be parsed, in whose place grpc.aio gives None."""
    return PeerLost(f"What answers at {address} sent a message that is not valid")


def failure(
    error: grpc.RpcError,
    address: str,
    timeout_s: float | None,
    *,
    is_closed: bool = False,
    tls: Tls | None = None,
) -> OutriderError:
    """The error that the gateway raised, or what became of the connection to it; `is_closed` is about the client.

    A gateway may say PeerLost as well, about one of its services: that one travels as it is. Where no connection could
    be made a handshake is tried, to see why, which may take seconds.
    """
    is_unreadable = error.details() == "Exception deserializing response!"
    raised = unreadable(address) if is_unreadable else error_from(error)
    if is_unreadable or said_by_peer(error):
        return raised
    if is_closed and error.code() is grpc.StatusCode.CANCELLED:
        return Cancelled(CLIENT_CLOSED)
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        # Often it is that of a model service, which `outrider up` shows too.
        return InvalidRequest("address", address, "that of a gateway")
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
        return TimedOut(
            f"No whole answer within {timeout_s:g} s; allow more time with timeout_s, or ask for fewer tokens.",
            timeout_s=timeout_s,
        )
    if any(words in (error.details() or "") for words in HTTP_1):
        # Most often the port that a browser takes, of the very same gateway.
        return InvalidRequest("address", address, "where a gateway answers gRPC, and not its REST")
    why = why_refused(address, tls) if has_no_connection(error) else ""
    nobody = f"Nothing answers on {address} (any more); `outrider up` starts a stack."
    lost = TlsFailed(why, address=address) if why else PeerLost(nobody, address=address)
    return lost if isinstance(raised, PeerLost) else raised


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms of a call: address, deadline, metadata, certificates, and whether its client was `closed`."""

    address: str
    timeout_s: float | None
    metadata: Pairs = field(repr=False)
    """Metadata that travel with the call. The API key is among them, so they are never shown."""
    closed: threading.Event
    tls: Tls | None

    def failure(self, error: grpc.RpcError) -> OutriderError:
        """Error for the failure of a call on these terms."""
        return failure(error, self.address, self.timeout_s, is_closed=self.closed.is_set(), tls=self.tls)


class Caller:
    """The terms of a client's calls, all of which have ended when `closed` is set.

    Raises InvalidRequest about an address, a timeout, metadata or an API key that no call can have, and files that do
    not fit.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float | None,
        metadata: Metadata | None,
        api_key: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        # Plain Python calls this as well, and the check itself takes text for granted.
        if not isinstance(address, str):
            raise InvalidRequest("address", address, "text, HOST:PORT")
        self.address = check_address("address", address)
        if tls is not None and not isinstance(tls, Tls):
            raise InvalidRequest("tls", tls, "an outrider.client.Tls, or None for plaintext")
        self.closed = threading.Event()
        self.files = TlsFiles.of(tls)
        """Certificates of the connection; None for plaintext."""
        self._timeout_s = _checked_timeout_s(timeout_s)
        self._metadata = key_pairs(api_key) + pairs(metadata)

    def terms(self, options: GenerationOptions) -> Terms:
        """Terms of one call: its own timeout if it names one, and its metadata after the client's."""
        timeout_s = _checked_timeout_s(options.get("timeout_s"))
        metadata = self._metadata + pairs(options.get("metadata"))
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        tls = None if self.files is None else self.files.tls
        return Terms(self.address, timeout_s, metadata, self.closed, tls)


def _checked_timeout_s(timeout_s: float | None) -> float | None:
    if timeout_s is None:
        return None
    is_number = isinstance(timeout_s, Real) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequest("timeout_s", timeout_s, f"a number more than 0, and at most {MAX_TIMEOUT_S}")
    return float(timeout_s)
