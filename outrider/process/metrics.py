"""Figures for Prometheus: a registry of a process, its address of its own, and histograms that are filled elsewhere."""

import asyncio
import http.client
import os
import socket
import sys
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any, Self
from urllib.parse import urlencode
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog
from prometheus_client import CollectorRegistry, disable_created_metrics, make_wsgi_app
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from outrider.process.upkeep import Upkeep
from outrider.rpc.channels import listeners

# A process that answers at all does so in milliseconds.
SCRAPE_S = 2.0
# Far more than scrapers have.
MAX_CONNECTIONS = 16
# How often the server looks whether it has to stop.
STOP_LOOK_S = 0.05
METRICS = "metrics"
# Sizes of this process in pages, on Linux: the second is what is resident.
STATM = Path("/proc/self/statm")
# Before the server is started again, should it fail as a whole.
RESTART_S = 1.0

log = structlog.get_logger()

Buckets = list[tuple[str, float]]
"""Upper bounds as Prometheus writes them, each with the number of values up to it; the last is +Inf."""

# When each counter was made doubles the series, and is not read. The library has one switch for the process.
disable_created_metrics()  # type: ignore[no-untyped-call]


def new_registry() -> CollectorRegistry:
    """A registry of which series can be selected by name, also those of collectors that look everything up."""
    return CollectorRegistry(auto_describe=True)


@dataclass(frozen=True, slots=True)
class NamedSeries(Collector):
    """The series of a registry that have these names, in the order of their families' names."""

    registry: CollectorRegistry
    names: Sequence[str]

    def collect(self) -> Iterable[Metric]:
        """The families, with nothing else in them."""
        # The library's own answer has another order in every process.
        return sorted(self.registry.restricted_registry(self.names).collect(), key=lambda family: family.name)


def exposition(registry: CollectorRegistry, names: Sequence[str] = ()) -> tuple[bytes, str]:
    """Text that a scraper reads, of all or some series, and its content type."""
    encoder, content_type = choose_encoder("")
    return encoder(NamedSeries(registry, names) if names else registry), content_type


class MetricsConnection(WSGIRequestHandler):
    """A connection, which has so many seconds for whatever it has to say next."""

    timeout = 5.0

    def log_message(self, form: str, *args: object) -> None:
        """Drops the library's line about each scrape."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Server with a thread for each connection, MAX_CONNECTIONS at most: one too many takes the place of the oldest."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, listener: socket.socket, registry: CollectorRegistry) -> None:
        """Takes a socket that listens already."""
        self.address_family = listener.family
        self._open: dict[Any, None] = {}
        self._lock = threading.Lock()
        super().__init__(listener.getsockname()[:2], MetricsConnection, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = listener.getsockname()[:2]
        self.setup_environ()
        self.set_app(make_wsgi_app(registry))

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as the library has it
        """Gives a new connection its thread, and its place."""
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                # Its thread reads the end of it, and closes it.
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 - as the library has it
        """Ends a connection that has been answered, or has not asked in time."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as the library has it
        """Logs what ended a connection before its answer; the library would write to stderr."""
        log.debug("a connection of the metrics ended", reason=repr(sys.exception()))


@dataclass(frozen=True, slots=True)
class RunningMetrics:
    """The servers of metrics, one for each address, each with a thread of its own."""

    address: str
    servers: Mapping[MetricsServer, threading.Thread]

    async def stop(self) -> None:
        for server, thread in self.servers.items():
            await asyncio.to_thread(server.shutdown)
            server.server_close()
            await asyncio.to_thread(thread.join)


def _keep_serving(server: MetricsServer, upkeep: Upkeep) -> None:
    """Serves until the server is shut down, whatever happens to it."""
    while True:
        try:
            server.serve_forever(STOP_LOOK_S)
        except Exception as error:  # noqa: BLE001 - whatever it is, scrapers come again
            upkeep.failed(METRICS, error)
            time.sleep(RESTART_S)
            upkeep.works(METRICS)
        else:
            return


