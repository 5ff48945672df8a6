"""Limits and habits of the REST surface."""

from dataclasses import dataclass, field
from typing import Self

from gateway.generation.request import MAX_TEXT_CHARS
from gateway.keys.door import Door
from gateway.settings import IGNORE, OWN_PAGE, GatewaySettings, Sites
from outrider.rpc.memory import RequestMemory


@dataclass(frozen=True, slots=True)
class RestSettings:
    """Limits and habits of the REST surface. Sizes are bytes or characters, times are seconds."""

    memory: RequestMemory = field(default_factory=lambda: RequestMemory(512 << 20))
    """Memory that bodies and their values are taken from."""
    keep_alive_s: float = 15.0
    """Silence on a stream after which a comment says that it is alive."""
    client_stall_s: float = 30.0
    """Seconds for which a client may take nothing of what is written to it."""
    sites: Sites = OWN_PAGE
    door: Door | None = None
    """Check of API keys; None admits every client."""
    max_body_bytes: int = 4 << 20
    body_wait_s: float = 30.0
    """Seconds for which a client may send its body."""
    max_json_depth: int = 64
    max_prompt_chars: int = MAX_TEXT_CHARS
    grpc_port: int = 50050
    """Port on which the same gateway serves gRPC; the page names it in the code that it offers."""
    drops_tools: bool = False
    """Whether tools that no chat template has a place for are left out instead of refused."""
    ignores_unknown: bool = False
    """Whether unknown fields of a body are left out instead of refused."""

    @classmethod
    def of(cls, options: GatewaySettings, memory: RequestMemory, door: Door | None, grpc_port: int) -> Self:
        """The settings that follow from a gateway's options, with what it shares between its surfaces."""
        return cls(
            memory,
            options.keep_alive_seconds,
            options.client_stall_seconds,
            options.sites,
            door,
            grpc_port=grpc_port,
            drops_tools=options.drop_tools,
            ignores_unknown=options.unknown_fields == IGNORE,
        )
