"""Counts what happened to a request, over all its choices. Pure; knows neither HTTP nor the shape of an answer."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from gateway.generation.generate import CompletionEvent, Event
from gateway.generation.request import CheckedRequest
from gateway.rest.responses import Facts, Metrics, PromptTokensDetails, SpeculativeDecoding, Usage


@dataclass(slots=True)
class Tally:
    """One entry of `plans` a prompt, each with as many choices as it has samples, numbered through."""

    plans: Sequence[CheckedRequest]
    max_draft_count: int
    return_rounds: bool = False
    steps: list[tuple[int, int]] = field(default_factory=list)
    """Drafted and accepted tokens of every verdict on a proposal."""
    ends: dict[int, CompletionEvent] = field(default_factory=dict)

    @property
    def num_choices(self) -> int:
        """Answers in all."""
        return sum(plan.sample_count for plan in self.plans)

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        return len(self.ends) == self.num_choices

    def add(self, index: int, event: Event) -> None:
        """Counts an event of a choice."""
        if isinstance(event, CompletionEvent):
            self.ends[index] = event
        elif event.committed.draft_count:
            self.steps.append((event.committed.draft_count, event.committed.accepted_count))

    def usage(self) -> Usage:
        """Tokens in and out."""
        firsts = self._firsts()
        prompt_tokens = sum(end.prompt_tokens for end in firsts)
        completion_tokens = sum(end.completion_tokens for end in self.ends.values())
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(end.cached_prompt_tokens for end in firsts)),
        )

    def metrics(self) -> Metrics:
        """Times, and what speculation did if there is one choice, for which alone vLLM tells it."""
        ends = list(self.ends.values())
        gaps_ms = [_span_ms(end) / (end.completion_tokens - 1) for end in ends if end.completion_tokens > 1]
        spent_s = (max(end.total_us for end in ends) - min(end.queue_us for end in ends)) / 1e6
        return Metrics(
            time_to_first_token_ms=min(end.first_token_us for end in ends) / 1e3,
            generation_time_ms=max(map(_span_ms, ends)),
            queue_time_ms=max(end.queue_us for end in ends) / 1e3,
            mean_itl_ms=fmean(gaps_ms) if gaps_ms else None,
            tokens_per_second=sum(end.completion_tokens for end in ends) / spent_s if spent_s > 0 else None,
            speculative_decoding=self._speculation() if self._may_speculate() else None,
        )

    def facts(self) -> Facts:
        """What it takes to repeat and to judge the answer."""
        ends = [end for _, end in sorted(self.ends.items())]
        figures = [end.figures for end in ends]
        drafted, accepted = sum(each.draft_tokens for each in figures), sum(each.accepted_tokens for each in figures)
        drafts = sum(each.drafts for each in figures)
        return Facts(
            seed=ends[0].seed,
            seeds=[end.seed for end in ends],
            rule=ends[0].acceptance.rule.value,
            rule_settings=ends[0].acceptance.settings,
            model_hash=ends[0].model_hash,
            numerics_id=ends[-1].numerics_ids[-1],
            numerics_ids=list(dict.fromkeys(each for end in ends for each in end.numerics_ids)),
            finish_reasons=[end.finish_reason.value for end in ends],
            rounds=sum(each.rounds for each in figures),
            drafts=drafts,
            draft_tokens=drafted,
            accepted_tokens=accepted,
            acceptance_rate=accepted / max(1, sum(each.evaluated_tokens for each in figures)),
            draft_acceptance_rate=accepted / max(1, drafted),
            mean_acceptance_length=1 + accepted / max(1, drafts),
            fallback_rounds=sum(each.fallback_rounds for each in figures),
            target_reopens=sum(end.target_reopens for end in ends),
            drift_repairs=sum(end.drift_repairs for end in ends),
        )

    def _firsts(self) -> list[CompletionEvent]:
        """The end of the first choice of every prompt."""
        index, firsts = 0, []
        for plan in self.plans:
            firsts.append(self.ends[index])
            index += plan.sample_count
        return firsts

    def _may_speculate(self) -> bool:
        return self.num_choices == 1 and self.plans[0].draft_count != 0

    def _speculation(self) -> SpeculativeDecoding:
        drafted, accepted = (sum(counts) for counts in zip(*self.steps, strict=True)) if self.steps else (0, 0)
        most = self.max_draft_count if self.plans[0].draft_count is None else self.plans[0].draft_count
        lengths = sorted({length for length, _ in self.steps})
        figures = SpeculativeDecoding(
            mean_acceptance_length=1 + accepted / max(1, len(self.steps)),
            draft_acceptance_rate=accepted / max(1, drafted),
            acceptance_histogram=_histogram((kept for _, kept in self.steps), max([most, *lengths])),
            acceptance_histogram_by_draft_length={
                str(length): _histogram((kept for each, kept in self.steps if each == length), length)
                for length in lengths
            },
            num_spec_steps=len(self.steps),
            num_accepted_draft_tokens=accepted,
            num_draft_tokens=drafted,
            num_spec_tokens=most,
        )
        if self.return_rounds:
            figures.per_step_drafted = [each for each, _ in self.steps]
            figures.per_step_accepted = [kept for _, kept in self.steps]
        return figures


def _histogram(counts: Iterable[int], most: int) -> list[int]:
    """How often each count from 0 to `most` occurred."""
    found = Counter(counts)
    return [found[count] for count in range(most + 1)]


def _span_ms(end: CompletionEvent) -> float:
    """Time from the first token to the end."""
    return (end.total_us - end.first_token_us) / 1e3
