"""The figures of a service: what its parts count is what a scrape says, at that moment."""

import pytest
from prometheus_client import generate_latest
from support.observability import families, findings

from outrider.engine.runner import ForwardCounts
from outrider.estimates.timing import ComputeTimes
from outrider.model_service.metrics import ServiceMetrics
from outrider.model_service.servicer import ServiceFacts
from outrider.model_service.sessions import ServiceCounts

FACTS = ServiceFacts(
    role="target",
    instance_id=1,
    model_name="small",
    model_hash="ab",
    numerics_id="cpu-x",
    parameter_count=1,
    weight_bytes=2,
    weight_dtype="bfloat16",
    device="cpu",
    thread_count=1,
    context_len=64,
    vocabulary_size=10,
    vocabulary_digests=(),
    eos_token_ids=frozenset(),
    block_size=16,
    block_count=8,
    row_costs={1: 1_000, 2: 1_200, 4: 1_600},
)
COUNTS = ServiceCounts(
    free_block_count=6,
    session_count=2,
    leased_session_count=1,
    stopped_job_count=3,
    preemption_count=4,
    evicted_session_count=5,
    expired_lease_count=6,
    cached_block_count=2,
    prefix_query_tokens=70,
    prefix_hit_tokens=60,
)


class Device:
    """A device with three jobs waiting, and stalled for half a second."""

    num_waiting = 3
    stalled_us = 500_000


def exposition(forwards: ForwardCounts, *answers: ComputeTimes) -> str:
    """What a scrape of a service with these forwards and answers gets."""
    metrics = ServiceMetrics(FACTS, lambda: COUNTS, lambda: {1: 300, 2: 200}, forwards, Device())
    for times in answers:
        metrics.observe(times)
    metrics.observe_rollback(0.00002)
    return generate_latest(metrics.registry).decode()


def test_counts_are_told_as_they_are() -> None:
    """Each under its own name; usage is the share of blocks that sessions hold."""
    text = exposition(ForwardCounts(busy_s=0.25))
    assert findings(text) == []
    values = {
        name.removeprefix("outrider_"): family.samples[0].value
        for name, family in families(text).items()
        if family.type != "histogram" and not name.startswith("process_") and family.samples
    }
    assert values == {
        "model_info": 1,
        "kv_cache_usage_perc": 0.25,
        "kv_blocks": 8,
        "kv_blocks_free": 6,
        "kv_blocks_cached": 2,
        "sessions": 2,
        "leased_sessions": 1,
        "num_preemptions_total": 4,
        "evicted_sessions_total": 5,
        "expired_leases_total": 6,
        "stopped_jobs_total": 3,
        "prefix_cache_queries_total": 70,
        "prefix_cache_hits_total": 60,
        "forwards_total": 0,
        "forward_rows_total": 0,
        "device_busy_seconds_total": 0.25,
        "waiting_jobs": 3,
        # A row in four costs 400 us.
        "backlog_seconds": pytest.approx(0.2),
        "device_stalled_seconds": 0.5,
    }


def test_forwards_and_jobs_are_sorted_into_buckets() -> None:
    """An answer that needed no forward is no job; a forward counts its sessions and rows."""
    forwards = ForwardCounts()
    for num_sessions in (1, 1, 5):
        forwards.add(num_sessions, 10 * num_sessions)
    text = exposition(forwards, ComputeTimes(80, 3_000, 2), ComputeTimes(0, 0, 0))
    lines = text.splitlines()
    assert findings(text) == []
    for line in (
        'outrider_forwards_total{service="target"} 3.0',
        'outrider_forward_rows_total{service="target"} 70.0',
        'outrider_forward_sessions_sum{service="target"} 7.0',
        'outrider_forward_sessions_bucket{le="4.0",service="target"} 2.0',
        'outrider_job_queue_seconds_bucket{le="5e-05",service="target"} 0.0',
        'outrider_job_queue_seconds_bucket{le="0.0001",service="target"} 1.0',
        'outrider_job_compute_seconds_count{service="target"} 1.0',
        'outrider_job_compute_seconds_sum{service="target"} 0.003',
        'outrider_rollback_compute_seconds_bucket{le="1e-05",service="target"} 0.0',
        'outrider_rollback_compute_seconds_bucket{le="2.5e-05",service="target"} 1.0',
    ):
        assert line in lines
