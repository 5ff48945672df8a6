"""What a scraper reads from a process, whatever it asks for."""

import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import Counter, Gauge

from outrider.errors import OutriderError
from outrider.process.metrics import Registry, RunningMetrics, serve_metrics

OPEN_METRICS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"


@asynccontextmanager
async def served() -> AsyncIterator[RunningMetrics]:
    """A counter and a gauge on a free port."""
    registry = Registry()
    Counter("vllm:asked", "Questions.", registry=registry).inc()
    Gauge("waiting", "Who waits.", registry=registry).set(3)
    running = serve_metrics("127.0.0.1:0", registry)
    try:
        yield running
    finally:
        await running.stop()


def lines(running: RunningMetrics, query: str = "", accept: str = "") -> list[str]:
    """The samples."""
    request = urllib.request.Request(f"http://{running.address}/metrics{query}", headers={"accept": accept})
    with urllib.request.urlopen(request) as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        return [line for line in answer.read().decode().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("accept", ["", "text/plain", OPEN_METRICS])
async def test_names_with_a_colon_stay_as_they_are(accept: str) -> None:
    """Also for scrapers that would rather have OpenMetrics, and nothing says when it was made."""
    async with served() as running:
        assert lines(running, accept=accept) == ["vllm:asked_total 1.0", "waiting 3.0"]


async def test_some_series_can_be_asked_for_by_name() -> None:
    """As Prometheus's clients do, also of collectors that do not tell their names."""
    async with served() as running:
        assert lines(running, "?name[]=waiting") == ["waiting 3.0"]
        assert lines(running, "?name[]=nothing") == []


async def test_a_taken_address_is_one_sentence() -> None:
    """It names the address."""
    async with served() as running:
        with pytest.raises(OutriderError, match=f"Cannot listen on {running.address}"):
            serve_metrics(running.address, Registry())
