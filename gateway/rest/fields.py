"""The fields that both kinds of request share, with their ranges. Knows no route and no generation.

What a range depends on, the target's vocabulary for one, is checked behind the door.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag
from pydantic.config import JsonDict

from gateway.generation.request import MAX_BANNED_WORDS, MAX_STOPS, MAX_STRING_LEN
from outrider.parameters import MAX_SAMPLES, MAX_STOP_TOKEN_IDS, Bias, Finite, Share, TokenId

MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
MAX_BIASES = 300
NO_OTHERS: JsonDict = {"additionalProperties": False}

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Word = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STRING_LEN)]
BiasKey = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,9})$")]
Unserved = Annotated[None, Field(description="Known, but not served: null or absent.")]


def text_or_list(value: object) -> str | None:
    """The tag of the kind that a value is of; None for any other."""
    if isinstance(value, str):
        return "<text>"
    return "<list>" if isinstance(value, list) else None


Stop = Annotated[
    Annotated[Word, Tag("<text>")] | Annotated[list[Word], Field(max_length=MAX_STOPS, fail_fast=True), Tag("<list>")],
    Discriminator(
        text_or_list,
        custom_error_type="stop_kind",
        custom_error_message="Input should be a string or a list of strings",
    ),
]


class Strict(BaseModel):
    """Frozen; unknown fields, wrong types, NaN and infinity are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StreamOptions(Strict):
    """What a stream tells beside its text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Speculation(Strict):
    """Whether and how to speculate. Under `match` nothing here changes a token."""

    enabled: bool | None = None
    draft_count: Annotated[int, Field(ge=0, le=MAX_COUNT)] | Literal["auto"] | None = None
    rule: Literal["match", "ratio", "block", "lenient", "typical"] | None = None
    lenience: Share | None = None
    typical_epsilon: Share | None = None
    typical_delta: Share | None = None
    drafter: Annotated[str, Field(max_length=MAX_STRING_LEN)] | None = None
    return_rounds: bool | None = None


class GenerationFields(Strict):
    """How to generate, in OpenAI's names, else in vLLM's; `speculation` and `banned_words` are ours."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[Finite, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[BiasKey, Bias], Field(max_length=MAX_BIASES, json_schema_extra=NO_OTHERS)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    banned_words: Annotated[list[Word], Field(max_length=MAX_BANNED_WORDS, fail_fast=True)] | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: Speculation | None = None
    user: Annotated[str | None, Field(description="Accepted without effect.")] = None
