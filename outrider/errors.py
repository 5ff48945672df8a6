"""Errors by who has to act on them, and the checks of single values that raise them.

Each class carries the name of its gRPC status and the reason that goes into `ErrorInfo`; surfaces translate at the
edge, so no other module speaks of status codes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, Self

MAX_SHOWN_LEN = 80


class Field(str):
    """The name of a request's field in an error's sentence, which every surface says in its own words."""


class OutriderError(Exception):
    """Base of all errors that may leave a process; its text is meant for the user.

    `parts` joined are the sentence, and a `Field` among them is the name of a field. `metadata` repeats every value
    that the sentence names, as google.rpc.ErrorInfo asks for.
    """

    status: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "UNEXPECTED"
    # Of an instance where another process chose it.
    exit_code: int = 70

    def __init__(self, message: str | Sequence[str], **metadata: object) -> None:
        self.parts = (message,) if isinstance(message, str) else tuple(message)
        self.metadata = {key: str(value) for key, value in metadata.items()}
        super().__init__(self.message)

    @classmethod
    def received(cls, parts: Sequence[str], metadata: Mapping[str, str]) -> Self:
        """The error that another process raised, from what it sent, which may be anything."""
        error = cls.__new__(cls)
        # Not the class's own, which may want more than a sentence.
        OutriderError.__init__(error, parts)
        error.metadata = dict(metadata)
        return error

    @property
    def message(self) -> str:
        """The sentence in the protocol's names of fields."""
        return "".join(self.parts)

    def rename_fields(self, name: Callable[[str], str]) -> Self:
        """Gives the fields that the error is about or mentions a surface's own names; returns the error."""
        self.parts = tuple(Field(name(part)) if isinstance(part, Field) else part for part in self.parts)
        self.args = (self.message,)
        if "field" in self.metadata:
            self.metadata["field"] = name(self.metadata["field"])
        return self


def shown(value: object) -> str:
    """A value as an error's sentence shows it, cut where it is long."""
    text = _beginning(value, MAX_SHOWN_LEN + 1)
    return text if len(text) <= MAX_SHOWN_LEN else text[: MAX_SHOWN_LEN - 3] + "..."


def _beginning(value: object, num_chars: int) -> str:
    """Beginning of a value as Python writes it, at least so many characters: all of it may be millions."""
    if isinstance(value, str):
        return repr(value[:num_chars])
    if not isinstance(value, list | dict):
        return repr(value)
    entries: Iterable[tuple[object, ...]] = zip(value) if isinstance(value, list) else value.items()
    text, end = ("[", "]") if isinstance(value, list) else ("{", "}")
    for number, entry in enumerate(entries):
        text += ", " * bool(number)
        for place, part in enumerate(entry):
            if len(text) >= num_chars:
                return text
            text += ": " * place + _beginning(part, num_chars - len(text))
    return text + end


