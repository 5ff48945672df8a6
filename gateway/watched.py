"""What a scrape looks up instead of being told: places, services, K, rollbacks. Changes nothing, from any thread."""

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from gateway.admission import Admission
from gateway.backend import Backend
from gateway.links import ServiceLink
from gateway.rollbacks import Rollbacks, together

SERVICES = ("target", "draft")


class Watched:
    """A collector; see prometheus_client.registry."""

    def __init__(self, admission: Admission, backend: Backend, rejected_tokens: Callable[[], int]) -> None:
        """`rejected_tokens` tells how many draft tokens were not kept, which both caches have to forget."""
        self._admission = admission
        self._backend = backend
        self._rejected_tokens = rejected_tokens

    def collect(self) -> Iterator[Metric]:
        """The families."""
        admission, policy = self._admission, self._backend.policy
        yield GaugeMetricFamily("outrider_num_requests_running", "Samples that run.", admission.running)
        yield GaugeMetricFamily("outrider_num_requests_waiting", "Requests that wait for a place.", admission.waiting)
        yield GaugeMetricFamily(
            "outrider_current_draft_tokens", "K: draft tokens a round that the policy would ask for.", policy.best_count
        )
        yield self._services_up()
        yield self._rolled_back()
        yield self._rollback_times()

    def _services_up(self) -> Metric:
        family = GaugeMetricFamily(
            "outrider_service_up", "Whether a service is there and fits.", labels=["service", "address"]
        )
        for service in SERVICES:
            for link in self._links(service):
                family.add_metric([service, link.address], link.info is not None)
        return family

    def _rolled_back(self) -> Metric:
        family = CounterMetricFamily(
            "outrider_rolled_back_tokens",
            "Tokens that a cache had to forget, guesses for the most part.",
            labels=["side"],
        )
        for service in SERVICES:
            family.add_metric([service], self._rejected_tokens() + self._rollbacks(service).num_tokens)
        return family

    def _rollback_times(self) -> Metric:
        family = HistogramMetricFamily(
            "outrider_rollback_rpc_seconds", "Calls of Rollback, from the gateway's side.", labels=["peer"]
        )
        for service in SERVICES:
            seconds = self._rollbacks(service).seconds
            family.add_metric([service], seconds.buckets, seconds.total)
        return family

    def _rollbacks(self, service: str) -> Rollbacks:
        """Those on all replicas."""
        return together([link.rollbacks for link in self._links(service)])

    def _links(self, service: str) -> tuple[ServiceLink, ...]:
        replicas = self._backend.target if service == "target" else self._backend.draft
        return replicas.links if replicas is not None else ()
