"""What a request asks for and what comes back, as plain values. Knows no protobuf and no terminal."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

AUTO: Literal["auto"] = "auto"
DraftCount = int | Literal["auto"]


class Origin(StrEnum):
    """Who said a token first."""

    ACCEPTED = "accepted"
    CORRECTION = "correction"
    BONUS = "bonus"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Ask:
    """A request; None leaves a field to the gateway's default."""

    prompt: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    draft_count: DraftCount = AUTO
    speculation: bool = True


@dataclass(frozen=True, slots=True)
class Token:
    """A token of the output and its share of the text, which is empty while a character is incomplete."""

    token_id: int
    origin: Origin
    text: str


@dataclass(frozen=True, slots=True)
class Round:
    """The tokens that one verdict committed, and the text that they completed."""

    tokens: tuple[Token, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Speculation:
    """What speculation did in a request."""

    rounds: int
    draft_tokens: int
    accepted_tokens: int
    acceptance_rate: float
    draft_acceptance_rate: float
    mean_acceptance_length: float
    fallback_rounds: int


@dataclass(frozen=True, slots=True)
class Result:
    """The last event. `rest` is text that was held back; times are microseconds since the gateway got the request."""

    rest: str
    finish_reason: str
    seed: int
    prompt_tokens: int
    completion_tokens: int
    speculation: Speculation
    first_token_us: int
    total_us: int
    model_hash: str
    numerics_ids: tuple[str, ...] = ("",)
    """Numerics of all targets that took part, in order; more than one when the request was moved."""
    target_reopens: int = 0
    drift_repairs: int = 0

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
