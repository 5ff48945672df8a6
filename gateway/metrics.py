"""The gateway's figures for Prometheus: what happens to requests, and what a scrape looks up.

Names are vLLM's after a prefix of our own where vLLM has one, and mean the same; docs/observability.md lists all.
Accepted tokens exclude the token that the target adds, and a draft is a verdict on at least one draft token. The books
balance: tokens sent + tokens dropped = tokens accepted + one for each verdict but those whose outcome is "ended", which
an accepted token ended.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from gateway.generation.admission import Admission
from gateway.generation.backend import Backend
from gateway.generation.events import CompletionEvent, Event, RoundEvent, counts_by_drafter
from gateway.generation.request import CheckedRequest
from gateway.keys.door import Door
from gateway.rounds.explanation import best_count
from gateway.rounds.round import FallbackReason, Round, TokenOrigin
from gateway.sessions.peer import ROLLBACK_S
from gateway.sessions.placement import MovedFor
from outrider.errors import OutriderError
from outrider.parameters import FinishReason
from outrider.process.metrics import Count, Figures, Tally

PREFIX = "outrider_"
# What happens in a round takes between tens of microseconds and some seconds; half of it is below 10 ms.
ROUND_S = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 10.0),
)
REQUEST_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)
SAMPLES = (1, 2, 4, 8)
# As vLLM names them; everything else that may end a request is an error.
FINISHED = {FinishReason.LENGTH: "length"}
STOPPED, ABORTED, FAILED = "stop", "abort", "error"
OUTCOMES = {
    TokenOrigin.PLAIN: "plain",
    TokenOrigin.CORRECTION: "corrected",
    TokenOrigin.BONUS: "bonus",
    TokenOrigin.ACCEPTED: "ended",
}


# There are as many series of each as the file of keys has names.
KEY_REQUESTS, KEY_REJECTIONS = "key_requests", "key_rejections"
KEY_PROMPT_TOKENS, KEY_TOKENS = "key_prompt_tokens", "key_generation_tokens"
OF_KEYS = {
    KEY_REQUESTS: "Requests that had a place and are over",
    KEY_REJECTIONS: "Requests that were turned away at once",
    KEY_PROMPT_TOKENS: "Tokens of the prompts of requests that are over",
    KEY_TOKENS: "Tokens of their answers",
}

# The draft service's own choice, which has no name of its own here.
USUAL_DRAFTER = "default"


class GatewayMetrics:
    """Counts what a frontend's Observer gets: speculation and times by the round, and what users feel by the sample."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry, self._rejected_rows, self._positions = registry, 0, list[Count]()
        counter, counters, histogram = (figures := Figures(PREFIX)).counter, figures.counters, figures.histogram

        def times(name: str, meaning: str, bounds: Sequence[float] = ROUND_S) -> Tally:
            return histogram(f"{name}_seconds", meaning, bounds)

        name = "spec_decode_num_"
        self.drafts = counter(name + "drafts", "Verdicts on at least one draft token.")
        self.draft_tokens = counter(name + "draft_tokens", "Draft tokens that were proposed to the target.")
        self.accepted_tokens = counter(name + "accepted_tokens", "Draft tokens that the target accepted.")
        self._accepted_at = counters(
            name + "accepted_tokens_per_pos", "Accepted draft tokens by their position in a proposal.", "position"
        )
        self.evaluated_tokens = counter(
            name + "evaluated_tokens", "Draft tokens that the target tested; behind a rejection nothing is."
        )
        # Each drafter's part of the two figures above, by the name that rounds say.
        self._drafted = counters("drafter_draft_tokens", "Draft tokens that were proposed, by drafter.", "drafter")
        self._kept = counters("drafter_accepted_tokens", "Of these, tokens that the target accepted.", "drafter")
        outcomes = counters("round_outcomes", "Verdicts by how they ended.", "outcome")
        self.fallback_outcome = outcomes["fallback"]
        self.outcomes = {origin: outcomes[outcome] for origin, outcome in OUTCOMES.items()}
        fallbacks = counters("fallback_rounds", "Rounds that were to be speculative and had no draft.", "reason")
        self.fallbacks = {reason: fallbacks[reason.value] for reason in FallbackReason}
        self._branches = counters("branches", "Rounds for which branches were asked, by what came of them.", "outcome")
        wire_bytes = counters("wire_bytes", "Bytes of the messages of sessions, both ways.", "peer")
        self.draft_bytes, self.target_bytes = wire_bytes["draft"], wire_bytes["target"]
        self.reopens = counter("target_reopens", "Sessions that were opened again on a target.")
        self.drift_repairs = counter("drift_repairs", "Caches that did not hold what they should, and were redone.")
        self.dropped_tokens = counter("dropped_tokens", "Tokens that were decoded behind a stop string and not sent.")
        # Where the time of a round goes. Those of the prompt's own pass are in no family but the last.
        self.round = times("round", "A round with a draft, from its begin to its commit.")
        self.draft_compute = times("draft_compute", "Computing of a proposal, as the draft measured it.")
        self.draft_rpc = times("draft_rpc", "Waiting for a proposal.")
        self.draft_overhead = times("draft_rpc_overhead", "Of that, neither the draft's queue nor its computing.")
        self.verify_compute = times("verify_compute", "Computing of a verdict, as the target measured it.")
        self.verify_rpc = times("verify_rpc", "Waiting for a verdict on a draft.")
        self.verify_overhead = times("verify_rpc_overhead", "Of that, neither the target's queue nor computing.")
        self.burst = times("inter_token_latency", "From one burst of tokens of a sample to the next.")
        self.prompt_compute = times("prompt_compute", "Computing of a prompt with its first token, by the target.")
        # What users feel.
        self.prompt_tokens = counter("prompt_tokens", "Tokens of answered prompts.")
        self.cached_tokens = counter("cached_prompt_tokens", "Of these, tokens found in the target's prefix cache.")
        self.generation_tokens = counter("generation_tokens", "Tokens sent to clients.")
        self.success = counters("request_success", "Samples that ended, by how they ended.", "finished_reason")
        self.rejections = counters("admission_rejections", "Requests that were turned away at once.", "reason")
        self._of_keys = {name: counters(name, f"{meaning}, by API key.", "key") for name, meaning in OF_KEYS.items()}
        self.first_token = times("time_to_first_token", "From a request's arrival to its first token.", REQUEST_S)
        self.per_token = times("request_time_per_output_token", "Mean time of a token behind the first one.")
        self.total = times("e2e_request_latency", "From a request's arrival to its end.", REQUEST_S)
        self.queue = times("request_queue_time", "Waiting of a sample for its place.", REQUEST_S)
        self.prefill = times("request_prefill_time", "From the place to the first token.", REQUEST_S)
        self.decode = times("request_decode_time", "From the first token to the end.", REQUEST_S)
        self.inference = times("request_inference_time", "From the place to the end.", REQUEST_S)
        self.prompt_size = histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.answer_size = histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)
        self.params_n = histogram("request_params_n", "Samples that a request asked for.", SAMPLES)
        self.params_max_tokens = histogram("request_params_max_tokens", "Most tokens that a request allowed.", TOKENS)
        registry.register(figures)  # Last: what has no name yet could not be asked for by name.

    def watch(self, admission: Admission, backend: Backend, door: Door | None) -> None:
        """Reports at every scrape what runs and waits, which services are there, what was rolled back, and how often
        a caller was refused.
        """
        self.registry.register(Watched(admission, backend, door, lambda: self._rejected_rows))

    def admitted(self, requests: Sequence[CheckedRequest]) -> None:
        for request in requests:
            self.params_n.add(request.sample_count)
            self.params_max_tokens.add(request.spec.max_len - request.spec.prompt_len)

    def placed(self, waited_s: float) -> None:
        self.queue.add(waited_s)

    def rejected(self, error: OutriderError, key: str | None) -> None:
        self.rejections[error.reason.lower()].total += 1
        if key is not None:
            self._of_keys[KEY_REJECTIONS][key].total += 1

    def used(self, key: str, prompt_tokens: int, tokens: int) -> None:
        self._of_keys[KEY_REQUESTS][key].total += 1
        self._of_keys[KEY_PROMPT_TOKENS][key].total += prompt_tokens
        self._of_keys[KEY_TOKENS][key].total += tokens

    def observe(self, event: Event) -> None:
        if isinstance(event, CompletionEvent):
            self.success[FINISHED.get(event.finish_reason, STOPPED)].total += 1
            if event.sample_index == 0:
                # The samples of a request share its prompt.
                self.prompt_tokens.total += event.prompt_tokens
                self.cached_tokens.total += event.cached_prompt_tokens
                self.prompt_size.add(event.prompt_tokens)
            self.answer_size.add(event.completion_tokens)
            self.total.add(event.total_us / 1e6)
            self.prefill.add(max(0, event.first_token_us - event.queue_us) / 1e6)
            self.decode.add(event.decode_us / 1e6)
            self.inference.add(max(0, event.total_us - event.queue_us) / 1e6)
            if event.completion_tokens > 1:
                self.per_token.add(event.decode_us / 1e6 / (event.completion_tokens - 1))
            return
        self.generation_tokens.total += len(event.tokens)
        if event.committed is None:
            return
        self._count(event, event.committed)
        self._time(event.committed)
        if event.committed.is_first:
            self.first_token.add(event.elapsed_us / 1e6)

    def ended(self, error: BaseException | None) -> None:
        if error is not None:
            reason = ABORTED if isinstance(error, asyncio.CancelledError | GeneratorExit) else FAILED
            self.success[reason].total += 1

    def _count(self, event: RoundEvent, committed: Round) -> None:
        proposal, verdict = committed.proposal, committed.verdict
        self.target_bytes.total += verdict.hop.num_bytes
        if committed.draft_count or committed.ahead is not None:
            # Where a draft runs ahead, a round may have its messages and no proposal.
            self.draft_bytes.total += proposal.hop.num_bytes
        if committed.ahead is not None:
            self._branches[committed.ahead.outcome.value].total += 1
        if proposal.fallback_reason is not None:
            self.fallbacks[proposal.fallback_reason].total += 1
            self.fallback_outcome.total += 1
        else:
            self.outcomes[committed.origins[-1]].total += 1
        if committed.draft_count:
            self.drafts.total += 1
            self.draft_tokens.total += committed.draft_count
            self.accepted_tokens.total += committed.accepted_count
            self.evaluated_tokens.total += verdict.evaluated_count
            for drafter, (drafted, accepted) in counts_by_drafter(committed).items():
                self._drafted[drafter or USUAL_DRAFTER].total += drafted
                self._kept[drafter or USUAL_DRAFTER].total += accepted
            # The accepted rows of a tree are one path, so that their number is the depth to which it goes.
            while len(self._positions) < committed.accepted_count:
                self._positions.append(self._accepted_at[str(len(self._positions))])
            for position in self._positions[: committed.accepted_count]:
                position.total += 1
            self._rejected_rows += committed.draft_count - committed.accepted_count
        self.dropped_tokens.total += len(committed.token_ids) - len(event.tokens)
        self.reopens.total += verdict.reopens
        self.drift_repairs.total += committed.drift_repairs

    def _time(self, committed: Round) -> None:
        proposal, verdict = committed.proposal, committed.verdict
        if committed.is_first:
            self.prompt_compute.add(verdict.compute_us / 1e6)
            return
        self.burst.add(committed.gap_us / 1e6)
        self.verify_compute.add(verdict.compute_us / 1e6)
        if not committed.draft_count:
            return
        # Of a round with a draft, because a verdict that comes unasked has not been waited for as an answer is.
        draft, verify = proposal.hop, verdict.hop
        self.round.add(committed.round_us / 1e6)
        self.draft_compute.add(proposal.compute_us / 1e6)
        if verdict.own is not None:
            # No round waited for a proposal that the target made for itself, and its verdict may have come unasked.
            return
        self.draft_rpc.add(draft.wait_us / 1e6)
        self.draft_overhead.add(max(0, draft.wait_us - draft.queue_us - proposal.compute_us) / 1e6)
        self.verify_rpc.add(verify.wait_us / 1e6)
        self.verify_overhead.add(max(0, verify.wait_us - verify.queue_us - verdict.compute_us) / 1e6)


