"""What a call is made with besides its message. Knows no protobuf and no connection."""

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.addresses import check_address
from outrider.client.failures import checked_timeout_s
from outrider.client.settings import GenerationOptions, Metadata

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Terms:
    """Where a call goes, how long it may take, and what travels beside it."""

    address: str
    timeout_s: float | None
    metadata: Pairs


class Caller:
    """The terms of a client's calls. Raises InvalidRequest about an address or a timeout that is none."""

    def __init__(self, address: str, timeout_s: float | None, metadata: Metadata) -> None:
        self.address = check_address("address", address)
        self._timeout_s = checked_timeout_s(timeout_s)
        self._metadata = pairs(metadata)

    def terms(self, options: GenerationOptions) -> Terms:
        """Those of one call: its own timeout if it names one, and its metadata behind the client's."""
        timeout_s = checked_timeout_s(options.get("timeout_s"))
        metadata = self._metadata + pairs(options.get("metadata") or ())
        return Terms(self.address, self._timeout_s if timeout_s is None else timeout_s, metadata)


def pairs(metadata: Metadata) -> Pairs:
    """Metadata as gRPC wants it, with keys in lower case."""
    given = metadata.items() if isinstance(metadata, Mapping) else metadata
    return tuple((key.lower(), value) for key, value in given)
