"""Everything that can go wrong, by who has to act on it, and the checks of single values that raise it.

Each class carries the name of its gRPC status and the reason that goes into `ErrorInfo`; surfaces translate at the edge,
so no other module speaks of status codes.
"""

from collections.abc import Iterable
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


def check_range(field: str, value: int, least: int, most: int) -> int:
    """Returns the value; raises InvalidRequest outside [least, most]."""
    if not least <= value <= most:
        raise InvalidRequest(field, value, f"in [{least}, {most}]")
    return value


def check_count(field: str, count: int, most: int, unit: str) -> None:
    """Raises InvalidRequest about a list of more than `most` entries; call it before anything is made of the list."""
    if count > most:
        raise InvalidRequest.too_many(field, count, most, unit)


def check_token_ids(field: str, token_ids: Iterable[int], vocabulary_size: int) -> tuple[int, ...]:
    """Returns the ids; raises InvalidRequest about the first outside the vocabulary."""
    checked = tuple(token_ids)
    # Names of single tokens are made only when one is at fault: a prompt has thousands.
    if checked and not 0 <= min(checked) <= max(checked) < vocabulary_size:
        for index, token_id in enumerate(checked):
            check_token_id(f"{field}.{index}", token_id, vocabulary_size)
    return checked


def check_token_id(field: str, token_id: int, vocabulary_size: int) -> int:
    """Returns the id; raises InvalidRequest outside the vocabulary."""
    if not 0 <= token_id < vocabulary_size:
        raise InvalidRequest(field, token_id, f"a token id in [0, {vocabulary_size})")
    return token_id