def serve_metrics(listen: str, registry: CollectorRegistry, upkeep: Upkeep | None = None) -> RunningMetrics:
    """Serves on HOST:PORT, where port 0 takes a free one, and `localhost` and `[::]` are those of both families. Raises
    AddressTaken and InvalidRequest.
    """
    servers = {}
    for listener in listeners(listen, backlog=MetricsServer.request_queue_size):
        server = MetricsServer(listener, registry)
        servers[server] = threading.Thread(
            target=_keep_serving, args=(server, upkeep or Upkeep()), name=METRICS, daemon=True
        )
        servers[server].start()
    return RunningMetrics(f"{listen.rpartition(':')[0]}:{next(iter(servers)).server_port}", servers)


def scraped(address: str, names: Sequence[str] = (), timeout_s: float = SCRAPE_S) -> tuple[bytes, str]:
    """Text of the metrics that a process serves on HOST:PORT, of all or some series, and its content type.

    Raises OSError and http.client.HTTPException.
    """
    host, _, port = address.rpartition(":")
    # Not urllib's opener, which would ask the proxy that the environment names.
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=timeout_s)
    try:
        connection.request("GET", f"/metrics?{urlencode({'name[]': list(names)}, doseq=True)}")
        answer = connection.getresponse()
        return answer.read(), answer.getheader("content-type", "")
    finally:
        connection.close()


@dataclass(slots=True)
class Tally:
    """A histogram that one thread fills and any thread reads: counts values up to each of the bounds, which rise."""

    bounds: Sequence[float]
    total: float = 0.0
    """Sum of the values."""
    _counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Counts a value that came so often."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.total += times * value

    def add_tally(self, other: Self) -> None:
        """Counts all that another tally with the same bounds has counted."""
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, other._counts, strict=True)]
        self.total += other.total

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def buckets(self) -> Buckets:
        names = [*map(floatToGoString, self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(list(self._counts))), strict=True))


@dataclass(slots=True)
class Count:
    """A counter that one thread adds to and any thread reads."""

    total: float = 0


class Figures(Collector):
    """Counters and histograms that one thread fills, without a lock, for scrapes by another thread."""

    def __init__(self, prefix: str) -> None:
        """Takes the prefix of all names."""
        self._prefix = prefix
        self._families: list[tuple[str, str, str, Tally | dict[str, Count]]] = []

    def counter(self, name: str, meaning: str) -> Count:
        """Makes a counter that is part of every scrape."""
        count = Count()
        self._families.append((name, meaning, "", {"": count}))
        return count

    def counters(self, name: str, meaning: str, label: str) -> defaultdict[str, Count]:
        """New counters by the values of a label; each is there from when it is first looked up."""
        counts: defaultdict[str, Count] = defaultdict(Count)
        self._families.append((name, meaning, label, counts))
        return counts

    def histogram(self, name: str, meaning: str, bounds: Sequence[float]) -> Tally:
        """Makes a histogram that is part of every scrape."""
        tally = Tally(bounds)
        self._families.append((name, meaning, "", tally))
        return tally

    def collect(self) -> Iterable[Metric]:
        """The families, in the order in which they were made; see prometheus_client.registry."""
        for name, meaning, label, values in self._families:
            if isinstance(values, Tally):
                yield HistogramMetricFamily(self._prefix + name, meaning, values.buckets, values.total)
                continue
            family = CounterMetricFamily(self._prefix + name, meaning, labels=[label] if label else [])
            for value, count in list(values.items()):
                family.add_metric([value] if label else [], count.total)
            yield family


def tally_of(numbers: Mapping[int, int], bounds: Sequence[float]) -> Tally:
    """A tally of whole numbers that were counted one by one: each with how often it came."""
    tally = Tally(bounds)
    for number, times in numbers.items():
        tally.add(number, times)
    return tally


class ProcessFigures(Collector):
    """CPU time and memory of this process, under the names that Prometheus's own collectors have for them.

    Theirs counts time in hundredths of a second, which is too coarse for a measurement of a few.
    """

    def collect(self) -> Iterable[Metric]:
        """CPU time, and memory where the system says how much is resident."""
        yield CounterMetricFamily("process_cpu_seconds", "CPU time of this process.", time.process_time())
        if STATM.exists():
            resident = int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            yield GaugeMetricFamily("process_resident_memory_bytes", "Resident memory of this process.", resident)


class LoopTasks(Collector):
    """The tasks of the event loop that runs when this is made: with nothing to do there are always as many."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterable[Metric]:
        """Number of tasks, as one family; from any thread."""
        yield GaugeMetricFamily("outrider_tasks", "Tasks of the event loop.", len(asyncio.all_tasks(self._loop)))
