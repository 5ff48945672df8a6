"""Histograms that a scrape reads, counters under a second name, and the registry that leaves out what nobody reads."""

import asyncio
import urllib.request

import pytest
from prometheus_client import Counter, Histogram, generate_latest
from support.observability import families, findings

from outrider.metric_aliases import Renamed
from outrider.metrics_server import Registry, serve_metrics
from outrider.rpc.channels import AddressTaken
from outrider.tallies import Tally, tally_of


def test_a_tally_counts_as_prometheus_does() -> None:
    """The same values in the same buckets, bounds included, as in the library's own histogram."""
    registry = Registry()
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


def test_an_alias_follows_what_it_renames() -> None:
    """Nothing is counted twice: both names say the same at every scrape, the second with further labels."""
    registry, own = Registry(), Registry()
    registry.register(own)
    registry.register(Renamed(own, {"vllm:bag": "a_bag", "vllm:none": "a_none"}, lambda: {"engine": "0"}))
    counter = Counter("a_bag", "B.", ["reason"], registry=own)
    counter.labels("x").inc(2)
    text = generate_latest(registry).decode()
    assert 'a_bag_total{reason="x"} 2.0' in text
    assert 'vllm:bag_total{engine="0",reason="x"} 2.0' in text
    assert findings(text, aliases=True) == []
    assert set(families(text)) == {"a_bag_total", "vllm:bag_total"}


async def test_metrics_are_served_and_an_address_is_taken_once() -> None:
    """On a free port, without the time at which each counter was made; a second server on it is refused."""
    registry = Registry()
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
