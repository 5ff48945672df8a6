"""What `promtool check metrics` says about an exposition, and what Prometheus itself would refuse. Asks no process.

The rules are those of promlint in client_golang: help, suffixes, units, reserved names and labels; and for histograms
that they are whole and cumulative.
"""

import re
from collections import Counter
from collections.abc import Iterator

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
