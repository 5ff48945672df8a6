"""What /v1 answers, as models that are also its documentation, and what goes into them: a choice's text and tokens,
log-probabilities, figures. A field that is not set is not sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from pydantic import BaseModel

from gateway.generation.generate import CompletionEvent, Event, RoundEvent
from gateway.generation.transcript import GeneratedToken, PromptToken
from gateway.text.tokenizer import Tokenizer
from outrider.errors import ProtocolViolation
from outrider.parameters import FinishReason, TokenLogprob

Finish = Literal["stop", "length"]
FIGURES = (
    *("rounds", "drafts", "draft_tokens", "accepted_tokens", "evaluated_tokens", "acceptance_rate"),
    *("draft_acceptance_rate", "mean_acceptance_length", "fallback_rounds"),
)


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


class AssistantMessage(BaseModel):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AssistantMessage
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


def finish_of(event: CompletionEvent) -> Finish:
    """OpenAI's word for why a choice ended: a token or a string that stops it, or its limit."""
    return "length" if event.finish_reason is FinishReason.LENGTH else "stop"


@dataclass(slots=True)
class ChoiceBuffer:
    """What one choice has said so far, for answers that are sent whole."""

    texts: list[str] = field(default_factory=list)
    tokens: list[GeneratedToken] = field(default_factory=list)
    prompt_tokens: tuple[PromptToken, ...] = ()
    end: CompletionEvent | None = None

    @property
    def text(self) -> str:
        """All that was said."""
        return "".join(self.texts)

    @property
    def finish_reason(self) -> Finish:
        """Why it ended; raises ProtocolViolation when it did not."""
        if self.end is None:
            raise ProtocolViolation("an answer was asked for before it was complete")
        return finish_of(self.end)

    def add(self, event: Event) -> None:
        """Keeps an event."""
        if isinstance(event, RoundEvent):
            self.texts += [token.text for token in event.tokens]
            self.tokens += event.tokens
            self.prompt_tokens = self.prompt_tokens or event.prompt_tokens
        else:
            self.texts.append(event.text_delta)
            self.end = event


def chat_logprobs(tokens: Sequence[GeneratedToken], tokenizer: Tokenizer) -> ChatLogprobs:
    """The shape of chat: an entry a token, each with its bytes, because a token may be half a character.

    All are the log-softmax of the target's raw logits, before any transform of the request.
    """

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        piece = tokenizer.piece(token_id)
        return {"token": piece.text, "logprob": logprob, "bytes": list(piece.raw)}

    content = []
    for token in tokens:
        own = _logprob(token)
        top = [TopLogprob(**entry(*each)) for each in zip(own.top_token_ids, own.top_logprobs, strict=True)]
        content.append(ChatTokenLogprob(**entry(token.token_id, own.logprob), top_logprobs=top))
    return ChatLogprobs(content=content, refusal=None)


def text_logprobs(tokens: Sequence[GeneratedToken | PromptToken], tokenizer: Tokenizer, start: int) -> TextLogprobs:
    """The older shape: a list for each fact. `start` is where in the text the first token's own text begins."""

    def alternatives(token: GeneratedToken | PromptToken) -> dict[str, float]:
        """The most probable tokens and the token itself. Of tokens that look alike the most probable stands."""
        own, found = _logprob(token), dict[str, float]()
        top = zip(own.top_token_ids, own.top_logprobs, strict=True)
        for token_id, logprob in (*top, (token.token_id, own.logprob)):
            found.setdefault(tokenizer.piece(token_id).text, logprob)
        return found

    offsets = accumulate((len(token.text) for token in tokens), initial=start)
    return TextLogprobs(
        tokens=[tokenizer.piece(token.token_id).text for token in tokens],
        token_logprobs=[None if token.logprob is None else token.logprob.logprob for token in tokens],
        top_logprobs=[None if token.logprob is None else alternatives(token) for token in tokens],
        text_offset=[offset for offset, _ in zip(offsets, tokens, strict=False)],
    )


def _logprob(token: GeneratedToken | PromptToken) -> TokenLogprob:
    if token.logprob is None:
        raise ProtocolViolation(f"no log-probability came for token {token.token_id}")
    return token.logprob
