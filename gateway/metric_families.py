"""The gateway's counters and histograms: names, meanings, buckets. Counts nothing by itself.

Names are vLLM's behind a prefix of our own where vLLM has one, and mean the same; docs/observability.md lists all.
"""

from prometheus_client import CollectorRegistry, Counter, Histogram

from gateway.rounds import FallbackReason

PREFIX = "outrider_"
OUTCOME_LABELS = ("plain", "fallback", "corrected", "bonus", "ended")
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


class SpeculationFamilies:
    """What speculation did, a round at a time."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, meaning, labels, registry=registry)

        name = "spec_decode_num_"
        self.drafts = counter(name + "drafts", "Verdicts on at least one draft token.")
        self.draft_tokens = counter(name + "draft_tokens", "Draft tokens that were proposed to the target.")
        self.accepted_tokens = counter(name + "accepted_tokens", "Draft tokens that the target accepted.")
        self._accepted_at = counter(
            name + "accepted_tokens_per_pos", "Accepted draft tokens by their position in a proposal.", "position"
        )
        self.evaluated_tokens = counter(
            name + "evaluated_tokens", "Draft tokens that the target tested; behind a rejection nothing is."
        )
        # A counter behind its labels is looked up once: that takes longer than counting.
        outcomes = counter("round_outcomes", "Verdicts by how they ended.", "outcome")
        self.outcomes = {outcome: outcomes.labels(outcome) for outcome in OUTCOME_LABELS}
        fallbacks = counter("fallback_rounds", "Rounds that were to be speculative and had no draft.", "reason")
        self.fallbacks = {reason: fallbacks.labels(reason.value) for reason in FallbackReason}
        wire_bytes = counter("wire_bytes", "Bytes of the messages of sessions, both ways.", "peer")
        self.draft_bytes, self.target_bytes = wire_bytes.labels("draft"), wire_bytes.labels("target")
        self.reopens = counter("target_reopens", "Sessions that were opened again on a target.")
        self.drift_repairs = counter("drift_repairs", "Caches that did not hold what they should, and were redone.")
        self.dropped_tokens = counter("dropped_tokens", "Tokens that were decoded behind a stop string and not sent.")
        self._positions: list[Counter] = []

    def accepted_at(self, num_accepted: int) -> list[Counter]:
        """The counters of so many first positions of a proposal."""
        while len(self._positions) < num_accepted:
            self._positions.append(self._accepted_at.labels(len(self._positions)))
        return self._positions[:num_accepted]


class RoundTimes:
    """Where the time of a round goes. Those of the prompt's own pass are in no family but the last."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, meaning: str) -> Histogram:
            return Histogram(f"{PREFIX}{name}_seconds", meaning, buckets=ROUND_S, registry=registry)

        self.round = histogram("round", "A round with a draft, from its begin to its commit.")
        self.draft_compute = histogram("draft_compute", "Computing of a proposal, as the draft measured it.")
        self.draft_rpc = histogram("draft_rpc", "Waiting for a proposal.")
        self.draft_overhead = histogram("draft_rpc_overhead", "Of that, neither the draft's queue nor its computing.")
        self.verify_compute = histogram("verify_compute", "Computing of a verdict, as the target measured it.")
        self.verify_rpc = histogram("verify_rpc", "Waiting for a verdict on a draft.")
        self.verify_overhead = histogram("verify_rpc_overhead", "Of that, neither the target's queue nor computing.")
        self.burst = histogram("inter_token_latency", "From one burst of tokens of a sample to the next.")
        self.prompt = histogram("prompt_compute", "Computing of a prompt with its first token, by the target.")


class RequestFamilies:
    """What users feel, a sample at a time."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, meaning, labels, registry=registry)

        def histogram(name: str, meaning: str, buckets: tuple[float, ...] = REQUEST_S) -> Histogram:
            return Histogram(PREFIX + name, meaning, buckets=buckets, registry=registry)

        self.prompt_tokens = counter("prompt_tokens", "Tokens of answered prompts.")
        self.cached_tokens = counter("cached_prompt_tokens", "Of these, tokens found in the target's prefix cache.")
        self.generation_tokens = counter("generation_tokens", "Tokens sent to clients.")
        self.success = counter("request_success", "Samples that ended, by how they ended.", "finished_reason")
        self.rejections = counter("admission_rejections", "Requests that were turned away at once.", "reason")
        self.first_token = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.")
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time of a token behind the first one.", ROUND_S
        )
        self.total = histogram("e2e_request_latency_seconds", "From a request's arrival to its end.")
        self.queue = histogram("request_queue_time_seconds", "Waiting for a place.")
        self.prefill = histogram("request_prefill_time_seconds", "From the place to the first token.")
        self.decode = histogram("request_decode_time_seconds", "From the first token to the end.")
        self.inference = histogram("request_inference_time_seconds", "From the place to the end.")
        self.prompt_size = histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.answer_size = histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)
        self.params_n = histogram("request_params_n", "Samples that a request asked for.", SAMPLES)
        self.params_max_tokens = histogram("request_params_max_tokens", "Most tokens that a request allowed.", TOKENS)
