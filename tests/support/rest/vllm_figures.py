"""Reads figures as AIPerf 0.13 does from vLLM's `metrics`, with all that it refuses. Knows no gateway of ours.

AIPerf takes a record from a reply's `metrics.speculative_decoding`, and drops one whose counts contradict each other.
"""

from itertools import pairwise
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=0, strict=True)]
Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class SpeculativeDecoding(BaseModel):
    """vLLM's `SpeculativeDecodingMetrics`; the last three are there at its level `detailed` or in newer versions."""

    model_config = ConfigDict(extra="forbid")

    mean_acceptance_length: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    draft_acceptance_rate: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    acceptance_histogram: list[Count]
    num_spec_steps: Count
    num_accepted_draft_tokens: Count
    num_draft_tokens: Count
    num_spec_tokens: Count
    acceptance_histogram_by_draft_length: dict[Annotated[str, Field(pattern=r"^\d+$")], list[Count]] | None = None
    per_step_accepted: list[Count] | None = None
    per_step_drafted: list[Count] | None = None

    @model_validator(mode="after")
    def counts_agree(self) -> Self:
        """AIPerf's own identities, and the definitions of the two figures."""
        histogram, steps = self.acceptance_histogram, self.num_spec_steps
        assert len(histogram) == self.num_spec_tokens + 1
        assert sum(histogram) == steps
        assert sum(count * kept for kept, count in enumerate(histogram)) == self.num_accepted_draft_tokens
        assert self.num_accepted_draft_tokens <= self.num_draft_tokens <= steps * self.num_spec_tokens
        expected = 1 + self.num_accepted_draft_tokens / steps if steps else 1.0
        assert abs(self.mean_acceptance_length - expected) < 1e-9
        rate = self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0
        assert abs(self.draft_acceptance_rate - rate) < 1e-9
        return self

    @model_validator(mode="after")
    def steps_agree(self) -> Self:
        """The lists by step and by length give the same counts."""
        accepted, drafted = self.per_step_accepted, self.per_step_drafted
        if accepted is not None and drafted is not None:
            assert len(accepted) == len(drafted) == self.num_spec_steps
            assert (sum(accepted), sum(drafted)) == (self.num_accepted_draft_tokens, self.num_draft_tokens)
            assert all(kept <= guessed for kept, guessed in zip(accepted, drafted, strict=True))
        for length, histogram in (self.acceptance_histogram_by_draft_length or {}).items():
            assert len(histogram) == int(length) + 1
        if self.acceptance_histogram_by_draft_length is not None:
            rows = self.acceptance_histogram_by_draft_length.values()
            assert sum(map(sum, rows)) == self.num_spec_steps
        return self


class PerRequestMetrics(BaseModel):
    """vLLM's `metrics` of a reply or of a stream's usage chunk."""

    model_config = ConfigDict(extra="forbid")

    time_to_first_token_ms: Milliseconds | None = None
    generation_time_ms: Milliseconds | None = None
    queue_time_ms: Milliseconds | None = None
    mean_itl_ms: Milliseconds | None = None
    tokens_per_second: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    speculative_decoding: SpeculativeDecoding | None = None


def read_metrics(reply: dict[str, Any]) -> PerRequestMetrics:
    """The figures at the root of a body or of a chunk. Raises ValidationError."""
    return PerRequestMetrics.model_validate(reply["metrics"])


def positions(figures: SpeculativeDecoding) -> list[int]:
    """How often each place of a proposal was accepted, as vLLM's counters by position have it."""
    histogram = figures.acceptance_histogram
    reached = [sum(histogram[place:]) for place in range(1, len(histogram))]
    assert all(one >= other for one, other in pairwise(reached))
    return reached
