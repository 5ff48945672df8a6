"""What the REST surface can be told. Knows nothing about how the values are used."""

from dataclasses import dataclass

from gateway.settings import OWN_PAGE, Sites


@dataclass(frozen=True, slots=True)
class RestSettings:
    """Limits and habits of the REST surface. Sizes are bytes or characters, times are seconds."""

    keep_alive_s: float = 15.0
    """Silence on a stream after which a comment says that it is alive."""
    client_stall_s: float = 30.0
    """For how long a client may take nothing of what is written to it."""
    sites: Sites = OWN_PAGE
    max_body_bytes: int = 4 << 20
    max_held_bytes: int = 256 << 20
    """Of the bodies of all requests together."""
    body_wait_s: float = 30.0
    """For how long a client may send its body."""
    max_json_depth: int = 64
    max_prompt_chars: int = 1_000_000
    grpc_port: int = 50050
    """Where the same gateway serves gRPC; the page names it in the code that it offers."""
