"""The manifests of deploy/kubernetes: Kubernetes' own schemas take them, and what they set is there to be set."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from draft_service.server import DraftSettings
from gateway.settings import GatewaySettings
from outrider.process.options import settings_of
from outrider.process.run import ProcessSettings
from target_service.server import TargetSettings

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
VERSION = "1.34"
SETTINGS: dict[str, type[ProcessSettings]] = {
    "gateway": GatewaySettings,
    "target": TargetSettings,
    "draft": DraftSettings,
}


def resources(text: str) -> list[dict[str, Any]]:
    """The resources that a text describes."""
    return list(yaml.safe_load_all(text))


def check_resources(found: list[dict[str, Any]]) -> None:
    """Fails unless all have the fields and types that the cluster wants, and no other field."""
    for each in found:
        kubernetes_validate.validate(each, VERSION, strict=True)


LISTED = yaml.safe_load((FOLDER / "base" / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
BASE = [each for name in LISTED for each in resources((FOLDER / "base" / name).read_text(encoding="utf-8"))]
DEPLOYMENTS = {each["metadata"]["name"]: each["spec"] for each in BASE if each["kind"] == "Deployment"}
SERVICES = {each["metadata"]["name"]: each["spec"] for each in BASE if each["kind"] == "Service"}


def test_the_schemas_take_every_resource() -> None:
    """All files are listed, and a field that does not exist is refused."""
    assert sorted(["kustomization.yaml", *LISTED]) == sorted(path.name for path in (FOLDER / "base").iterdir())
    check_resources(BASE)
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        check_resources([{**BASE[-1], "replica": 2}])


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_set_are_options_of_the_process(name: str) -> None:
    """Variables by name, ports that containers and services agree on, and time to drain before the end."""
    pod = DEPLOYMENTS[name]["template"]["spec"]
    (container,) = pod["containers"]
    options = {option.variable: option for option in settings_of(SETTINGS[name])}
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables.keys() <= options.keys()
    ports = {each["containerPort"] for each in container["ports"]}
    assert ports == {int(value.rpartition(":")[2]) for key, value in variables.items() if key.endswith("LISTEN")}
    assert {each["port"] for each in SERVICES[name]["ports"]} <= ports
    pause = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert pod["terminationGracePeriodSeconds"] > pause + options["OUTRIDER_DRAIN_SECONDS"].default


@pytest.mark.parametrize("name", SETTINGS)
def test_nobody_is_root_or_writes(name: str) -> None:
    """No privileges, no token of the cluster, and a root file system that nothing is written to."""
    pod = DEPLOYMENTS[name]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert all(each["readOnly"] for each in container["volumeMounts"] if each["name"] == "models")


def test_the_overlay_gives_each_service_a_gpu() -> None:
    """As kustomize makes it of base and patches."""
    kustomize = shutil.which("kustomize")
    if kustomize is None:
        pytest.skip("NO KUSTOMIZE: the overlay for GPUs is not tested on this machine")
    made = subprocess.run([kustomize, "build", FOLDER / "gpu"], check=True, capture_output=True, text=True)
    found = resources(made.stdout)
    check_resources(found)
    deployments = {each["metadata"]["name"]: each for each in found if each["kind"] == "Deployment"}
    for name in ("target", "draft"):
        (container,) = deployments[name]["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert {"name": "OUTRIDER_DEVICE", "value": "cuda"} in container["env"]
    assert all(each["metadata"].get("namespace") == "outrider" for each in found if each["kind"] != "Namespace")
