"""The compose files as compose reads them, which needs no engine: skipped, loudly, where there is no compose."""

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.process.options import ServicePlace

FOLDER = Path(__file__).parents[2] / "deploy"
SERVICES = ("gateway", "target", "draft")


def asked(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """How `docker compose` ends, with no other variable of ours than these."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
    try:
        return subprocess.run(
            ["docker", "compose", *words], capture_output=True, text=True, check=False, env={**environment, **variables}
        )
    except FileNotFoundError:
        return subprocess.CompletedProcess(words, returncode=127)


@cache
def is_there() -> bool:
    """Whether this machine has compose."""
    return asked("version").returncode == 0


def config(*names: str, **variables: str) -> dict[str, Any]:
    """What these files are together, with what is for monitoring."""
    if not is_there():
        pytest.skip("NO DOCKER COMPOSE: its files are not read on this machine")
    files = [word for name in names for word in ("-f", str(FOLDER / name))]
    done = asked(*files, "--profile", "monitoring", "config", "--format", "json", **variables)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_each_service_has_a_gpu() -> None:
    """Target and draft one each, by its number, and use it; everything else is as without."""
    made = config("compose.yaml", "compose.gpu.yaml", OUTRIDER_TARGET_GPU="3")
    for name, number in (("target", "3"), ("draft", "1")):
        service = made["services"][name]
        assert service["environment"].pop("OUTRIDER_DEVICE") == "cuda"
        # PyPI's torch, which is for GPUs; the draft has the target's image.
        if name == "target":
            assert service["build"]["args"].pop("TORCH_BUILD") == ""
        (device,) = service.pop("deploy")["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"], device["device_ids"]) == ("nvidia", ["gpu"], [number])
    plain = config("compose.yaml")["services"]
    assert plain["target"]["build"]["args"].pop("TORCH_BUILD") == "cpu"
    assert made["services"] == plain


@pytest.mark.parametrize(
    ("variables", "target", "draft"),
    [
        ({}, "", ""),
        ({"OUTRIDER_PAIR": "tales"}, "", ""),
        ({"OUTRIDER_MODELS": "/srv"}, "/models/target", "/models/draft"),
        ({"OUTRIDER_MODELS": "/srv", "OUTRIDER_TARGET_MODEL": "/models/mine"}, "/models/mine", "/models/draft"),
        ({"OUTRIDER_TARGET_MODEL": "sized:200m"}, "sized:200m", ""),
    ],
)
def test_models_are_the_pair_or_those_that_are_named(variables: dict[str, str], target: str, draft: str) -> None:
    """All four containers are told the same target; without one they look for the pair, which only one can fetch."""
    services = config("compose.yaml", **variables)["services"]
    words = {name: services[name]["command"][3:] for name in ("models", *SERVICES)}
    assert words["models"] == [target]
    assert words["target"] == ["target_service", target]
    assert words["draft"] == ["draft_service", target, draft]
    assert words["gateway"] == ["gateway", target]
    for name in words:
        assert services[name]["environment"]["OUTRIDER_PAIR"] == variables.get("OUTRIDER_PAIR", "smollm2")
        mounts = {each["target"]: each for each in services[name]["volumes"]}
        assert mounts[services[name]["environment"]["XDG_CACHE_HOME"]].get("read_only", False) == (name != "models")
        if name != "models":
            assert mounts[services[name]["environment"]["HF_HOME"]]["source"] == f"{name}-cache"


def test_keys_are_a_secret_of_the_gateway(tmp_path: Path) -> None:
    """With their file no client is let in without one, and it is the gateway's alone; without its name nothing runs."""
    path = str(tmp_path / "keys.toml")
    made = config("compose.yaml", "compose.keys.yaml", OUTRIDER_KEYS=path)
    assert made["secrets"]["keys"]["file"] == path
    assert [name for name, service in made["services"].items() if service.get("secrets")] == ["gateway"]
    changed = {"OUTRIDER_API_KEYS": "/run/secrets/keys", "OUTRIDER_NO_AUTH": "false"}
    open_to_all = config("compose.yaml")["services"]["gateway"]["environment"]
    assert made["services"]["gateway"]["environment"] == {**open_to_all, **changed}
    assert open_to_all["OUTRIDER_NO_AUTH"] == "true"
    files = [word for name in ("compose.yaml", "compose.keys.yaml") for word in ("-f", str(FOLDER / name))]
    refused = asked(*files, "config")
    assert refused.returncode != 0
    assert "OUTRIDER_KEYS is not set; it must name a file of API keys" in refused.stderr


def test_what_is_published_is_for_this_host_alone() -> None:
    """The gateway's two doors and the dashboard, on loopback; of this host they see models and settings alone."""
    services = config("compose.yaml")["services"]
    published = {name: {port["target"] for port in service.get("ports", [])} for name, service in services.items()}
    assert {name: ports for name, ports in published.items() if ports} == {"gateway": {8080, 50050}, "grafana": {3000}}
    assert {port["host_ip"] for service in services.values() for port in service.get("ports", [])} == {"127.0.0.1"}
    mounts = [each for service in services.values() for each in service["volumes"] if each["type"] == "bind"]
    assert all(each["read_only"] for each in mounts)
    models, monitoring = FOLDER.parent / "models", FOLDER / "monitoring"
    assert all(Path(each["source"]) == models or Path(each["source"]).is_relative_to(monitoring) for each in mounts)


def test_every_service_is_confined() -> None:
    """No capabilities, no way to new privileges, and a bound to its processes; the dashboard has no admin."""
    services = config("compose.yaml")["services"]
    for service in services.values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["pids_limit"] == 4096
    grafana = services["grafana"]["environment"]
    assert grafana["GF_AUTH_BASIC_ENABLED"] == "false"
    assert grafana["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"


def test_a_start_may_take_as_long_as_loading() -> None:
    """Ten minutes, for which the gateway waits, and what a lost target was serving too."""
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))["services"]
    periods_s = {name: int(services[name]["healthcheck"]["start_period"].removesuffix("s")) for name in SERVICES}
    assert min(periods_s.values()) >= 600
    gateway = services["gateway"]["environment"]
    assert float(gateway["OUTRIDER_TARGET_WAIT_SECONDS"]) >= periods_s["target"]
    budget = gateway["OUTRIDER_REBUILD_BUDGET_SECONDS"].partition(":-")[2].removesuffix("}")
    assert float(budget) >= periods_s["target"]


@pytest.mark.parametrize("name", ["target", "draft"])
def test_a_service_can_have_replicas(name: str) -> None:
    """It has nothing that can be there only once: no name, no port of the host; a gateway finds all by the service."""
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))["services"]
    once = {"container_name", "hostname", "ports", "networks", "network_mode", "mac_address", "scale", "deploy"}
    assert services[name].keys() & once == set()
    found = ServicePlace.of(name, services["gateway"]["environment"][f"OUTRIDER_{name.upper()}"])
    assert (found.name, str(found.port)) == (name, services[name]["environment"]["OUTRIDER_LISTEN"].rpartition(":")[2])
