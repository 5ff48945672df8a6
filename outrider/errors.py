"""Everything that can go wrong, by who has to act on it. Knows nothing about gRPC, HTTP or torch.

Each class carries the name of its gRPC status and the reason that goes into `ErrorInfo`; `outrider.rpc` translates at
the edge, so no other module speaks of status codes.
"""

from typing import ClassVar, Self


class OutriderError(Exception):
    """Base of all errors that may leave a process; its text is meant for the user.

    `metadata` repeats every value that the message names, as google.rpc.ErrorInfo asks for.
    """

    status: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "UNEXPECTED"
    exit_code: ClassVar[int] = 70

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidRequest(OutriderError):
    """The caller must change the request. Names the field, the value and the limit."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_REQUEST"
    exit_code = 64

    def __init__(self, field: str, value: object, limit: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        super().__init__(f"{field} is {shown}, but must be {limit}", field=field, value=shown, limit=limit)

    @classmethod
    def too_many(cls, field: str, count: int, most: int, unit: str = "entries") -> Self:
        """The error about a list that is too long; it names the length instead of the list."""
        error = cls.__new__(cls)
        message = f"{field} has {count} {unit}, but must have at most {most}"
        OutriderError.__init__(error, message, field=field, value=count, limit=f"at most {most} {unit}")
        return error


class PromptTooLong(OutriderError):
    """The caller must shorten the prompt or ask for fewer tokens."""

    status = "INVALID_ARGUMENT"
    reason = "PROMPT_TOO_LONG"
    exit_code = 64


class Unsupported(OutriderError):
    """The caller asked for something that this version does not serve."""

    status = "INVALID_ARGUMENT"
    reason = "UNSUPPORTED"
    exit_code = 64


class ModelRefused(OutriderError):
    """The operator must choose another model: this one is not of a kind, or in a state, that can be served."""

    status = "FAILED_PRECONDITION"
    reason = "MODEL_REFUSED"
    exit_code = 78


class VocabularyMismatch(OutriderError):
    """The operator must choose a draft with the target's vocabulary."""

    status = "FAILED_PRECONDITION"
    reason = "VOCABULARY_MISMATCH"
    exit_code = 78


class CacheFull(OutriderError):
    """The caller may try again when other requests have ended."""

    status = "RESOURCE_EXHAUSTED"
    reason = "KV_CACHE_FULL"
    exit_code = 75


class Overloaded(OutriderError):
    """The caller may try again when other requests have ended: as many run as are allowed to."""

    status = "RESOURCE_EXHAUSTED"
    reason = "OVERLOADED"
    exit_code = 75


class PeerLost(OutriderError):
    """A service went away; the gateway opens the session again, or the caller tries again later."""

    status = "UNAVAILABLE"
    reason = "PEER_LOST"
    exit_code = 69


class NotReady(OutriderError):
    """A service is still loading, or is draining; the caller tries again later."""

    status = "UNAVAILABLE"
    reason = "NOT_READY"
    exit_code = 69


class ProtocolViolation(OutriderError):
    """A peer sent a message that the protocol does not allow: a bug in the peer."""

    status = "FAILED_PRECONDITION"
    reason = "PROTOCOL_VIOLATION"
