"""What counts as an address."""

import pytest

from outrider.errors import InvalidRequest
from outrider.rpc.wire import check_address

BAD = [
    "",
    "host",
    "host:",
    ":5",
    "host:0",
    "host:65536",
    "host:http",
    "a b:5",
    "::1:5",
    "dns:///host:5",
    "host:٣",
    "h:5\n",
]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:65535", "draft_1.example:50051", "[::1]:5"])
def test_host_and_port(address: str) -> None:
    """Names, IPv4, and IPv6 in brackets."""
    assert check_address("target", address) == address


@pytest.mark.parametrize("address", BAD)
def test_anything_else_is_refused(address: str) -> None:
    """The sentence names the field, the value and the form."""
    with pytest.raises(InvalidRequest) as caught:
        check_address("target", address)
    assert caught.value.message == f"target is {address!r}, but must be HOST:PORT with a port in [1, 65535]"


def test_port_0_is_for_listening() -> None:
    """It means any free one there, and nothing to who calls."""
    assert check_address("listen", "127.0.0.1:0", min_port=0) == "127.0.0.1:0"
