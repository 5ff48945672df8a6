"""The parameters of a request, validated once and the same for gateway, draft and target.

Ranges are those of proto/outrider/v1/types.proto. Validation errors are translated into `InvalidRequest`, which names
the field, the value and the limit.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from outrider.errors import InvalidRequest

MAX_STOP_TOKEN_IDS = 64
MAX_STOPS = 64
MAX_BANNED_WORDS = 64
MAX_LOGPROB_COUNT = 20
MAX_TRACE_LEN = 8192
MAX_SALT_BYTES = 64
MAX_SAMPLES = 8
MAX_BANNED_SEQUENCES, MAX_BANNED_LEN = 256, 64
# pydantic puts this after the key of a mapping when the key is at fault and not its value.
KEY_MARK = "[key]"

Finite = Annotated[float, Field(allow_inf_nan=False)]
Bias = Annotated[float, Field(allow_inf_nan=False, ge=-100, le=100)]
Share = Annotated[float, Field(allow_inf_nan=False, gt=0, le=1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


EMPTY: tuple[object, ...] = (None, "", [], {})


class Parameters(BaseModel):
    """Frozen, strict base: unknown fields, wrong types, NaN and infinity are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, values: object) -> object:
        """Leaves out fields that are null or empty and could mean nothing so: they are as good as absent."""
        if not isinstance(values, dict) or not any(value in EMPTY for value in values.values()):
            return values
        return {
            name: value
            for name, value in values.items()
            if value not in EMPTY or not _means_nothing(cls, name, EMPTY.index(value))
        }

    @model_validator(mode="before")
    @classmethod
    def _only_one_unknown(cls, values: object) -> object:
        """Keeps the first of all unknown fields: a finding about each of thousands takes seconds."""
        forbids = cls.model_config.get("extra") == "forbid"
        if not forbids or not isinstance(values, dict) or len(values) <= len(cls.model_fields) + 1:
            return values
        known = cls.model_fields.keys() | {info.alias for info in cls.model_fields.values()}
        unknown = next((name for name in values if name not in known), None)
        return {name: value for name, value in values.items() if name in known or name == unknown}

    @classmethod
    def checked(cls, values: Mapping[str, Any], prefix: str = "") -> Self:
        """Builds the model, or raises InvalidRequest about the first field that is out of range."""
        try:
            return cls(**values)
        except ValidationError as invalid:
            error = invalid.errors()[0]
            field, value = prefix + ".".join(str(part) for part in error["loc"]), error["input"]
            if error["loc"][-1:] == (KEY_MARK,):
                field = prefix + ".".join(str(part) for part in error["loc"][:-2]) + " key"
            if error["type"] == "too_long":
                raise InvalidRequest.too_many(field, len(value), error["ctx"]["max_length"]) from None
            limit = error["msg"].removeprefix("Input should be ").lower()
            raise InvalidRequest(field, value, "absent" if error["type"] == "extra_forbidden" else limit) from None


@cache
def _means_nothing(kind: type[BaseModel], name: str, place: int) -> bool:
    """Whether a field has a default, and what has that place among the empty values is none of its values: null and the
    empty text where it takes none, the empty list and object where it takes nothing but null.
    """
    info = kind.model_fields.get(name)
    if info is None or info.is_required():
        return False
    field_type: Any = Annotated[info.annotation, Field(), *info.metadata]
    try:
        TypeAdapter(field_type).validate_python(EMPTY[place], strict=True)
    except ValidationError as error:
        return not isinstance(EMPTY[place], list | dict) or error.errors()[0]["type"] == "none_required"
    return False


class Recommended(Parameters):
    """Parameters that a model's files may recommend; the neutral value of each field is its default."""

    temperature: Finite = Field(default=1.0, ge=0, le=100)
    top_k: int = Field(default=0, ge=0, lt=2**31)
    top_p: Finite = Field(default=1.0, gt=0, le=1)
    min_p: Finite = Field(default=0.0, ge=0, le=1)
    repetition_penalty: Finite = Field(default=1.0, gt=0, le=100)


