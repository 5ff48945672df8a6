"""Settings of a proposer inside another engine, by its environment."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc

from outrider.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ProposerSettings:
    """Settings by environment: addresses of drafts, the deadline of a step, seconds between lines of the log."""

    addresses: tuple[str, ...]
    deadline_s: float = 0.1
    log_s: float = 60.0
    credentials: grpc.ChannelCredentials | None = None

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self:
        """OUTRIDER_DRAFT, OUTRIDER_DRAFT_DEADLINE_MS, OUTRIDER_DRAFT_LOG_SECONDS, OUTRIDER_DRAFT_TLS_CA, _CERT, _KEY.

        Raises InvalidRequest.
        """
        addresses = tuple(filter(None, (each.strip() for each in environment.get("OUTRIDER_DRAFT", "").split(","))))
        if not addresses:
            raise InvalidRequest("OUTRIDER_DRAFT", "", "HOST:PORT of a draft service, or several with commas")
        names = ("CA", "CERT", "KEY")
        ca, cert, key = (environment.get(f"OUTRIDER_DRAFT_TLS_{name}", "") for name in names)
        if bool(cert) != bool(key):
            raise InvalidRequest("OUTRIDER_DRAFT_TLS_CERT", cert, "given together with OUTRIDER_DRAFT_TLS_KEY")
        files = [Path(each).read_bytes() if each else None for each in (ca, key, cert)]
        credentials = grpc.ssl_channel_credentials(*files) if ca or cert else None
        deadline_ms = _number(environment, "OUTRIDER_DRAFT_DEADLINE_MS", 100.0)
        return cls(addresses, deadline_ms / 1000, _number(environment, "OUTRIDER_DRAFT_LOG_SECONDS", 60.0), credentials)


def _number(environment: Mapping[str, str], name: str, default: float) -> float:
    """A positive number of the environment; raises InvalidRequest."""
    text = environment.get(name, "")
    try:
        number = float(text) if text else default
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise InvalidRequest(name, text, "a number above 0")
    return number
