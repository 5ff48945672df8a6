"""Answers of /v1, as models that are also its documentation. A field that is not set is not sent."""

from collections.abc import Sequence
from typing import Literal, Self, TypeAlias

from pydantic import BaseModel

from gateway.generation.events import CompletionEvent, OutputToken
from outrider.completion import DrafterFigures, PromptToken
from outrider.deltas import CallBegun
from outrider.parameters import FinishReason

Finish = Literal["stop", "length", "tool_calls"]
Tokens: TypeAlias = Sequence[OutputToken | PromptToken]


class PromptTokensDetails(BaseModel):
    """Number of the prompt's tokens that the target found in its prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Tokens of reasoning; guesses from the request's prediction that became tokens of the answer, and that did not."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Tokens in and out: a prompt counts once whatever n is; an end-of-sequence token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


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


class Sampling(BaseModel):
    """How logits became a distribution: what the request said, else the model's defaults, else the neutral values."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float


class Facts(BaseModel):
    """What it takes to repeat and to judge an answer. Lists are in the order of the choices."""

    seed: int
    seeds: list[int]
    sampling: Sampling
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
    drafters: list[DrafterFigures]
    target_reopens: int
    drift_repairs: int
    cumulative_logprobs: list[float] | None = None
    ignored_keywords: list[str] | None = None


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


class CalledFunction(BaseModel):
    """The function of a call; the arguments are a JSON object as text."""

    name: str
    arguments: str


class MessageCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction

    @classmethod
    def begun(cls, call: CallBegun) -> Self:
        """A call whose arguments are still to come."""
        return cls(id=call.call_id, type="function", function=CalledFunction(name=call.name, arguments=""))


class AssistantMessage(BaseModel):
    """What the assistant says; nothing beside calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[MessageCall] | None = None


class ChatChoice(BaseModel):
    """One of the answers to the same conversation."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    token_ids: list[int] | None = None


class ChatCompletion(Envelope):
    """The answer to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class FunctionDelta(BaseModel):
    """More of the arguments of a call."""

    arguments: str


class CallDelta(BaseModel):
    """A call that begins, or more of its arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction | FunctionDelta


class ChatDelta(BaseModel):
    """What is new, of one kind."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


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


def finish_of(event: CompletionEvent) -> Finish:
    """OpenAI's word for why a choice ended: its limit, a call, or else a token or a string that stops it."""
    if event.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if event.has_calls else "stop"