class SamplingParameters(Recommended):
    """How a row of logits becomes a distribution."""

    presence_penalty: Finite = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: Finite = Field(default=0.0, ge=-2, le=2)
    logit_bias: dict[TokenId, Bias] = Field(default_factory=dict, max_length=300)
    min_tokens: int = Field(default=0, ge=0, lt=2**31)
    ignore_eos: bool = False

    @property
    def has_penalties(self) -> bool:
        """Whether any token that occurred is penalised."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def is_plain(self) -> bool:
        """Whether a temperature is all that is wanted, after min_tokens of output."""
        cuts = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return not self.logit_bias and not self.has_penalties and (self.temperature == 0 or not cuts)


class GenerationDefaults(Recommended):
    """What a request gets where it says nothing. What somebody said of them is in model_fields_set."""

    max_tokens: int = Field(default=128, ge=1, lt=2**31)

    @property
    def stated(self) -> dict[str, Any]:
        """Defaults that the model's files or the operator stated."""
        return self.model_dump(exclude_unset=True)

    def under(self, said: SamplingParameters) -> SamplingParameters:
        """What a request said, and these where it said nothing."""
        unsaid = Recommended.model_fields.keys() - said.model_fields_set
        return said.model_copy(update={name: getattr(self, name) for name in unsaid})


class Rule(StrEnum):
    """How the target decides which draft tokens to keep; see types.proto."""

    MATCH = "match"
    RATIO = "ratio"
    BLOCK = "block"
    LENIENT = "lenient"
    TYPICAL = "typical"

    needs_distributions: bool
    """Whether a proposal must say which distributions its tokens were drawn from, with noise of their own."""

    def __init__(self, name: str) -> None:
        self.needs_distributions = name in {"ratio", "block", "lenient"}

    @property
    def is_exact(self) -> bool:
        """Whether the output follows the target's own distribution."""
        return self not in {Rule.LENIENT, Rule.TYPICAL}

    @property
    def runs_ahead(self) -> bool:
        """Whether a target may begin a round with a branch, which changes nothing that its distribution rests on."""
        return self is not Rule.TYPICAL


class Acceptance(Parameters):
    """A rule and its settings, which hold for the rule of their name only."""

    rule: Rule = Rule.MATCH
    lenience: Share = 0.5
    typical_epsilon: Share = 0.09
    typical_delta: Share = 0.3

    @property
    def settings(self) -> dict[str, float]:
        """Settings that the rule reads, by name."""
        return {name: getattr(self, name) for name in SETTINGS.get(self.rule, ())}


SETTINGS = {Rule.LENIENT: ("lenience",), Rule.TYPICAL: ("typical_epsilon", "typical_delta")}


class FinishReason(StrEnum):
    """Why a request ended. The first two are tokens, the third is text, the last is the request's own limit."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What a service must know to decode a session alone: the plain form of the message OpenSession.

    In the gateway `token_ids` are the prompt; a service that opens a session gets all committed tokens in them.
    """

    token_ids: tuple[int, ...]
    prompt_len: int
    sampling: SamplingParameters
    seed: int
    max_len: int
    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    acceptance: Acceptance = field(default_factory=Acceptance)
    banned: tuple[tuple[int, ...], ...] = ()
    """Sequences whose last token cannot be drawn after the others."""
    logprob_count: int | None = None
    """Alternatives to every token's log-probability; None for no log-probabilities."""
    prompt_logprobs: bool = False
    draft_logprobs: bool = False
    cache_salt: bytes = b""
    """Cached prefixes are shared only among sessions of the same salt."""
    trace_context: tuple[tuple[str, str], ...] = ()
    """The trace that the request belongs to, as W3C's headers; see outrider.process.telemetry."""
    grammar: str = field(default="", repr=False)
    """Canonical text of what the output has to follow; empty for any output. See outrider.grammar."""
    unrecorded: bool = False
    """Whether nothing of it may be kept for training, where a target does that."""
    plain_len: int = field(init=False, repr=False, compare=False)
    """Length from which on a temperature is all that changes the logits after a prefix; sys.maxsize for never."""

    def __post_init__(self) -> None:
        is_plain = self.sampling.is_plain and not self.banned
        held_back_len = self.sampling.min_tokens if self.eos_token_ids or self.stop_token_ids else 0
        object.__setattr__(self, "plain_len", self.prompt_len + held_back_len if is_plain else sys.maxsize)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token under the raw logits, and the most probable tokens there in falling order."""

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """Exactly what a draft token was drawn from: the probability of an id is its weight over the sum of all."""

    token_ids: tuple[int, ...]
    weights: tuple[int, ...]

    def without(self, token_id: int) -> "DraftDistribution":
        """What the next sibling is drawn from, where siblings are drawn without replacement; empty after the last."""
        kept = [entry for entry in zip(self.token_ids, self.weights, strict=True) if entry[0] != token_id]
        return DraftDistribution(tuple(each for each, _ in kept), tuple(weight for _, weight in kept))
