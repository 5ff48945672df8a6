"""What comes back to a request, as plain values. Knows no protobuf and no connection."""

from dataclasses import dataclass, field
from enum import StrEnum

from outrider.parameters import Acceptance, TokenLogprob


class Origin(StrEnum):
    """Who said a token first."""

    ACCEPTED = "accepted"
    CORRECTION = "correction"
    BONUS = "bonus"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of the prompt and its share of the text; the first has no log-probability."""

    token_id: int
    text: str
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """A token of the output and its share of the text, which is empty while a character is incomplete.

    draft_logprob is the draft's log-probability of an accepted token, where the request asked for return_rounds.
    """

    token_id: int
    origin: Origin
    text: str
    logprob: TokenLogprob | None = None
    draft_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class RejectedToken:
    """A guess of the draft that was not kept, with its text decoded alone."""

    token_id: int
    text: str
    draft_logprob: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFacts:
    """How a round came about, as RoundFacts of generation_service.proto states it; times are microseconds."""

    base_len: int = 0
    draft_count: int = 0
    accepted_count: int = 0
    evaluated_count: int = 0
    fallback_reason: str = ""
    """Why a round that was to be speculative had no proposal, for instance "draft_late"; empty when it had one."""
    draft_compute_us: int = 0
    verify_compute_us: int = 0
    round_us: int = 0
    draft_queue_us: int = 0
    verify_queue_us: int = 0
    draft_wait_us: int = 0
    verify_wait_us: int = 0
    draft_bytes: int = 0
    verify_bytes: int = 0
    target_reopens: int = 0
    new_numerics_id: str = ""


@dataclass(frozen=True, slots=True)
class Round:
    """The tokens that one verdict committed to a sample, and the text that they completed.

    The first round of sample 0 brings the prompt's tokens where they were asked for, and every round its rejected
    guesses.
    """

    tokens: tuple[Token, ...]
    text: str
    sample_index: int = 0
    prompt: tuple[PromptToken, ...] = ()
    rejected: tuple[RejectedToken, ...] = ()
    facts: RoundFacts = field(default_factory=RoundFacts)


@dataclass(frozen=True, slots=True)
class SpeculationFigures:
    """What speculation did in a sample."""

    rounds: int
    draft_tokens: int
    accepted_tokens: int
    acceptance_rate: float
    draft_acceptance_rate: float
    mean_acceptance_length: float
    fallback_rounds: int
    drafts: int = 0
    """Rounds with at least one draft token."""


@dataclass(frozen=True, slots=True)
class Result:
    """The last event of a sample. `rest` is text that was held back; times are microseconds since the gateway got the
    request.
    """

    rest: str
    finish_reason: str
    seed: int
    prompt_tokens: int
    completion_tokens: int
    speculation: SpeculationFigures
    first_token_us: int
    total_us: int
    model_hash: str
    numerics_ids: tuple[str, ...] = ("",)
    """Numerics of all targets that took part, in order; more than one when the request was moved."""
    target_reopens: int = 0
    drift_repairs: int = 0
    sample_index: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    cached_prompt_tokens: int = 0
    queue_us: int = 0

    @property
    def text(self) -> str:
        """The same as `rest`: so the texts of all events of a sample join to the whole."""
        return self.rest

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole time of the request, the prompt's pass included."""
        return self.completion_tokens * 1e6 / self.total_us if self.total_us else 0.0


Event = Round | Result
