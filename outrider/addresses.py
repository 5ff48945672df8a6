"""Addresses as people write them: HOST:PORT, checked before anything is started. Knows no gRPC and no sockets."""

import re

from outrider.errors import InvalidRequest

MAX_PORT = 65_535
# Brackets hold an IPv6 address, whose colons would look like the one before the port.
ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})", re.ASCII)


def check_address(field: str, address: str, *, least_port: int = 1) -> str:
    """Returns the address; raises InvalidRequest when it is not HOST:PORT. A port to listen on may be 0, any free one.

    gRPC would take a port that is too large modulo 65,536, a bare host with the port of HTTPS, and an empty address
    with lines of its own on stderr.
    """
    found = ADDRESS.fullmatch(address)
    if found is None or not least_port <= int(found["port"]) <= MAX_PORT:
        raise InvalidRequest(field, address, f"HOST:PORT with a port in [{least_port}, {MAX_PORT}]")
    return address
