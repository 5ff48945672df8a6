"""What /v1 answers, as models that are also its documentation. A field that is not set is not sent. Decides nothing."""

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

Finish = Literal["stop", "length"]


class PromptTokensDetails(BaseModel):
    """Of the prompt's tokens, those that the target found in its prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens in and out: a prompt counts once whatever n is; an end-of-sequence token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class SpeculativeDecoding(BaseModel):
    """What speculation did, in vLLM's names. A step is a verdict on at least one draft token."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None


class Metrics(BaseModel):
    """Times of a request, in vLLM's names; null where there was nothing to measure."""

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float | None
    speculative_decoding: SpeculativeDecoding | None


class Facts(BaseModel):
    """What it takes to repeat and to judge an answer. Lists are in the order of the choices."""

    seed: int
    seeds: list[int]
    rule: str
    rule_settings: dict[str, float]
    model_hash: str
    numerics_id: str
    numerics_ids: list[str]
    finish_reasons: list[str]
    rounds: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    acceptance_rate: float
    draft_acceptance_rate: float
    mean_acceptance_length: float
    fallback_rounds: int
    target_reopens: int
    drift_repairs: int


class TopLogprob(BaseModel):
    """A token that might have stood there, and its log-probability under the target's raw logits."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """The tokens of a piece of the answer."""

    content: list[ChatTokenLogprob]
    refusal: None


class TextLogprobs(BaseModel):
    """The tokens of a piece of text, one entry each in every list. A prompt's first token has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Envelope(BaseModel):
    """What bodies and chunks have in common."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None
    choices: Sequence[BaseModel]
    usage: Usage | None = None
    metrics: Metrics | None = None
    outrider: Facts | None = None
    obfuscation: str | None = None


class ChatMessage(BaseModel):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    token_ids: list[int] | None = None


class ChatCompletion(Envelope):
    """The answer to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatDelta(BaseModel):
    """What is new."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """What is new in one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    token_ids: list[int] | None = None


class ChatChunk(Envelope):
    """An event of a stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class TextChoice(BaseModel):
    """One text, or in a stream what is new in it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None
    token_ids: list[int] | None = None


class TextCompletion(Envelope):
    """How a prompt goes on; also an event of a stream."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
