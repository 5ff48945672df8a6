"""The figures of a service with a model, for Prometheus. Read when somebody asks: nothing is counted for them alone.

What a forward costs for this is three additions; sessions, cache and device are looked at by the scrape. Only the times
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

from outrider.engine.device_thread import DeviceWorker
from outrider.engine.runner import ForwardCounts
from outrider.estimates.timing import ComputeTimes
from outrider.model_service.servicer import ServiceFacts
from outrider.model_service.sessions import ServiceCounts
from outrider.process.metrics import ProcessFigures, Tally, new_registry, tally_of

PREFIX = "outrider_"
JOB_S = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
# A rollback computes nothing: it cuts a list of blocks.
ROLLBACK_S = (0.00001, 0.000025, *JOB_S)
BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class ServiceMetrics:
    """A collector for one service, in a registry of its own; see prometheus_client.registry."""

    def __init__(
        self,
        facts: ServiceFacts,
        counts: Callable[[], ServiceCounts],
        unread: Callable[[], Mapping[Any, int]],
        forwards: ForwardCounts,
        device: DeviceWorker[Any],
    ) -> None:
        self._facts = facts
        self._counts, self._unread = counts, unread
        self._forwards = forwards
        self._device = device
        self._queue_s, self._compute_s, self._rollback_s = Tally(JOB_S), Tally(JOB_S), Tally(ROLLBACK_S)
        self.registry = new_registry()
        self.registry.register(self)
        self.registry.register(ProcessFigures())

    def observe(self, times: ComputeTimes) -> None:
        """Takes note of what an answer cost; one that needed no forward is no job."""
        if times.forward_count:
            self._queue_s.add(times.queue_us / 1e6)
            self._compute_s.add(times.compute_us / 1e6)

    def observe_rollback(self, seconds: float) -> None:
        """Takes note of how long the device thread was busy with a rollback; on that thread."""
        self._rollback_s.add(seconds)

    @property
    def _reading_row_s(self) -> float:
        """Seconds of a token where many are read at once: as it was lately, or else the least that a row has cost."""
        measured = (us / rows / 1e6 for rows, us in self._facts.row_costs.items())
        return self._forwards.reading_row_s or min(measured, default=0.0)

    def collect(self) -> Iterator[Metric]:
        facts, counts, num_blocks = self._facts, self._counts(), self._facts.block_count
        used = (num_blocks - counts.free_block_count) / max(1, num_blocks)
        backlog_s = sum(self._unread().values()) * self._reading_row_s
        stalled_s = self._device.stalled_us / 1e6
        batches = tally_of(dict(self._forwards.batch_sizes), BATCH_SIZES)
        model = {name: getattr(facts, name) for name in ("model_name", "model_hash", "numerics_id", "device")}
        model |= {"service": facts.role, "dtype": facts.weight_dtype}
        yield InfoMetricFamily(PREFIX + "model", "What is served, and on what.", model)
        gauges = (
            ("kv_cache_usage_perc", "Share of the cache's blocks that sessions hold, 0 to 1.", used),
            ("kv_blocks", "Blocks of the cache.", num_blocks),
            ("kv_blocks_free", "Blocks that no session holds.", counts.free_block_count),
            ("kv_blocks_cached", "Of these, blocks that still hold a prefix.", counts.cached_block_count),
            ("sessions", "Sessions that are held.", counts.session_count),
            ("leased_sessions", "Of these, sessions whose stream is gone.", counts.leased_session_count),
            ("waiting_jobs", "Jobs that wait for the device.", self._device.num_waiting),
            ("backlog_seconds", "How long reading takes of prompts, and texts that were lost.", backlog_s),
            ("device_stalled_seconds", "For how long the device has had work, none done.", stalled_s),
        )
        counters = (
            ("num_preemptions", "Sessions that lost their cache to another.", counts.preemption_count),
            ("evicted_sessions", "Leased sessions that were ended for room.", counts.evicted_session_count),
            ("expired_leases", "Leased sessions that nobody came back for.", counts.expired_lease_count),
            ("stopped_jobs", "Jobs that were given up before their answer.", counts.stopped_job_count),
            ("prefix_cache_queries", "Tokens looked up in the cache.", counts.prefix_query_tokens),
            ("prefix_cache_hits", "Of these, tokens that were there.", counts.prefix_hit_tokens),
            ("forwards", "Forwards of the model.", batches.count),
            ("forward_rows", "Rows that these computed, one a token.", self._forwards.num_rows),
            ("device_busy_seconds", "Forwards, and the draws behind them.", self._forwards.busy_s),
        )
        histograms = (
            ("forward_sessions", "Sessions in a forward.", batches),
            ("job_queue_seconds", "From a request's arrival to its first forward.", self._queue_s),
            ("job_compute_seconds", "Forwards and draws of one answer.", self._compute_s),
            ("rollback_compute_seconds", "What a call of Rollback did.", self._rollback_s),
        )
        for kind, families in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, meaning, value in families:
                family = kind(PREFIX + name, meaning, labels=["service"])
                family.add_metric([facts.role], value)
                yield family
        for name, meaning, column in (
            ("drafter_kv_blocks", "Blocks of the cache of a drafter in this process.", "num_blocks"),
            ("drafter_kv_blocks_free", "Of these, blocks that no session holds.", "num_free"),
        ):
            family = GaugeMetricFamily(PREFIX + name, meaning, labels=["service", "drafter"])
            for drafter, runner in facts.hosted.items():
                family.add_metric([facts.role, drafter], getattr(runner.pool, column))
            yield family
        for name, meaning, tally in histograms:
            histogram = HistogramMetricFamily(PREFIX + name, meaning, labels=["service"])
            histogram.add_metric([facts.role], tally.buckets, tally.total)
            yield histogram
