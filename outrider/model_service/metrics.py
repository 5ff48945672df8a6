"""The figures of a service with a model, for Prometheus. Read when somebody asks: nothing is counted for them alone.

What a forward costs for this is two additions; sessions, cache and device are looked at by the scrape. Only the times
of jobs are sorted into buckets as they come, where answers are sent and not where they are computed.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from outrider.engine.runner import ForwardCounts
from outrider.engine.worker import DeviceWorker
from outrider.metric_aliases import Renamed
from outrider.metrics_server import Registry
from outrider.model_service.servicer import ServiceFacts
from outrider.model_service.session_store import ServiceCounts
from outrider.rpc.fencing import ComputeTimes
from outrider.tallies import Tally, tally_of

PREFIX = "outrider_"
JOB_S = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
# A rollback computes nothing: it cuts a list of blocks.
ROLLBACK_S = (0.00001, 0.000025, *JOB_S)
BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# What requests say of the prefix cache is the gateway's to tell under these names.
VLLM_NAMES = {f"vllm:{name}": PREFIX + name for name in ("kv_cache_usage_perc", "num_preemptions")}


class ServiceMetrics:
    """A collector for one service, in a registry of its own; see prometheus_client.registry."""

    def __init__(
        self,
        facts: ServiceFacts,
        counts: Callable[[], ServiceCounts],
        forwards: ForwardCounts,
        device: DeviceWorker[Any],
        *,
        vllm_names: bool = False,
    ) -> None:
        """With `vllm_names`, what vLLM has too is there a second time, under its names."""
        self._facts = facts
        self._counts = counts
        self._forwards = forwards
        self._device = device
        self._queue_s, self._compute_s, self._rollback_s = Tally(JOB_S), Tally(JOB_S), Tally(ROLLBACK_S)
        self.registry = Registry()
        self.registry.register(self)
        if vllm_names:
            self.registry.register(Renamed(self, VLLM_NAMES, self._vllm_labels))

    def observe(self, times: ComputeTimes) -> None:
        """Takes note of what an answer cost; one that needed no forward is no job."""
        if times.forward_count:
            self._queue_s.add(times.queue_us / 1e6)
            self._compute_s.add(times.compute_us / 1e6)

    def observe_rollback(self, seconds: float) -> None:
        """Takes note of how long the device thread was busy with a rollback; on that thread."""
        self._rollback_s.add(seconds)

    def collect(self) -> Iterator[Metric]:
        """All families, as they are now."""
        yield InfoMetricFamily(PREFIX + "model", "What is served, and on what.", self._model())
        yield from self._cache_and_sessions(self._counts())
        yield from self._device_families()
        yield self._histogram("job_queue_seconds", "From a request's arrival to its first forward.", self._queue_s)
        yield self._histogram("job_compute_seconds", "Forwards and draws of one answer.", self._compute_s)
        yield self._histogram("rollback_compute_seconds", "What a call of Rollback did.", self._rollback_s)

    def _cache_and_sessions(self, counts: ServiceCounts) -> Iterator[Metric]:
        num_blocks = self._facts.block_count
        used = (num_blocks - counts.free_block_count) / max(1, num_blocks)
        yield self._gauge("kv_cache_usage_perc", "Share of the cache's blocks that sessions hold, 0 to 1.", used)
        yield self._gauge("kv_blocks", "Blocks of the cache.", num_blocks)
        yield self._gauge("kv_blocks_free", "Blocks that no session holds.", counts.free_block_count)
        yield self._gauge("kv_blocks_cached", "Of these, blocks that still hold a prefix.", counts.cached_block_count)
        yield self._gauge("sessions", "Sessions that are held.", counts.session_count)
        yield self._gauge("leased_sessions", "Of these, sessions whose stream is gone.", counts.leased_session_count)
        yield self._counter("num_preemptions", "Sessions that lost their cache to another.", counts.preemption_count)
        yield self._counter(
            "evicted_sessions", "Leased sessions that were ended for room.", counts.evicted_session_count
        )
        yield self._counter("expired_leases", "Leased sessions that nobody came back for.", counts.expired_lease_count)
        yield self._counter("stopped_jobs", "Jobs that were given up before their answer.", counts.stopped_job_count)
        yield self._counter("prefix_cache_queries", "Tokens looked up in the cache.", counts.prefix_query_tokens)
        yield self._counter("prefix_cache_hits", "Of these, tokens that were there.", counts.prefix_hit_tokens)

    def _device_families(self) -> Iterator[Metric]:
        batches = tally_of(dict(self._forwards.batch_sizes), BATCH_SIZES)
        yield self._counter("forwards", "Forwards of the model.", batches.count)
        yield self._counter("forward_rows", "Rows that these computed, one a token.", self._forwards.num_rows)
        yield self._histogram("forward_sessions", "Sessions in a forward.", batches)
        yield self._gauge("waiting_jobs", "Jobs that wait for the device.", self._device.num_waiting)
        stalled_s = self._device.stalled_us / 1e6
        yield self._gauge("device_stalled_seconds", "For how long the device has had work, none done.", stalled_s)

    def _model(self) -> dict[str, str]:
        facts = self._facts
        return {
            "service": facts.role,
            "model_name": facts.model_name,
            "model_hash": facts.model_hash,
            "numerics_id": facts.numerics_id,
            "device": facts.device,
            "dtype": facts.weight_dtype,
        }

    def _vllm_labels(self) -> Mapping[str, str]:
        return {"engine": "0", "model_name": self._facts.model_name}

    def _gauge(self, name: str, meaning: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, meaning, labels=["service"])
        family.add_metric([self._facts.role], value)
        return family

    def _counter(self, name: str, meaning: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, meaning, labels=["service"])
        family.add_metric([self._facts.role], value)
        return family

    def _histogram(self, name: str, meaning: str, tally: Tally) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, meaning, labels=["service"])
        family.add_metric([self._facts.role], tally.buckets, tally.total)
        return family
