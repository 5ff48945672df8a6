"""The Python client of a gateway, over gRPC: `Client`, and `AsyncClient` for asyncio. Never imports torch.

    from outrider.client import Client
    with Client("127.0.0.1:50050") as client:
        for piece in client.generate("The fox said to the wolf,", seed=1).text():
            print(piece, end="", flush=True)

Everything that a caller needs is here; the modules of this package are its own business.
docs/clients/client.md is the reference.
"""

from outrider.answer import (
    CallArguments,
    CallBegun,
    ContentDelta,
    Delta,
    DrafterFigures,
    PromptToken,
    ReasoningDelta,
    SpeculationFigures,
)
from outrider.beams import BeamSearch
from outrider.client.aio import AsyncClient, AsyncStream
from outrider.client.blocking import Client, Stream
from outrider.client.calls import Cancelled, TimedOut
from outrider.client.deltas import ToolCall
from outrider.client.events import (
    Answer,
    Event,
    GeneratedToken,
    Origin,
    RejectedToken,
    Result,
    Round,
    RoundFacts,
    Sample,
)
from outrider.client.requests import CallMessage, ChatMessage, ChatOptions, GenerationOptions, Speculation, Tool
from outrider.errors import (
    CacheFull,
    DeviceFull,
    InvalidKey,
    InvalidRequest,
    NotReady,
    OutriderError,
    Overloaded,
    PeerLost,
    PromptTooLong,
    RateLimited,
    Unsupported,
)
from outrider.parameters import Acceptance, Rule, TokenLogprob
from outrider.rpc.tls import Tls, TlsFailed

__all__ = [
    "Acceptance",
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "BeamSearch",
    "CacheFull",
    "CallArguments",
    "CallBegun",
    "CallMessage",
    "Cancelled",
    "ChatMessage",
    "ChatOptions",
    "Client",
    "ContentDelta",
    "Delta",
    "DeviceFull",
    "DrafterFigures",
    "Event",
    "GeneratedToken",
    "GenerationOptions",
    "InvalidKey",
    "InvalidRequest",
    "NotReady",
    "Origin",
    "OutriderError",
    "Overloaded",
    "PeerLost",
    "PromptToken",
    "PromptTooLong",
    "RateLimited",
    "ReasoningDelta",
    "RejectedToken",
    "Result",
    "Round",
    "RoundFacts",
    "Rule",
    "Sample",
    "Speculation",
    "SpeculationFigures",
    "Stream",
    "TimedOut",
    "Tls",
    "TlsFailed",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "Unsupported",
]
