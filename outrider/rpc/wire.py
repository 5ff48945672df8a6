"""What holds at both ends of every connection: HOST:PORT addresses, options of gRPC, sizes of frames and messages.

Needs no package, so that a client inside another engine has it too.
"""

import ipaddress
import re
from collections.abc import Sequence

from outrider.errors import InvalidRequest

MAX_PORT = 65_535
# Brackets hold an IPv6 address, whose colons would look like the one before the port.
ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})", re.ASCII)

# Of a link's frame: larger ones would make small messages wait. A single message may be larger.
FRAME_BYTES = 256 << 10
# Messages of one session in a frame to a service, and those that wait for a grammar there.
MAX_OF_SESSION = 16
# Under 20 % packet loss a ping timeout of 2 s cuts healthy connections; 5 s does not.
PING_TIMEOUT_MS = 5_000
# A prompt of a million tokens takes 4 bytes for each of them at most.
MAX_MESSAGE_BYTES = 4 << 20

Options = Sequence[tuple[str, int | str]]

# Of every channel and every server. Without the ping timeout a frozen peer goes unnoticed for a minute.
OPTIONS: Options = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)


def check_address(field: str, address: str, *, min_port: int = 1) -> str:
    """Returns the address; raises InvalidRequest when it is not HOST:PORT. A port to listen on may be 0, any free one.

    gRPC would take a port that is too large modulo 65,536, a bare host with the port of HTTPS, and an empty address
    with lines of its own on stderr.
    """
    found = ADDRESS.fullmatch(address)
    if found is None or not min_port <= int(found["port"]) <= MAX_PORT:
        raise InvalidRequest(field, address, f"HOST:PORT with a port in [{min_port}, {MAX_PORT}]")
    return address


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches what listens on a checked HOST:PORT; of a name other than localhost, never."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def channel_options() -> Options:
    """Options that every channel has."""
    return (
        *OPTIONS,
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Channels to one address share their connections, and a new one its elders' failure: it would not even try.
        ("grpc.use_local_subchannel_pool", 1),
    )
