"""Events of a request, and the counts over the rounds of a sample that its last event states."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self

from gateway.rounds.choice import Choice
from gateway.rounds.round import Proposal, Round, TokenOrigin
from outrider.answer import CompletionFacts, Delta, DrafterFigures, PromptToken, SpeculationFigures
from outrider.parameters import FinishReason, TokenLogprob

# The source of guesses that come from the request's prediction.
PREDICTION = "prediction"


@dataclass(frozen=True, slots=True)
class GuessFacts:
    """A row of a proposal, counted from 1, and the row above it, 0 for the last committed token; who guessed it, with
    its log-probability and the estimate that it would be kept, where the drafter sent them.
    """

    row: int
    parent: int
    drafter: str
    draft_logprob: float | None
    value: float | None

    @classmethod
    def of(cls, proposal: Proposal, row: int) -> Self:
        """Facts of a row of a proposal."""
        tree, index = proposal.tree, row - 1
        logprob = tree.logprobs[index] if tree.logprobs else None
        value = tree.values[index] if tree.values else None
        return cls(row, tree.parents[index], proposal.source(row), logprob, value)


@dataclass(slots=True)
class OutputToken:
    """A token of the output and the text that was final with it; of an accepted one the guess, if they are reported."""

    token_id: int
    origin: TokenOrigin
    text: str
    logprob: TokenLogprob | None = None
    guess: GuessFacts | None = None


@dataclass(frozen=True, slots=True)
class RejectedGuess:
    """A guess that was not kept; its text is that of the token alone."""

    token_id: int
    text: str
    guess: GuessFacts


@dataclass(slots=True)
class RoundEvent:
    """A round was committed, by a target of new numerics when new_numerics_id is not empty. The prompt's tokens come
    with the first round of the first sample, if they were asked for. The tokens of a beam come when its search is over,
    without a round: those that made them had no tokens.
    """

    tokens: tuple[OutputToken, ...]
    committed: Round | None
    new_numerics_id: str = ""
    sample_index: int = 0
    prompt_tokens: tuple[PromptToken, ...] = ()
    rejected: tuple[RejectedGuess, ...] = ()
    elapsed_us: int = 0  # when the tokens were there, since the gateway received the request
    deltas: tuple[Delta, ...] = ()
    """New pieces of the answer, in order; only content unless the request said how its answer is to be read."""
    choice: Choice | None = None
    """What its guesses came from; rounds of a stretch come from the same one, and beams from none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionEvent(CompletionFacts):
    """A sample ended: its facts, and what was held back of its text."""

    finish_reason: FinishReason
    text_delta: str
    deltas: tuple[Delta, ...] = ()
    stop_string: str | None = None
    """Stop string that ended the answer."""


Event = RoundEvent | CompletionEvent


def round_facts(committed: Round) -> dict[str, Any]:
    """Facts of a round, by the names of RoundFacts in generation_service.proto."""
    proposal, verdict = committed.proposal, committed.verdict
    return {
        "base_len": verdict.base_len,
        "draft_count": committed.draft_count,
        "accepted_count": committed.accepted_count,
        "evaluated_count": verdict.evaluated_count,
        "fallback_reason": None if proposal.fallback_reason is None else proposal.fallback_reason.value,
        "draft_compute_us": proposal.compute_us,
        "verify_compute_us": verdict.compute_us,
        "draft_queue_us": proposal.hop.queue_us,
        "verify_queue_us": verdict.hop.queue_us,
        "draft_wait_us": proposal.hop.wait_us,
        "verify_wait_us": verdict.hop.wait_us,
        "round_us": committed.round_us,
        "draft_bytes": proposal.hop.num_bytes,
        "verify_bytes": verdict.hop.num_bytes,
        "target_reopens": verdict.reopens,
        "drafter": proposal.drafter.name,
        "branches": None if committed.ahead is None else committed.ahead.outcome.value,
    }


def counts_by_drafter(committed: Round) -> dict[str, tuple[int, int]]:
    """Draft tokens of a round and those of them that were accepted, by who guessed them; empty without a proposal."""
    proposal = committed.proposal
    if not committed.draft_count:
        return {}
    if not proposal.sources:
        return {proposal.drafter.name: (committed.draft_count, committed.accepted_count)}
    accepted = Counter(map(proposal.source, committed.verdict.accepted_rows))
    return {drafter: (count, accepted[drafter]) for drafter, count in Counter(proposal.sources).items()}


@dataclass(slots=True)
class SpeculationCounts:
    """Counts of speculation in a request. `drafters` has the draft tokens of each drafter and those of them that were
    accepted.
    """

    rounds: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    evaluated_tokens: int = 0
    fallback_rounds: int = 0
    drafters: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, committed: Round) -> None:
        """Counts a round that is not the prompt's own pass."""
        self.rounds += 1
        self.evaluated_tokens += committed.verdict.evaluated_count
        self.fallback_rounds += committed.proposal.fallback_reason is not None
        if not committed.draft_count:
            return
        self.drafts += 1
        self.draft_tokens += committed.draft_count
        self.accepted_tokens += committed.accepted_count
        for drafter, (drafted, accepted) in counts_by_drafter(committed).items():
            drafted_before, accepted_before = self.drafters.get(drafter, (0, 0))
            self.drafters[drafter] = (drafted_before + drafted, accepted_before + accepted)

    @property
    def prediction_counts(self) -> tuple[int, int]:
        """Guesses from the request's prediction that were accepted, and that were not."""
        drafted, accepted = self.drafters.get(PREDICTION, (0, 0))
        return accepted, drafted - accepted

    @property
    def figures(self) -> SpeculationFigures:
        """Counts so far, and the rates of them."""
        return SpeculationFigures(
            rounds=self.rounds,
            drafts=self.drafts,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
            evaluated_tokens=self.evaluated_tokens,
            acceptance_rate=self.accepted_tokens / max(1, self.evaluated_tokens),
            draft_acceptance_rate=self.accepted_tokens / max(1, self.draft_tokens),
            mean_acceptance_length=1 + self.accepted_tokens / max(1, self.drafts),
            fallback_rounds=self.fallback_rounds,
            drafters=tuple(DrafterFigures(drafter, *counts) for drafter, counts in self.drafters.items()),
        )


@dataclass(slots=True)
class SampleCounts:
    """Counts over the rounds of a sample, or of the search that makes all sequences of a request."""

    numerics_ids: list[str] = field(default_factory=list)
    """Numerics of all targets that took part, in order."""
    cached_prompt_tokens: int = 0
    first_token_us: int = 0
    target_reopens: int = 0
    drift_repairs: int = 0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)

    def add(self, committed: Round, elapsed_us: int) -> str:
        """Counts a round, which came so long after the request. Returns the target's numerics if they are other than in
        the round before, else nothing.
        """
        verdict = committed.verdict
        self.first_token_us = self.first_token_us or elapsed_us
        self.target_reopens += verdict.reopens
        self.drift_repairs += committed.drift_repairs
        if committed.is_first:
            self.cached_prompt_tokens = verdict.prefix_len
        else:
            self.speculation.add(committed)
        if self.numerics_ids[-1:] == [verdict.numerics_id]:
            return ""
        self.numerics_ids.append(verdict.numerics_id)
        return verdict.numerics_id if len(self.numerics_ids) > 1 else ""
