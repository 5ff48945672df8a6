"""What Prometheus and Grafana beside the stack look at: every process, and every metric that is documented."""

import json
import re
from collections import Counter
from pathlib import Path

import yaml
from support.observability import documented

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
MONITORING = DEPLOY / "monitoring"
DASHBOARD = MONITORING / "dashboards" / "outrider.json"
METRIC = re.compile(r"\b(outrider_\w+)\b")
# On every dashboard of processes, and a size that does not change.
OTHER_EYES = {
    *("process_cpu_seconds_total", "process_resident_memory_bytes"),
    *("outrider_tasks", "outrider_kv_blocks", "outrider_drafter_kv_blocks", "outrider_key_store_up"),
}


def test_the_dashboard_shows_what_is_documented_and_nothing_else() -> None:
    """All but the few metrics that are for other eyes; the document itself lists what real processes export."""
    asked = set(METRIC.findall(DASHBOARD.read_text()))
    there = set(documented())
    parts = {f"{name}_{part}" for name in there for part in ("bucket", "sum", "count")}
    assert asked - there - parts == set()
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked} | asked
    # Of the parts of a request's time it shows a choice.
    assert {name for name in there - shown if not name.startswith("outrider_request_")} == OTHER_EYES


def test_panels_are_apart() -> None:
    """Each has a number and a place of its own, or Grafana shows one of two."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert [number for number, times in Counter(panel["id"] for panel in panels).items() if times > 1] == []
    places = [panel["gridPos"] for panel in panels]
    cells = Counter(
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    )
    assert [cell for cell, times in cells.items() if times > 1 or cell[0] >= 24] == []


def test_prometheus_scrapes_what_compose_serves() -> None:
    """Each process of compose.yaml serves its metrics where prometheus.yml looks for them."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    jobs = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    targets = {target for job in jobs for config in job["static_configs"] for target in config["targets"]}
    served = {name: services[name]["environment"]["OUTRIDER_METRICS_LISTEN"] for name in ("gateway", "draft", "target")}
    assert targets == {f"{name}:{listen.rpartition(':')[2]}" for name, listen in served.items()}
    for service in ("prometheus", "grafana"):
        assert services[service]["profiles"] == ["monitoring"]
        for volume in services[service]["volumes"]:
            assert (DEPLOY / volume.partition(":")[0]).exists()
