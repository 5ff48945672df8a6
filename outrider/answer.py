"""An answer as it grows, in pieces, and the facts of a finished sample: why it ended, what it cost, how to repeat it.

Text, reasoning and calls of tools are pieces apart from each other. Gateway and client share the facts, whose names are
those of the message Completion in generation_service.proto, and say their unit: `_us` are microseconds since the
gateway received the request, `_tokens` numbers of tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from outrider.parameters import Acceptance, SamplingParameters, TokenLogprob

# Facts by the messages within Completion that carry them.
SECTIONS = {
    "usage": (
        *("prompt_tokens", "cached_prompt_tokens", "completion_tokens"),
        *("accepted_prediction_tokens", "rejected_prediction_tokens", "reasoning_tokens"),
    ),
    "timings": ("first_token_us", "total_us", "queue_us"),
    "survival": ("target_reopens", "drift_repairs"),
}


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of an echoed prompt and its share of the text; the first has no log-probability."""

    token_id: int
    text: str
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class DrafterFigures:
    """What one drafter did; the draft service's own choice has no name."""

    drafter: str
    draft_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, slots=True)
class SpeculationFigures:
    """Figures of speculation in a sample, counted as generation_service.proto says."""

    rounds: int = 0
    drafts: int = 0
    """Rounds with at least one draft token."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    evaluated_tokens: int = 0
    acceptance_rate: float = 0.0
    """Accepted over evaluated draft tokens, the alpha of the papers; 0 when nothing was evaluated."""
    draft_acceptance_rate: float = 0.0
    """Accepted over drafted tokens, as vLLM counts it; 0 when nothing was drafted."""
    mean_acceptance_length: float = 1.0
    """Tokens committed in a round with a draft, on average, as vLLM counts it; 1 when there was none."""
    fallback_rounds: int = 0
    drafters: tuple[DrafterFigures, ...] = ()
    """Figures of each drafter that guessed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionFacts:
    """Facts of a sample that ended."""

    finish_reason: str
    sample_index: int = 0
    seed: int
    prompt_tokens: int
    cached_prompt_tokens: int = 0
    completion_tokens: int
    accepted_prediction_tokens: int = 0
    """Guesses from the request's prediction that were kept; rejected_prediction_tokens are those that were not."""
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0
    speculation: SpeculationFigures
    first_token_us: int
    total_us: int
    queue_us: int = 0
    target_reopens: int = 0
    drift_repairs: int = 0
    model_hash: str
    numerics_ids: tuple[str, ...] = ("",)
    """Numerics of all targets that took part, in order; more than one when the request was moved."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    """Parameters that shaped the distribution: what the request said, and the defaults that took effect."""
    cumulative_logprob: float | None = None
    """Sum of a beam's log-probabilities; None without beam search."""
    has_calls: bool = False
    """Whether there are calls of tools in the answer."""
    ignored_keywords: tuple[str, ...] = ()
    """Keywords of a lenient schema that were not enforced."""

    @property
    def decode_us(self) -> int:
        """Microseconds from the first token to the end."""
        return self.total_us - self.first_token_us

    def section(self, name: str) -> dict[str, Any]:
        """Facts of a section, by name."""
        return {fact: getattr(self, fact) for fact in SECTIONS[name]}


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the text that is meant for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool begins; calls of an answer are numbered from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of a call, which together are a JSON object as text."""

    index: int
    text: str


Delta: TypeAlias = ContentDelta | ReasoningDelta | CallBegun | CallArguments


def reasoning_of(deltas: Iterable[Delta]) -> str:
    """All reasoning in some pieces of an answer."""
    return "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
