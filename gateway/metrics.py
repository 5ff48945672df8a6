"""Counts what happens to requests, for Prometheus. Knows events and errors, neither HTTP nor sessions.

Definitions are vLLM's: accepted tokens exclude the token that the target adds, and a draft is a verdict on at least one
draft token. The books balance: tokens sent + tokens dropped = tokens accepted + one for each verdict but those whose
outcome is "ended", which an accepted token ended.
"""

import asyncio
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from gateway.admission import Admission
from gateway.backend import Backend
from gateway.generation import CompletionEvent, Event, RoundEvent
from gateway.metric_families import RequestFamilies, RoundTimes, SpeculationFamilies
from gateway.requests import GenerationPlan
from gateway.rounds import Round, TokenOrigin
from gateway.watched import Watched
from outrider.errors import OutriderError
from outrider.parameters import FinishReason

# As vLLM names them; everything else that may end a request is an error.
FINISHED = {FinishReason.LENGTH: "length"}
STOPPED, ABORTED, FAILED = "stop", "abort", "error"
OUTCOMES = {
    TokenOrigin.PLAIN: "plain",
    TokenOrigin.CORRECTION: "corrected",
    TokenOrigin.BONUS: "bonus",
    TokenOrigin.ACCEPTED: "ended",
}


class GatewayMetrics:
    """The figures of one gateway; see gateway.front_door.Observer."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._speculation = SpeculationFamilies(registry)
        self._times = RoundTimes(registry)
        self._requests = RequestFamilies(registry)
        self._rejected_rows = 0

    def watch(self, admission: Admission, backend: Backend) -> None:
        """Tells at every scrape who runs and waits, which services are there, and what was rolled back."""
        self.registry.register(Watched(admission, backend, lambda: self._rejected_rows))

    def admitted(self, waited_s: float, plans: Sequence[GenerationPlan] = ()) -> None:
        """A request has its places, after so many seconds; `plans` are its checked parts."""
        self._requests.queue.observe(waited_s)
        for plan in plans:
            self._requests.params_n.observe(plan.sample_count)
            self._requests.params_max_tokens.observe(plan.spec.max_len - plan.spec.prompt_len)

    def rejected(self, error: OutriderError) -> None:
        """A request was turned away before anything was spent on it."""
        self._requests.rejections.labels(error.reason.lower()).inc()

    def observe(self, event: Event) -> None:
        """A round or a completion of any sample of any request."""
        if isinstance(event, RoundEvent):
            self._count(event)
            self._time(event.committed)
            if event.committed.is_first:
                self._requests.first_token.observe(event.elapsed_us / 1e6)
        else:
            self._complete(event)

    def ended(self, error: BaseException | None) -> None:
        """A request is over: None well, CancelledError because its client left."""
        if error is not None:
            reason = ABORTED if isinstance(error, asyncio.CancelledError | GeneratorExit) else FAILED
            self._requests.success.labels(reason).inc()

    def _count(self, event: RoundEvent) -> None:
        committed, families = event.committed, self._speculation
        self._requests.generation_tokens.inc(len(event.tokens))
        families.outcomes[_outcome(committed)].inc()
        families.target_bytes.inc(committed.verify_way.num_bytes)
        if committed.draft_count:
            self._count_draft(committed)
        if committed.fallback_reason is not None:
            families.fallbacks[committed.fallback_reason].inc()
        rare = (
            (families.dropped_tokens, len(committed.token_ids) - len(event.tokens)),
            (families.reopens, committed.target_reopens),
            (families.drift_repairs, committed.drift_repairs),
        )
        for counter, number in rare:
            if number:
                counter.inc(number)

    def _count_draft(self, committed: Round) -> None:
        families = self._speculation
        families.drafts.inc()
        families.draft_tokens.inc(committed.draft_count)
        families.accepted_tokens.inc(committed.accepted_count)
        families.evaluated_tokens.inc(committed.evaluated_count)
        for position in families.accepted_at(committed.accepted_count):
            position.inc()
        families.draft_bytes.inc(committed.draft_way.num_bytes)
        self._rejected_rows += committed.draft_count - committed.accepted_count

    def _time(self, committed: Round) -> None:
        times = self._times
        if committed.is_first:
            times.prompt.observe(committed.verify_compute_us / 1e6)
            return
        times.burst.observe(committed.gap_us / 1e6)
        times.verify_compute.observe(committed.verify_compute_us / 1e6)
        if committed.draft_count == 0:
            return
        # Of a round with a draft, because a verdict that comes unasked has not been waited for as an answer is.
        draft, verify = committed.draft_way, committed.verify_way
        times.round.observe(committed.round_us / 1e6)
        times.draft_compute.observe(committed.draft_compute_us / 1e6)
        times.draft_rpc.observe(draft.wait_us / 1e6)
        times.draft_overhead.observe(max(0, draft.wait_us - draft.queue_us - committed.draft_compute_us) / 1e6)
        times.verify_rpc.observe(verify.wait_us / 1e6)
        times.verify_overhead.observe(max(0, verify.wait_us - verify.queue_us - committed.verify_compute_us) / 1e6)

    def _complete(self, event: CompletionEvent) -> None:
        families, num_tokens = self._requests, event.completion_tokens
        families.success.labels(FINISHED.get(event.finish_reason, STOPPED)).inc()
        if event.sample_index == 0:
            # The samples of a request share its prompt.
            families.prompt_tokens.inc(event.prompt_tokens)
            families.cached_tokens.inc(event.cached_prompt_tokens)
            families.prompt_size.observe(event.prompt_tokens)
        families.answer_size.observe(num_tokens)
        families.total.observe(event.total_us / 1e6)
        families.prefill.observe(max(0, event.first_token_us - event.queue_us) / 1e6)
        families.decode.observe((event.total_us - event.first_token_us) / 1e6)
        families.inference.observe(max(0, event.total_us - event.queue_us) / 1e6)
        if num_tokens > 1:
            families.per_token.observe((event.total_us - event.first_token_us) / 1e6 / (num_tokens - 1))


def _outcome(committed: Round) -> str:
    """How a verdict ended: with which token, or without one of the draft's that was to be there."""
    if committed.fallback_reason is not None:
        return "fallback"
    return OUTCOMES[committed.origins[-1]]