class InvalidRequest(OutriderError):
    """The caller must change the request: the field, its value, and the limit, which may mention other fields."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_REQUEST"
    exit_code = 64

    def __init__(
        self, field: str, value: object, limit: str | Sequence[str], parts: Sequence[str] | None = None
    ) -> None:
        self.limit = (limit,) if isinstance(limit, str) else tuple(limit)
        super().__init__(
            parts or (Field(field), f" is {shown(value)}, but must be ", *self.limit),
            field=field,
            value=shown(value),
            limit="".join(self.limit),
        )

    @classmethod
    def too_many(cls, field: str, count: int, maximum: int, unit: str = "entries") -> Self:
        """The error about a list that is too long; it names the length instead of the list."""
        parts = (Field(field), f" has {count} {unit}, but must have at most {maximum}")
        return cls(field, count, f"at most {maximum} {unit}", parts)

    @classmethod
    def received(cls, parts: Sequence[str], metadata: Mapping[str, str]) -> Self:
        """Error as its data describe it; a sentence of the usual form comes without parts, which follow from these."""
        field, value, limit = (metadata.get(key, "") for key in ("field", "value", "limit"))
        usual = (Field(field), f" is {value}, but must be ", limit)
        error = cls(field, value, limit, usual if ["".join(usual)] == [*parts] else parts)
        error.metadata = dict(metadata)
        return error

    def rename_fields(self, name: Callable[[str], str]) -> Self:
        """Renames fields like any error, those of the limit too."""
        self.limit = tuple(Field(name(part)) if isinstance(part, Field) else part for part in self.limit)
        self.metadata["limit"] = "".join(self.limit)
        return super().rename_fields(name)


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


class NoTokenLeft(OutriderError):
    """The caller must change the request: everything that could come next is forbidden by it."""

    status = "FAILED_PRECONDITION"
    reason = "NO_TOKEN_LEFT"
    exit_code = 65


class ModelRefused(OutriderError):
    """The operator must choose another model: this one is not of a kind, or in a state, that can be served."""

    status = "FAILED_PRECONDITION"
    reason = "MODEL_REFUSED"
    exit_code = 78


class ModelFault(OutriderError):
    """The operator must choose another model, or another type for its weights: what it computed is no number.

    No request is at fault, and others may be answered.
    """

    reason = "MODEL_FAULT"


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


class DeviceFull(OutriderError):
    """The caller may try again with less, or later; the operator has to leave the device more memory for forwards."""

    status = "RESOURCE_EXHAUSTED"
    reason = "DEVICE_MEMORY_FULL"
    exit_code = 75


class Overloaded(OutriderError):
    """The caller may try again when other requests have ended: as many run as are allowed to."""

    status = "RESOURCE_EXHAUSTED"
    reason = "OVERLOADED"
    exit_code = 75


class InvalidKey(OutriderError):
    """The caller must send an API key, or another one; its operator has the list."""

    status = "UNAUTHENTICATED"
    reason = "INVALID_API_KEY"
    exit_code = 77


class KeyForbidden(OutriderError):
    """The caller's API key does not open this; the operator can change that."""

    status = "PERMISSION_DENIED"
    reason = "KEY_FORBIDDEN"
    exit_code = 77


class RateLimited(OutriderError):
    """The caller may try again later: the limits of its API key are used up."""

    status = "RESOURCE_EXHAUSTED"
    reason = "RATE_LIMIT_EXCEEDED"
    exit_code = 75


class PeerLost(OutriderError):
    """A service went away; the gateway opens the session again, or the caller tries again later."""

    status = "UNAVAILABLE"
    reason = "PEER_LOST"
    exit_code = 69


class TargetsEnded(OutriderError):
    """The caller must not send the request again: targets that read it ended, one after the other. Its operator looks
    into their logs.
    """

    status = "FAILED_PRECONDITION"
    reason = "TARGETS_ENDED"
    exit_code = 65


class NotReady(OutriderError):
    """A service is still loading, or is draining; the caller tries again later."""

    status = "UNAVAILABLE"
    reason = "NOT_READY"
    exit_code = 69


class ProtocolViolation(OutriderError):
    """A peer sent a message that the protocol does not allow: a bug in the peer."""

    status = "FAILED_PRECONDITION"
    reason = "PROTOCOL_VIOLATION"


def check_range(field: str, value: int, minimum: int, maximum: int) -> int:
    """Returns the value; raises InvalidRequest outside [minimum, maximum]."""
    if not minimum <= value <= maximum:
        raise InvalidRequest(field, value, f"in [{minimum}, {maximum}]")
    return value


def check_count(field: str, count: int, maximum: int, unit: str) -> None:
    """Raises InvalidRequest about a list of more than `maximum` entries; to be called before the list is read."""
    if count > maximum:
        raise InvalidRequest.too_many(field, count, maximum, unit)


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


def error_classes(kind: type[OutriderError] = OutriderError) -> dict[str, type[OutriderError]]:
    """Error classes by the reason that each states itself, those included that other modules define."""
    found = {kind.reason: kind} if "reason" in vars(kind) else {}
    for child in kind.__subclasses__():
        found |= error_classes(child)
    return found
