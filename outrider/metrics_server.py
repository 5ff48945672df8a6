"""Serves the counters of a process to Prometheus, on an address of its own. Knows no counter."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import Metric

from outrider.rpc import AddressTaken


class Registry(CollectorRegistry):
    """A registry whose counters and histograms do not also say when each was made: that doubles the series for none."""

    def collect(self) -> Iterator[Metric]:
        """All families."""
        for family in super().collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


@dataclass(frozen=True, slots=True)
class RunningMetrics:
    """A server of metrics, with a thread of its own."""

    address: str
    server: WSGIServer
    thread: threading.Thread

    async def stop(self) -> None:
        """Ends the server and its thread."""
        await asyncio.to_thread(self.server.shutdown)
        self.server.server_close()
        await asyncio.to_thread(self.thread.join)


def serve_metrics(listen: str, registry: CollectorRegistry) -> RunningMetrics:
    """Serves on HOST:PORT, where port 0 takes a free one. Raises AddressTaken."""
    host, _, port = listen.rpartition(":")
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError:
        raise AddressTaken(f"Cannot listen on {listen}: it is taken, or not an address of this machine.") from None
    return RunningMetrics(f"{host}:{server.server_port}", server, thread)
