"""What a call is made with besides its message, and what becomes of it. Knows no protobuf and no connection."""

import threading
from dataclasses import dataclass
from numbers import Real

import grpc

from outrider.addresses import check_address
from outrider.client.failures import failure
from outrider.client.metadata import Pairs, pairs
from outrider.client.settings import GenerationOptions, Metadata
from outrider.errors import InvalidRequest, OutriderError

# Thirty years. gRPC counts the nanoseconds of deadlines since 1970 in 64 bits, and some centuries ahead they are past.
MAX_TIMEOUT_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Terms:
    """Where a call goes, how long it may take, what travels beside it, and whether its client was `closed`."""

    address: str
    timeout_s: float | None
    metadata: Pairs
    closed: threading.Event

    def failure(self, error: grpc.RpcError) -> OutriderError:
        """What a call on these terms has failed with."""
        return failure(error, self.address, self.timeout_s, is_closed=self.closed.is_set())


class Caller:
    """The terms of a client's calls, all of which have ended when `closed` is set.

    Raises InvalidRequest about an address, a timeout or metadata that no call can have.
    """

    def __init__(self, address: str, timeout_s: float | None, metadata: Metadata | None) -> None:
        self.address = _checked_address(address)
        self.closed = threading.Event()
        self._timeout_s = checked_timeout_s(timeout_s)
        self._metadata = pairs(metadata)

    def terms(self, options: GenerationOptions) -> Terms:
        """Those of one call: its own timeout if it names one, and its metadata behind the client's."""
        timeout_s = checked_timeout_s(options.get("timeout_s"))
        metadata = self._metadata + pairs(options.get("metadata"))
        return Terms(self.address, self._timeout_s if timeout_s is None else timeout_s, metadata, self.closed)


def checked_timeout_s(timeout_s: float | None) -> float | None:
    """Returns it as gRPC wants it; raises InvalidRequest unless it is a positive number or None."""
    if timeout_s is None:
        return None
    is_number = isinstance(timeout_s, Real) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequest("timeout_s", timeout_s, f"a number more than 0, and at most {MAX_TIMEOUT_S}")
    return float(timeout_s)


def _checked_address(address: object) -> str:
    # Plain Python calls this as well, and the check itself takes text for granted.
    if not isinstance(address, str):
        raise InvalidRequest("address", address, "text, HOST:PORT")
    return check_address("address", address)
