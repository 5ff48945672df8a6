"""Serves the counters of a process to Prometheus, on an address of its own. Knows no counter.

Always in the text format 0.0.4, whatever a scraper would rather have: in OpenMetrics the library writes a name with a
colon in another way than its own TYPE line, and nothing here needs what only OpenMetrics has.
"""

import asyncio
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from wsgiref.simple_server import WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from outrider.rpc.channels import AddressTaken


class Registry(CollectorRegistry):
    """A registry whose counters and histograms do not also say when each was made: that doubles the series for none."""

    def collect(self) -> Iterator[Metric]:
        """All families."""
        for family in super().collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family

    # The library's own knows only the names that collectors tell before they are asked for figures.
    def restricted_registry(self, names: Iterable[str]) -> "Chosen":  # type: ignore[override]
        """What a scraper gets that names some series (`name[]`)."""
        return Chosen(self, frozenset(names))


@dataclass(frozen=True, slots=True)
class Chosen:
    """Series of a registry by name."""

    registry: Registry
    names: frozenset[str]

    def collect(self) -> Iterator[Metric]:
        """The families of these series, with nothing else in them."""
        for family in self.registry.collect():
            family.samples = [sample for sample in family.samples if sample.name in self.names]
            if family.samples:
                yield family


def exposition(registry: CollectorRegistry | Chosen) -> tuple[bytes, str]:
    """What a scraper reads, and its content type."""
    encoder, content_type = choose_encoder("")
    return encoder(registry), content_type


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
    server.set_app(_in_text(make_wsgi_app(registry)))
    return RunningMetrics(f"{host}:{server.server_port}", server, thread)


def _in_text(app: WSGIApplication) -> WSGIApplication:
    def plain(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        return app({name: value for name, value in environ.items() if name != "HTTP_ACCEPT"}, start_response)

    return plain
