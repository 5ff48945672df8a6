"""Counts of what happened to a request, event by event, and the models in which every kind of answer shows them.

A field that is not set is not sent.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from statistics import fmean

from pydantic import BaseModel

from gateway.generation.events import CompletionEvent, Event, SpeculationCounts
from gateway.generation.request import CheckedRequest
from outrider.answer import DrafterFigures


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


@dataclass(slots=True)
class ResponseFigures:
    """Counts what happened to a request: one entry of `requests` a prompt, each with as many choices as it has samples,
    numbered through.
    """

    requests: Sequence[CheckedRequest]
    max_draft_count: int
    return_rounds: bool = False
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    steps: list[tuple[int, int]] = field(default_factory=list)
    """Drafted and accepted tokens of every verdict on a proposal."""
    ends: dict[int, CompletionEvent] = field(default_factory=dict)
    token_counts: Counter[int] = field(default_factory=Counter)
    """Number of tokens of every choice until now."""

    @property
    def first_choices(self) -> list[int]:
        """The number of every prompt's first choice, and at last how many choices there are."""
        return list(accumulate((plan.sample_count for plan in self.requests), initial=0))

    @property
    def is_complete(self) -> bool:
        return len(self.ends) == self.first_choices[-1]

    def add(self, index: int, event: Event) -> None:
        """Counts an event of a choice for the figures."""
        if isinstance(event, CompletionEvent):
            self.ends[index], self.token_counts[index] = event, event.completion_tokens
            return
        self.token_counts[index] += len(event.tokens)
        if event.committed is not None and not event.committed.is_first:
            self.counts.add(event.committed)
            if event.committed.draft_count:
                self.steps.append((event.committed.draft_count, event.committed.accepted_count))

    def usage(self) -> Usage:
        """Tokens in and out, of what has come until now."""
        firsts = [self.ends[index] for index in self.first_choices[:-1] if index in self.ends]
        completion_tokens = self.token_counts.total()
        prompt_tokens = sum(request.spec.prompt_len for request in self.requests)
        cached_tokens = sum(end.cached_prompt_tokens for end in firsts)
        accepted_count, rejected_count = self.counts.prediction_counts
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=sum(end.reasoning_tokens for end in self.ends.values()),
                accepted_prediction_tokens=accepted_count,
                rejected_prediction_tokens=rejected_count,
            ),
        )

    def metrics(self) -> Metrics:
        """Times, and what speculation did if there is one choice, the only case in which vLLM says it."""
        ends = list(self.ends.values())
        spans_ms = [end.decode_us / 1e3 for end in ends]
        counts = [end.completion_tokens for end in ends]
        gaps_ms = [span_ms / (count - 1) for span_ms, count in zip(spans_ms, counts, strict=True) if count > 1]
        spent_s = (max(end.total_us for end in ends) - min(end.queue_us for end in ends)) / 1e6
        may_speculate = self.first_choices[-1] == 1 and self.requests[0].draft_count != 0
        return Metrics(
            time_to_first_token_ms=min(end.first_token_us for end in ends) / 1e3,
            generation_time_ms=max(spans_ms),
            queue_time_ms=min(end.queue_us for end in ends) / 1e3,
            mean_itl_ms=fmean(gaps_ms) if gaps_ms else None,
            tokens_per_second=sum(counts) / spent_s if spent_s > 0 else None,
            speculative_decoding=self._speculation() if may_speculate else None,
        )

    def _speculation(self) -> SpeculativeDecoding:
        figures, by_length = self.counts.figures, dict[int, Counter[int]]()
        for drafted, accepted in self.steps:
            by_length.setdefault(drafted, Counter())[accepted] += 1
        max_count = self.max_draft_count if self.requests[0].draft_count is None else self.requests[0].draft_count
        accepted_counts = Counter(accepted for _, accepted in self.steps)
        drafted_and_accepted = {
            "per_step_drafted": [drafted for drafted, _ in self.steps],
            "per_step_accepted": [accepted for _, accepted in self.steps],
        }
        return SpeculativeDecoding(
            mean_acceptance_length=figures.mean_acceptance_length,
            draft_acceptance_rate=figures.draft_acceptance_rate,
            acceptance_histogram=[accepted_counts[count] for count in range(max([max_count, *by_length]) + 1)],
            acceptance_histogram_by_draft_length={
                str(length): [counts[count] for count in range(length + 1)]
                for length, counts in sorted(by_length.items())
            },
            num_spec_steps=figures.drafts,
            num_accepted_draft_tokens=figures.accepted_tokens,
            num_draft_tokens=figures.draft_tokens,
            num_spec_tokens=max_count,
            **(drafted_and_accepted if self.return_rounds else {}),
        )

    def facts(self) -> Facts:
        """Facts that are needed to repeat and to judge the answer."""
        ends = [end for _, end in sorted(self.ends.items())]
        logprobs = [end.cumulative_logprob for end in ends if end.cumulative_logprob is not None]
        facts = Facts(
            seed=ends[0].seed,
            seeds=[end.seed for end in ends],
            sampling=Sampling.model_validate(ends[0].sampling, from_attributes=True),
            rule=ends[0].acceptance.rule.value,
            rule_settings=ends[0].acceptance.settings,
            model_hash=ends[0].model_hash,
            numerics_id=ends[-1].numerics_ids[-1],
            numerics_ids=list(dict.fromkeys(each for end in ends for each in end.numerics_ids)),
            finish_reasons=[end.finish_reason.value for end in ends],
            target_reopens=sum(end.target_reopens for end in ends),
            drift_repairs=sum(end.drift_repairs for end in ends),
            **asdict(self.counts.figures),
        )
        if logprobs:
            facts.cumulative_logprobs = logprobs
        if ends[0].ignored_keywords:
            facts.ignored_keywords = [*ends[0].ignored_keywords]
        return facts
