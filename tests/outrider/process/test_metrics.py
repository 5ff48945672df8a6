"""What a scraper reads from a process, and histograms that a scrape reads."""

import asyncio
import socket
import threading
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from support.basics import PATIENCE_S, eventually

from outrider.errors import OutriderError
from outrider.process.metrics import (
    MAX_CONNECTIONS,
    LoopTasks,
    MetricsConnection,
    MetricsServer,
    ProcessFigures,
    RunningMetrics,
    Tally,
    new_registry,
    serve_metrics,
    tally_of,
)
from outrider.process.upkeep import Upkeep
from outrider.rpc.channels import AddressTaken

OPEN_METRICS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"


@asynccontextmanager
async def served(listen: str = "127.0.0.1:0") -> AsyncIterator[RunningMetrics]:
    """A counter and a gauge on a free port."""
    registry = new_registry()
    Counter("asked", "Questions.", registry=registry).inc()
    Gauge("waiting", "Who waits.", registry=registry).set(3)
    running = serve_metrics(listen, registry)
    try:
        yield running
    finally:
        await running.stop()


def lines(running: RunningMetrics, query: str = "", accept: str = "") -> list[str]:
    """Samples of a scrape, line by line."""
    request = urllib.request.Request(f"http://{running.address}/metrics{query}", headers={"accept": accept})
    with urllib.request.urlopen(request) as answer:
        wanted = "application/openmetrics-text" if accept == OPEN_METRICS else "text/plain"
        assert answer.headers["content-type"].startswith(f"{wanted}; version=")
        return [line for line in answer.read().decode().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("accept", ["", "text/plain", OPEN_METRICS])
async def test_all_formats_have_the_same_samples(accept: str) -> None:
    """And nothing says when it was made."""
    async with served() as running:
        assert lines(running, accept=accept) == ["asked_total 1.0", "waiting 3.0"]


async def test_some_series_can_be_asked_for_by_name() -> None:
    """As Prometheus's clients do, also of collectors that do not state their names."""
    async with served() as running:
        assert lines(running, "?name[]=waiting") == ["waiting 3.0"]
        assert lines(running, "?name[]=nothing") == []


@pytest.mark.slow
async def test_a_server_that_fails_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scrapers that come later are answered; it is counted, in what they read."""
    faults = iter([RuntimeError("no thread")])

    def fail_once(self: MetricsServer) -> None:
        if fault := next(faults, None):
            raise fault

    monkeypatch.setattr(MetricsServer, "service_actions", fail_once)
    registry, upkeep = new_registry(), Upkeep()
    registry.register(upkeep)
    running = serve_metrics("127.0.0.1:0", registry, upkeep)
    try:
        await eventually(lambda: upkeep.failing == ("metrics",))
        await eventually(lambda: upkeep.failing == ())
        assert await asyncio.to_thread(lines, running) == ['outrider_work_failures_total{work="metrics"} 1.0']
    finally:
        await running.stop()


async def test_connections_that_ask_nothing_lock_nobody_out() -> None:
    """Many more than there may be: each has a thread until another one needs its place, and scrapers are answered."""
    async with served() as running:
        idle = [await asyncio.open_connection(*running.address.split(":")) for _ in range(5 * MAX_CONNECTIONS)]
        assert await asyncio.to_thread(lines, running) == ["asked_total 1.0", "waiting 3.0"]
        # The scrape has taken one's place as well.
        for reader, _ in idle[: 4 * MAX_CONNECTIONS + 1]:
            assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        await eventually(lambda: sum("request_thread" in each.name for each in threading.enumerate()) < MAX_CONNECTIONS)
        for _, writer in idle:
            writer.close()


async def test_a_connection_that_asks_nothing_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one that stops in the middle of its question, and no line is written about it."""
    monkeypatch.setattr(MetricsConnection, "timeout", 0.05)
    async with served() as running:
        for said in (b"", b"GET /metrics HTTP/1.1\r\nhost: x"):
            reader, writer = await asyncio.open_connection(*running.address.split(":"))
            writer.write(said)
            assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
            writer.close()


async def test_a_taken_address_is_one_sentence() -> None:
    """It names the address."""
    async with served() as running:
        with pytest.raises(OutriderError, match=f"Cannot listen on {running.address}"):
            serve_metrics(running.address, new_registry())


@pytest.mark.parametrize("listen", ["localhost:0", "[::]:0"])
async def test_an_address_of_two_families_is_served_in_both(listen: str) -> None:
    """As those of all other listening options, where the machine has both."""
    async with served(listen) as running:
        port = running.address.rpartition(":")[2]
        for host in ("127.0.0.1", *["[::1]"] * socket.has_dualstack_ipv6()):
            with await asyncio.to_thread(urllib.request.urlopen, f"http://{host}:{port}/metrics") as answer:
                assert "asked_total 1.0" in answer.read().decode()


def test_a_tally_counts_as_prometheus_does() -> None:
    """The same values in the same buckets, bounds included, as in the library's own histogram."""
    registry = new_registry()
    theirs, ours = Histogram("a", "A.", buckets=(1, 2, 5), registry=registry), Tally((1, 2, 5))
    for value in (0.5, 1, 1.5, 2, 4, 6, 0):
        theirs.observe(value)
        ours.add(value)
    samples = next(iter(registry.collect())).samples
    assert ours.buckets == [(sample.labels["le"], sample.value) for sample in samples if sample.name == "a_bucket"]
    assert (ours.count, ours.total) == (7, 15)


def test_tallies_add_up() -> None:
    """Numbers that were counted one by one, and the sum of two tallies."""
    one, other = tally_of({1: 3, 4: 2}, (1, 2)), tally_of({2: 1}, (1, 2))
    one.add_tally(other)
    assert one.buckets == [("1.0", 3), ("2.0", 4), ("+Inf", 6)]
    assert one.total == 13


async def test_tasks_are_counted_from_any_thread() -> None:
    """Those of the loop, until they end."""
    figure, over = LoopTasks(), asyncio.Event()

    async def count() -> float:
        [family] = await asyncio.to_thread(lambda: list(figure.collect()))
        return family.samples[0].value

    alone = await count()
    tasks = [asyncio.create_task(over.wait()) for _ in range(3)]
    assert await count() == alone + 3
    over.set()
    await asyncio.wait(tasks)
    assert await count() == alone


async def test_metrics_are_served_and_an_address_is_taken_once() -> None:
    """On a free port, without the time at which each counter was made; a second server on it is refused."""
    registry = new_registry()
    Counter("a_bag", "B.", registry=registry)
    running = serve_metrics("127.0.0.1:0", registry)
    try:
        with await asyncio.to_thread(urllib.request.urlopen, f"http://{running.address}/metrics") as answer:
            assert answer.read().decode().splitlines()[2:] == ["a_bag_total 0.0"]
        with pytest.raises(AddressTaken):
            serve_metrics(running.address, registry)
    finally:
        await running.stop()
        await running.stop()


def test_memory_and_time_have_the_names_of_prometheus_own_collector() -> None:
    """And about its values: memory within a tenth, time finer than its hundredths of a second."""
    registries = [CollectorRegistry(), CollectorRegistry()]
    registries[0].register(ProcessFigures())
    ProcessCollector(registry=registries[1])
    names = ("process_resident_memory_bytes", "process_cpu_seconds_total")
    (own, own_s), (theirs, theirs_s) = ([each.get_sample_value(name) or 0 for name in names] for each in registries)
    assert own == pytest.approx(theirs, rel=0.1)
    assert own_s == pytest.approx(theirs_s, abs=1)
