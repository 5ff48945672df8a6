"""Metadata of a call, checked before gRPC sees it. Knows no messages and no connection.

gRPC itself would fail the call as if nobody answered, and write lines of its own on stderr.
"""

import re
from collections.abc import Iterable, Mapping

from outrider.client.settings import Metadata
from outrider.errors import InvalidRequest

Pairs = tuple[tuple[str, str | bytes], ...]

NAME = re.compile(r"(?!grpc-)[0-9a-z_.-]+")
TEXT = re.compile(r"[ -~]*")
BINARY = "-bin"
SHAPE = "a mapping, or pairs of a name and a value"


def pairs(metadata: Metadata | None) -> Pairs:
    """Metadata as gRPC wants it, with names in lower case. Raises InvalidRequest about what cannot travel."""
    if metadata is None:
        return ()
    if isinstance(metadata, str | bytes) or not isinstance(metadata, Iterable):
        raise InvalidRequest("metadata", metadata, SHAPE)
    return tuple(map(_pair, metadata.items() if isinstance(metadata, Mapping) else metadata))


def _pair(pair: object) -> tuple[str, str | bytes]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise InvalidRequest("metadata", pair, SHAPE)
    name, value = pair
    lower = name.lower() if isinstance(name, str) else ""
    if not NAME.fullmatch(lower):
        raise InvalidRequest(
            "metadata", name, "names of letters, digits, '_', '.' and '-' that do not begin with grpc-"
        )
    if lower.endswith(BINARY):
        return lower, _bytes(name, value)
    return lower, _text(name, value)


def _bytes(name: str, value: object) -> bytes:
    if not isinstance(value, bytes):
        raise InvalidRequest(f"metadata.{name}", value, "bytes, because the name ends in -bin")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not TEXT.fullmatch(value):
        raise InvalidRequest(f"metadata.{name}", value, "text of printable ASCII; bytes need a name that ends in -bin")
    return value