class Watched:
    """Figures that are looked up at every scrape: what runs and waits, which services are there, what was rolled back,
    and who was not let in.
    """

    def __init__(
        self, admission: Admission, backend: Backend, door: Door | None, rejected_tokens: Callable[[], int]
    ) -> None:
        """`rejected_tokens` returns how many draft tokens were not kept, which both caches have to forget."""
        self._admission = admission
        self._backend = backend
        self._door = door
        self._rejected_tokens = rejected_tokens

    def collect(self) -> Iterator[Metric]:
        """The families; see prometheus_client.registry."""
        admission, backend = self._admission, self._backend
        yield GaugeMetricFamily(PREFIX + "num_requests_running", "Samples that run.", admission.running)
        yield GaugeMetricFamily(
            PREFIX + "num_requests_waiting", "Requests that wait and have no sample running.", admission.waiting
        )
        meaning = "Requests that were not let in, for want of a known API key."
        refusals = CounterMetricFamily(PREFIX + "key_refusals", meaning, labels=["surface"])
        for surface, count in self._door.refusals.items() if self._door else ():
            refusals.add_metric([surface], count)
        yield refusals
        meaning = "Whether the store of the keys' limits is there; 0: each gateway has its part of them."
        store_up = GaugeMetricFamily(PREFIX + "key_store_up", meaning)
        if self._door is not None and self._door.usage.is_away is not None:
            store_up.add_metric([], not self._door.usage.is_away)
        yield store_up
        meaning = "K: draft tokens a round that the policy would ask for."
        policy = backend.policies.latest
        yield GaugeMetricFamily(PREFIX + "current_draft_tokens", meaning, best_count(policy.costs, policy.tuning))
        memories = backend.lookup.memories if backend.lookup is not None else None
        meaning = "Bytes of what finished requests said, to look guesses up in."
        yield GaugeMetricFamily(PREFIX + "lookup_memory_bytes", meaning, memories.num_bytes if memories else 0)
        meaning = "Salts that have such a memory."
        yield GaugeMetricFamily(PREFIX + "lookup_memory_salts", meaning, len(memories) if memories else 0)
        meaning = "Whether a service is there and fits."
        up = GaugeMetricFamily(PREFIX + "service_up", meaning, labels=["service", "address"])
        meaning = "Whether a service is about to end, and gets no new sessions."
        draining = GaugeMetricFamily(PREFIX + "service_draining", meaning, labels=["service", "address"])
        meaning = "How long reading takes of what waits at a service, as it said last."
        backlog = GaugeMetricFamily(PREFIX + "service_backlog_seconds", meaning, labels=["service", "address"])
        meaning = "What a service sent that no service may send."
        faults = CounterMetricFamily(PREFIX + "service_faults", meaning, labels=["service", "address"])
        meaning = "Tokens that a cache had to forget, guesses for the most part."
        rolled_back = CounterMetricFamily(PREFIX + "rolled_back_tokens", meaning, labels=["side"])
        meaning = "Calls of Rollback, from the gateway's side."
        rollback_times = HistogramMetricFamily(PREFIX + "rollback_rpc_seconds", meaning, labels=["peer"])
        for service, all_replicas in (("target", [backend.target]), ("draft", [*backend.drafts.values()])):
            num_tokens, seconds = self._rejected_tokens(), Tally(ROLLBACK_S)
            for replicas in all_replicas:
                for peer in replicas.links:
                    up.add_metric([service, peer.address], replicas.fits(peer))
                    draining.add_metric([service, peer.address], peer.is_draining)
                    if (load := peer.load) is not None:
                        backlog_s = load.waiting_tokens * load.prefill_us_per_token / 1e6
                        backlog.add_metric([service, peer.address], backlog_s)
                    faults.add_metric([service, peer.address], peer.faults)
                num_tokens += replicas.rollbacks.num_tokens
                seconds.add_tally(replicas.rollbacks.seconds)
            rolled_back.add_metric([service], num_tokens)
            rollback_times.add_metric([service], seconds.buckets, seconds.total)
        yield from self._places()
        yield from (up, draining, backlog, faults, rolled_back, rollback_times)

    def _places(self) -> Iterator[Metric]:
        """Where sessions go, and what was known for it."""
        target = self._backend.target
        meaning = "Sessions that were given a target, by the reason for it."
        placements = CounterMetricFamily(PREFIX + "target_placements", meaning, labels=["reason"])
        for reason, count in target.placements.items():
            placements.add_metric([reason], count)
        meaning = "Sessions that wait until one of several targets has room."
        waiting = GaugeMetricFamily(PREFIX + "sessions_waiting_for_room", meaning, len(target.room))
        moves = CounterMetricFamily(PREFIX + "draft_moves", "Running sessions that changed drafts.", labels=["reason"])
        for why in MovedFor:
            moves.add_metric([why], sum(each.moves[why] for each in self._backend.drafts.values()))
        meaning = "Running sessions that changed targets, though nothing had failed."
        target_moves = CounterMetricFamily(PREFIX + "target_moves", meaning, labels=["reason"])
        target_moves.add_metric([MovedFor.LEAVING], target.moves[MovedFor.LEAVING])
        hits = target.prefix_hits
        meaning = "Tokens of prompts that should have been in a target's cache, and that were."
        tokens = CounterMetricFamily(PREFIX + "target_prefix_tokens", meaning, labels=["kind"])
        tokens.add_metric(["expected"], hits.expected)
        tokens.add_metric(["found"], hits.found)
        meaning = "By how many tokens these two differ, for each session that was opened."
        errors = HistogramMetricFamily(PREFIX + "target_prefix_error_tokens", meaning)
        errors.add_metric([], hits.errors.buckets, hits.errors.total)
        yield from (placements, waiting, moves, target_moves, tokens, errors)
