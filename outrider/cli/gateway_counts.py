"""What a gateway's `/metrics` tell about its work, as a line for people. Knows names of metrics, and no HTTP."""

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "outrider_"
SPECULATION = "spec_decode_num_"


@dataclass(frozen=True, slots=True)
class GatewayCounts:
    """Counters since the gateway's start, and three gauges. `draft_count` is the K of its policy."""

    running: int
    waiting: int
    draft_count: int
    tokens: float
    draft_tokens: float
    evaluated_tokens: float
    accepted_tokens: float


def parse_counts(text: str) -> GatewayCounts | None:
    """Reads the text format of Prometheus; None where it is not that of a gateway."""
    try:
        values = {
            sample.name.removeprefix(PREFIX): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if not sample.labels
        }
        return GatewayCounts(
            running=int(values["num_requests_running"]),
            waiting=int(values["num_requests_waiting"]),
            draft_count=int(values["current_draft_tokens"]),
            tokens=values["generation_tokens_total"],
            draft_tokens=values[f"{SPECULATION}draft_tokens_total"],
            evaluated_tokens=values[f"{SPECULATION}evaluated_tokens_total"],
            accepted_tokens=values[f"{SPECULATION}accepted_tokens_total"],
        )
    except (KeyError, ValueError):
        return None


def work_line(before: GatewayCounts | None, now: GatewayCounts, seconds: float) -> str:
    """Who runs and waits, and speed and acceptance since the counts before; acceptance is accepted / evaluated."""
    parts = [f"{now.running} running", f"{now.waiting} waiting"]
    if before is not None and seconds > 0 and now.tokens >= before.tokens:
        parts.append(f"{(now.tokens - before.tokens) / seconds:.0f} tokens/s")
        evaluated = now.evaluated_tokens - before.evaluated_tokens
        if evaluated > 0:
            parts.append(f"acceptance rate {(now.accepted_tokens - before.accepted_tokens) / evaluated:.2f}")
    parts.append(f"K {now.draft_count}")
    parts.append(f"{now.tokens:,.0f} tokens")
    return ", ".join(parts)
