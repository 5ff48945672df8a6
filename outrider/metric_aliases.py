"""The same figures under the names of another program, for what is written to read those. Counts nothing twice."""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample


class Families(Protocol):
    """A registry, or a part of one."""

    def collect(self) -> Iterator[Metric]:
        """All families, as they are now."""


class Renamed:
    """Families of a registry under further names, with labels of their own; see prometheus_client.registry."""

    def __init__(self, families: Families, names: Mapping[str, str], labels: Callable[[], Mapping[str, str]]) -> None:
        """`names` has ours by the further one, both without a counter's `_total`; `labels` is asked at every scrape."""
        self._families = families
        self._names = names
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """The families that have a further name, each made from what the original says now."""
        ours = {family.name: family for family in self._families.collect()}
        for alias, name in self._names.items():
            if name in ours:
                yield self._renamed(ours[name], alias)

    def _renamed(self, family: Metric, alias: str) -> Metric:
        renamed = Metric(alias, family.documentation, family.type)
        for sample in family.samples:
            labels = {**self._labels(), **sample.labels}
            name = alias + sample.name.removeprefix(family.name)
            renamed.samples.append(Sample(name, labels, sample.value, sample.timestamp, sample.exemplar))
        return renamed
