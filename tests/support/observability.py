"""What metrics must not contain, what a process holds, and a collector that keeps the traces which processes send."""

import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

NAME = re.compile(r"[a-z_][a-z0-9_]*")
ABBREVIATIONS = frozenset({"s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d"})
PREFIXES = ("nano", "micro", "milli", "centi", "deci", "deca", "hecto", "kilo", "kibi", "mega", "mibi", "giga", "tera")
BASE_UNITS = ("seconds", "bytes", "meters", "grams", "volts", "amperes", "joules", "kelvin", "celsius")
OTHER_UNITS = frozenset({"minutes", "hours", "days", "weeks", "bits", "percent"})
NON_BASE_UNITS = OTHER_UNITS | {prefix + unit for prefix in PREFIXES for unit in BASE_UNITS}
TYPES = frozenset({"gauge", "counter", "summary", "histogram"})
RESERVED = {"_bucket": {"histogram"}, "_sum": {"histogram", "summary"}, "_count": {"histogram", "summary"}}


def documented() -> list[str]:
    """The families that docs/observability.md has a row for, in its order."""
    page = Path(__file__).resolve().parents[2] / "docs" / "observability.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith(("| `outrider_", "| `process_"))]
    return [row.split("`")[1] for row in rows]


def num_descriptors(pid: int) -> int:
    """How many descriptors a running process has."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def peak_bytes(pid: int) -> int:
    """The most memory that a running process has had in use."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def thread_names(pid: int) -> list[str]:
    """The names of a running process's threads, as the system knows them."""
    names = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        # It may have ended meanwhile.
        with suppress(FileNotFoundError, ProcessLookupError):
            names.append((thread / "comm").read_text().strip())
    return names


def families(text: str) -> dict[str, Metric]:
    """The families of an exposition by the names that its TYPE lines have; raises ValueError about what is no text."""
    # The parser takes the ending off a counter's name, whether it is there or not.
    typed = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    return {
        family.name + "_total" * (f"{family.name}_total" in typed): family
        for family in text_string_to_metric_families(text)
    }


def findings(text: str) -> list[str]:
    """Everything that is wrong with an exposition."""
    try:
        found = families(text)
    except ValueError as error:
        return [f"does not parse: {error}"]
    return [*_heads(text), *(said for name, family in found.items() for said in _family(name, family))]


def _heads(text: str) -> Iterator[str]:
    """HELP and TYPE come once a family, and no series comes twice."""
    lines = text.splitlines()
    for word in ("HELP", "TYPE"):
        heads = Counter(line.split()[2] for line in lines if line.startswith(f"# {word} "))
        yield from (f"{name} has {count} lines of {word}" for name, count in heads.items() if count > 1)
    series = Counter(line.rpartition(" ")[0] for line in lines if line and not line.startswith("#"))
    yield from (f"{name} comes {count} times" for name, count in series.items() if count > 1)


def _family(name: str, family: Metric) -> Iterator[str]:
    if not family.documentation:
        yield f"{name} has no help"
    if family.type not in TYPES:
        yield f"{name} is of no type that Prometheus has: {family.type}"
    if not NAME.fullmatch(name):
        yield f"{name} is not in snake case, or has a colon"
    if (family.type == "counter") != name.endswith("_total"):
        yield f"{name} ends in _total unless it is a {family.type}"
    for suffix, types in RESERVED.items():
        if name.endswith(suffix) and family.type not in types:
            yield f"{name} ends in {suffix}, which is for {' and '.join(sorted(types))}"
    words = set(name.split("_"))
    yield from (f"{name} abbreviates a unit: {word}" for word in sorted(words & ABBREVIATIONS))
    yield from (f"{name} has no base unit: {word}" for word in sorted(words & NON_BASE_UNITS))
    yield from (f"{name} has its type in its name: {word}" for word in sorted(words & TYPES))
    for sample in family.samples:
        yield from _sample(sample, family)
    if family.type == "histogram":
        yield from _histogram(name, family)


def _sample(sample: Sample, family: Metric) -> Iterator[str]:
    for label in sample.labels:
        if not NAME.fullmatch(label):
            yield f"{sample.name} has an illegal label: {label}"
        is_bucket = family.type == "histogram" and sample.name.endswith("_bucket")
        if (label == "le" and not is_bucket) or (label == "quantile" and family.type != "summary"):
            yield f"{sample.name} has the reserved label {label}"
    if family.type in {"counter", "histogram"} and sample.value < 0:
        yield f"{sample.name} is negative"


def _histogram(name: str, family: Metric) -> Iterator[str]:
    """Every series has a sum, a count, and buckets that rise to the count at +Inf."""
    series: dict[tuple[tuple[str, str], ...], dict[str, list[tuple[float, float]]]] = {}
    for sample in family.samples:
        labels = tuple(sorted((key, value) for key, value in sample.labels.items() if key != "le"))
        part = sample.name.removeprefix(name)
        place = series.setdefault(labels, {}).setdefault(part, [])
        place.append((float(sample.labels.get("le", "nan")), sample.value))
    for labels, parts in series.items():
        buckets = parts.get("_bucket", [])
        if not {"_sum", "_count"} <= set(parts) or not buckets or buckets[-1][0] != float("inf"):
            yield f"{name}{dict(labels)} lacks its sum, its count or its last bucket"
        elif sorted(buckets) != buckets or sorted(count for _, count in buckets) != [count for _, count in buckets]:
            yield f"{name}{dict(labels)} is not cumulative"
        elif buckets[-1][1] != parts["_count"][0][1]:
            yield f"{name}{dict(labels)} has another count than its last bucket"


@dataclass
class TraceCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Spans by the service that sent them, in the order in which they came."""

    address: str = ""
    spans: list[tuple[str, Span]] = field(default_factory=list)
    received: bytes = b""
    """Everything that was sent, for a look for what must not be in it."""

    async def Export(  # noqa: N802, the protocol's name
        self, request: pb.ExportTraceServiceRequest, context: object
    ) -> pb.ExportTraceServiceResponse:
        """Takes exported spans."""
        self.received += request.SerializeToString()
        for resource in request.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(names["service.name"], span) for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def named(self, service: str, name: str) -> list[Span]:
        """A service's spans of a name."""
        return [span for sender, span in self.spans if (sender, span.name) == (service, name)]


@asynccontextmanager
async def collecting() -> AsyncIterator[TraceCollector]:
    """A collector on a free port."""
    server, collector = grpc.aio.server(), TraceCollector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(0)
