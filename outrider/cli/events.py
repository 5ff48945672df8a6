"""What comes back to a request, as plain values. Knows no protobuf and no terminal."""

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
    """A token of the output and its share of the text, which is empty while a character is incomplete."""

    token_id: int
    origin: Origin
    text: str
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """The tokens that one verdict committed to a sample, and the text that they completed.

    The first round of sample 0 brings the prompt's tokens where they were asked for.
    """

    tokens: tuple[Token, ...]
    text: str
    sample_index: int = 0
    prompt: tuple[PromptToken, ...] = ()


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

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole time of the request, the prompt's pass included."""
        return self.completion_tokens * 1e6 / self.total_us if self.total_us else 0.0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a service says about its model."""

    role: str
    model: str
    parameters: int
    dtype: str
    device: str
    threads: int
    numerics_id: str
    context_len: int
    blocks: int
    block_size: int
    address: str
