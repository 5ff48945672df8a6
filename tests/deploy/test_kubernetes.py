"""The manifests of deploy/kubernetes, as kustomize makes them: schemas take them, and what they name is there."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock

import kubernetes_validate
import pytest
import yaml

from draft_service.server import DraftSettings
from gateway.rest import status
from gateway.rest.guard import OPEN_PATHS
from gateway.settings import GatewaySettings
from outrider import __version__
from outrider.model_files.model_names import SIM_PRESETS
from outrider.process.options import settings_of
from outrider.process.run import ProcessSettings
from target_service.server import TargetSettings

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
# The least one in which a preStop hook may sleep without a switch, and a newer one.
VERSIONS = ("1.30", "1.34")
# Components are named in an overlay of the operator's: here one of the base.
COMPONENTS = ("autoscale/hpa", "autoscale/keda")
OVERLAYS = ("base", "gpu", "example", *COMPONENTS)
SETTINGS: dict[str, type[ProcessSettings]] = {
    "gateway": GatewaySettings,
    "target": TargetSettings,
    "draft": DraftSettings,
}
NAME = "app.kubernetes.io/name"
Resource = dict[str, Any]


@cache
def rendered(overlay: str) -> list[Resource]:
    """The resources of an overlay."""
    tools = ([shutil.which("kustomize"), "build"], [shutil.which("kubectl"), "kustomize"])
    command = next((words for words in tools if words[0]), None)
    if command is None:
        pytest.skip("NO KUSTOMIZE, NO KUBECTL: the manifests for Kubernetes are not tested on this machine")
    with TemporaryDirectory() as folder:
        path = FOLDER / overlay
        if overlay in COMPONENTS:
            path = Path(folder)
            base, component = (os.path.relpath(FOLDER / each, path.resolve()) for each in ("base", overlay))
            named = {"namespace": "outrider", "resources": [base], "components": [component]}
            (path / "kustomization.yaml").write_text(yaml.safe_dump(named), encoding="utf-8")
        made = subprocess.run([*command, path], check=True, capture_output=True, text=True)
    return list(yaml.safe_load_all(made.stdout))


@pytest.fixture(params=OVERLAYS)
def resources(request: pytest.FixtureRequest) -> list[Resource]:
    """What an overlay makes, each in its turn."""
    return deepcopy(rendered(request.param))


def as_autoscaler(resource: Resource) -> Resource:
    """A ScaledObject as the autoscaler that KEDA makes of it, which has a schema; any other resource itself."""
    if resource["kind"] != "ScaledObject":
        return resource
    assert resource["apiVersion"] == "keda.sh/v1alpha1"
    spec = dict(resource["spec"])
    triggers = spec.pop("triggers")
    assert {each["type"] for each in triggers} == {"prometheus"}
    assert all(each["metadata"].keys() == {"serverAddress", "query", "threshold"} for each in triggers)
    assert 0 < spec.pop("pollingInterval") <= 30
    metrics = [
        {
            "type": "External",
            "external": {
                "metric": {"name": each["metadata"]["query"]},
                "target": {"type": "AverageValue", "averageValue": each["metadata"]["threshold"]},
            },
        }
        for each in triggers
    ]
    (advanced,) = spec.pop("advanced").items()
    assert advanced[0] == "horizontalPodAutoscalerConfig"
    scaled = {"apiVersion": "apps/v1", "kind": "Deployment", **spec.pop("scaleTargetRef")}
    bounds = {"minReplicas": spec.pop("minReplicaCount"), "maxReplicas": spec.pop("maxReplicaCount")}
    return {
        **resource,
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "spec": {**spec, **bounds, **advanced[1], "scaleTargetRef": scaled, "metrics": metrics},
    }


def of_kind(resources: list[Resource], kind: str) -> dict[str, Resource]:
    """The resources of a kind, by name."""
    return {each["metadata"]["name"]: each for each in resources if each["kind"] == kind}


def replicas_of(resources: list[Resource], name: str) -> int | None:
    """How many pods a deployment asks for; None where that is an autoscaler's to say."""
    replicas: int | None = of_kind(resources, "Deployment")[name]["spec"].get("replicas")
    return replicas


def pods_of(resources: list[Resource]) -> dict[str, Resource]:
    """What the pods of each deployment are made from."""
    return {name: each["spec"]["template"] for name, each in of_kind(resources, "Deployment").items()}


def container_of(pod: Resource) -> Resource:
    """The only container of a pod."""
    (container,) = pod["spec"]["containers"]
    return dict(container)


def variables_of(pod: Resource) -> dict[str, str]:
    """Variables of the environment of a pod's container; in place of a value may stand what of its resources it is."""
    found = {each["name"]: each for each in container_of(pod)["env"]}
    assert len(found) == len(container_of(pod)["env"])
    return {
        name: each.get("value") or each["valueFrom"]["resourceFieldRef"]["resource"] for name, each in found.items()
    }


def chosen(selector: dict[str, Any], pods: dict[str, Resource]) -> set[str]:
    """The names of the pods that a selector chooses; one that asks for nothing chooses all."""
    wanted = {key: {value} for key, value in selector.get("matchLabels", {}).items()}
    for each in selector.get("matchExpressions", []):
        assert each["operator"] == "In"
        wanted[each["key"]] = set(each["values"])
    labels = {name: pod["metadata"]["labels"] for name, pod in pods.items()}
    return {name for name, has in labels.items() if all(has.get(key) in values for key, values in wanted.items())}


def allowed(resources: list[Resource], way: str) -> Iterator[tuple[str, set[str] | str, set[Any]]]:
    """What policies let through: a pod, whom it may be called by (`ingress`) or call (`egress`), and by which ports."""
    pods = pods_of(resources)
    for policy in of_kind(resources, "NetworkPolicy").values():
        assert set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}
        for name in chosen(policy["spec"]["podSelector"], pods):
            for rule in policy["spec"].get(way, []):
                ports = {each["port"] for each in rule["ports"]}
                peers = rule.get({"ingress": "from", "egress": "to"}[way], [{}])
                for peer in peers:
                    if "podSelector" in peer:
                        assert peer.keys() == {"podSelector"}
                        yield name, chosen(peer["podSelector"], pods), ports
                    elif peer:
                        (namespace,) = peer["namespaceSelector"]["matchLabels"].values()
                        yield name, namespace, ports
                    else:
                        yield name, "everybody", ports


def start_limit_s(container: Resource) -> int:
    """How long it may take to start."""
    probe = container["startupProbe"]
    return int(probe["periodSeconds"] * probe["failureThreshold"])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_take_every_resource(resources: list[Resource], version: str) -> None:
    """All files are listed, all resources lie in the namespace, and a field that does not exist is refused."""
    listed = yaml.safe_load((FOLDER / "base" / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
    assert sorted(["kustomization.yaml", *listed]) == sorted(path.name for path in (FOLDER / "base").iterdir())
    for each in resources:
        kubernetes_validate.validate(as_autoscaler(each), version, strict=True)
    (namespace,) = of_kind(resources, "Namespace")
    assert {each["metadata"].get("namespace", namespace) for each in resources} == {namespace}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate({**resources[-1], "replica": 2}, version, strict=True)


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_set_are_options_of_the_process(resources: list[Resource], name: str) -> None:
    """Variables by name, ports that containers listen on, files that are mounted, and time to drain before the end."""
    pod = pods_of(resources)[name]
    container, variables = container_of(pod), variables_of(pod)
    options = {option.variable: option for option in settings_of(SETTINGS[name])}
    assert variables.keys() <= options.keys()
    ports = {each["containerPort"] for each in container["ports"]}
    assert ports == {int(value.rpartition(":")[2]) for key, value in variables.items() if key.endswith("LISTEN")}
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    assert {f"/{value.split('/')[1]}" for value in variables.values() if value.startswith("/")} <= mounts
    assert (
        pod["metadata"]["annotations"]["prometheus.io/port"] == variables["OUTRIDER_METRICS_LISTEN"].rpartition(":")[2]
    )
    pause = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert pod["spec"]["terminationGracePeriodSeconds"] > pause + options["OUTRIDER_DRAIN_SECONDS"].default


def test_keys_and_certificates_are_asked_for(resources: list[Resource]) -> None:
    """Everybody needs a key at the gateway, and a certificate at the services, where only a gateway's will do."""
    gateway, *services = (variables_of(pods_of(resources)[name]) for name in SETTINGS)
    assert gateway["OUTRIDER_API_KEYS"] == "/keys/keys.toml"
    assert "OUTRIDER_NO_AUTH" not in gateway
    assert {"OUTRIDER_SERVICE_TLS_CA", "OUTRIDER_SERVICE_TLS_CERT", "OUTRIDER_SERVICE_TLS_KEY"} <= gateway.keys()
    for each in services:
        assert {"OUTRIDER_TLS_CERT", "OUTRIDER_TLS_KEY", "OUTRIDER_TLS_CLIENT_CA"} <= each.keys()
        assert "OUTRIDER_TLS_CLIENTS" not in each


@pytest.mark.parametrize("name", SETTINGS)
def test_pods_are_found(resources: list[Resource], name: str) -> None:
    """By their deployment, their service and its ports, and the addresses that the gateway has of services."""
    pods, service = pods_of(resources), of_kind(resources, "Service")[name]["spec"]
    deployment = of_kind(resources, "Deployment")[name]["spec"]
    assert chosen(deployment["selector"], pods) == {name}
    assert chosen({"matchLabels": service["selector"]}, pods) == {name}
    ports = {each["name"]: each["containerPort"] for each in container_of(pods[name])["ports"]}
    for each in service["ports"]:
        target = each.get("targetPort", each["port"])
        assert ports[each["name"]] == ports.get(target, target)
    for each in pods[name]["spec"].get("topologySpreadConstraints", []):
        assert chosen(each["labelSelector"], pods) == {name}
    if name != "gateway":
        (port,) = (each["port"] for each in service["ports"])
        assert service["clusterIP"] == "None"
        assert variables_of(pods["gateway"])[f"OUTRIDER_{name.upper()}"] == f"dns:{name}:{port}"


def test_a_node_can_be_emptied(resources: list[Resource]) -> None:
    """One gateway stays, of more than one; services that are scaled go one at a time; the unready block nothing."""
    autoscalers = of_kind([as_autoscaler(each) for each in resources], "HorizontalPodAutoscaler")
    budgets = of_kind(resources, "PodDisruptionBudget")
    assert budgets.keys() == (autoscalers or {"gateway": None}).keys()
    for name, budget in budgets.items():
        assert chosen(budget["spec"]["selector"], pods_of(resources)) == {name}
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    least = autoscalers["gateway"]["spec"]["minReplicas"] if autoscalers else replicas_of(resources, "gateway")
    assert 1 <= budgets.pop("gateway")["spec"]["minAvailable"] < least
    assert all(budget["spec"]["maxUnavailable"] == 1 for budget in budgets.values())


@pytest.mark.parametrize("component", COMPONENTS)
def test_load_says_how_many_there_are(component: str) -> None:
    """Gateways by CPU, targets by backlog and cache, drafts by busy time; doubled in seconds, one less in minutes."""
    resources = rendered(component)
    autoscalers = of_kind([as_autoscaler(each) for each in resources], "HorizontalPodAutoscaler")
    assert autoscalers.keys() == SETTINGS.keys()
    # Another test holds that it has all metrics that are exported, and no others.
    documented = (FOLDER.parents[1] / "docs" / "observability.md").read_text(encoding="utf-8")
    asked = re.findall(r"outrider_\w+", str([autoscalers[name]["spec"]["metrics"] for name in ("target", "draft")]))
    rules = yaml.safe_load((FOLDER / "autoscale" / "hpa" / "adapter.yaml").read_text(encoding="utf-8"))["rules"][
        "custom"
    ]
    made = {rule["name"]["as"]: rule["name"]["matches"] for rule in rules if "name" in rule}
    assert len(asked) == 3
    for name in (made.get(each, each) for each in asked):
        assert f"| `{name}` |" in documented
        assert any(re.fullmatch(rule["seriesQuery"].split('"')[1], name) for rule in rules)
    for name, autoscaler in autoscalers.items():
        assert replicas_of(resources, name) is None
        spec = autoscaler["spec"]
        assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
        assert 1 + (name != "draft") <= spec["minReplicas"] < spec["maxReplicas"]
        up, down = spec["behavior"]["scaleUp"], spec["behavior"]["scaleDown"]
        assert 15 <= up["stabilizationWindowSeconds"] <= 30
        assert [(each["type"], each["value"]) for each in up["policies"]] == [("Percent", 100)]
        assert 300 <= down["stabilizationWindowSeconds"] <= 600
        assert [(each["type"], each["value"]) for each in down["policies"]] == [("Pods", 1)]


def test_nobody_talks_to_anybody_else(resources: list[Resource]) -> None:
    """Everybody to the gateway, it to the services and for names, monitoring to the metrics; by ports that exist."""
    pods = pods_of(resources)
    policies = of_kind(resources, "NetworkPolicy").values()
    assert {} in [each["spec"]["podSelector"] for each in policies]
    called = list(allowed(resources, "ingress"))
    assert sorted(called, key=str) == sorted(
        [
            ("gateway", "everybody", {"http", "grpc"}),
            *((name, {"gateway"}, {"grpc"}) for name in ("target", "draft")),
            *((name, "monitoring", {"metrics"}) for name in SETTINGS),
        ],
        key=str,
    )
    assert sorted(allowed(resources, "egress"), key=str) == sorted(
        [("gateway", {"target", "draft"}, {"grpc"}), ("gateway", "kube-system", {53})], key=str
    )
    for name, _, ports in called:
        assert ports <= {each["name"] for each in container_of(pods[name])["ports"]}


@pytest.mark.parametrize("name", SETTINGS)
def test_probes_ask_what_is_there(resources: list[Resource], name: str) -> None:
    """Routes of the gateway that need no key, and a module of ours at the right port, which asks for life alone."""
    pod = pods_of(resources)[name]
    container, variables = container_of(pod), variables_of(pod)
    ports = {each["name"] for each in container["ports"]}
    # Of a router that answers nothing.
    routes = {getattr(route, "path", "") for route in status.routes(Mock(), Mock()).routes} & OPEN_PATHS
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[kind]
        if name == "gateway":
            assert probe["httpGet"]["path"] in routes
            assert (probe["httpGet"]["path"] == "/ready") == (kind == "readinessProbe")
            assert probe["httpGet"]["port"] in ports
            continue
        python, module_flag, module, *words = probe["exec"]["command"]
        assert [python, module_flag] == ["python", "-m"]
        assert find_spec(module) is not None
        files = [variables[f"OUTRIDER_TLS_{each}"] for each in ("CLIENT_CA", "CERT", "KEY")]
        address = f"127.0.0.1:{variables['OUTRIDER_LISTEN'].rpartition(':')[2]}"
        assert words == [*(["--live"] if kind == "livenessProbe" else []), address, *files]
    assert find_spec(container["command"][-1]) is not None


@pytest.mark.parametrize("name", SETTINGS)
def test_volumes_are_mounted(resources: list[Resource], name: str) -> None:
    """Each once, and no other; certificates are those of the pod itself, and nothing but /tmp is written to."""
    pod = pods_of(resources)[name]["spec"]
    volumes = {each["name"]: each for each in pod["volumes"]}
    mounts = {each["name"]: each for each in container_of({"spec": pod})["volumeMounts"]}
    assert mounts.keys() == volumes.keys()
    assert all(each.get("readOnly") for each in mounts.values() if each["mountPath"] != "/tmp")
    assert volumes["certificates"]["secret"]["secretName"] == f"outrider-{name}-tls"
    assert "emptyDir" in volumes["tmp"]
    # Group 10001 reads the secrets.
    assert {each["secret"]["defaultMode"] for each in volumes.values() if "secret" in each} == {0o440}


@pytest.mark.parametrize("name", SETTINGS)
def test_nobody_is_root_or_writes(resources: list[Resource], name: str) -> None:
    """What `restricted` asks for, which the namespace enforces; no token of the cluster, a read-only file system."""
    (namespace,) = of_kind(resources, "Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    pod = pods_of(resources)[name]["spec"]
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert pod["automountServiceAccountToken"] is False
    assert container_of({"spec": pod})["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_a_start_may_take_as_long_as_loading(resources: list[Resource]) -> None:
    """Ten minutes for the services, for which the gateway waits before it is given up itself; so does a rollout."""
    containers = {name: container_of(pod) for name, pod in pods_of(resources).items()}
    loading_s = start_limit_s(containers["target"])
    assert start_limit_s(containers["draft"]) == loading_s >= 600
    variables = variables_of(pods_of(resources)["gateway"])
    waits_s = float(variables["OUTRIDER_TARGET_WAIT_SECONDS"])
    assert waits_s >= loading_s
    assert float(variables["OUTRIDER_REBUILD_BUDGET_SECONDS"]) >= loading_s
    draft_s = next(each.default for each in settings_of(GatewaySettings) if each.name == "draft_wait_seconds")
    assert start_limit_s(containers["gateway"]) > waits_s + draft_s
    for name, deployment in of_kind(resources, "Deployment").items():
        assert deployment["spec"]["progressDeadlineSeconds"] > start_limit_s(containers[name])


@pytest.mark.parametrize("name", SETTINGS)
def test_an_image_is_of_this_release(name: str) -> None:
    """By its tag, so that a node takes the one that it has; an overlay puts a registry and a tag of its own there."""
    image = "outrider-gateway" if name == "gateway" else "outrider-engine"
    for overlay, named in (
        ("base", f"{image}:{__version__}"),
        ("gpu", f"{image}:{__version__}"),
        ("example", f"registry.example.com/{image}:{__version__}-1"),
    ):
        container = container_of(pods_of(rendered(overlay))[name])
        assert (container["image"], container["imagePullPolicy"]) == (named, "IfNotPresent")


@pytest.mark.parametrize(("name", "preset"), [("target", "h100-8b"), ("draft", "h100-1b")])
def test_a_service_has_the_threads_and_memory_of_its_model(resources: list[Resource], name: str, preset: str) -> None:
    """A thread for each CPU that is asked for, of a node that may have more; weights and the largest cache fit."""
    pod = pods_of(resources)[name]
    assert variables_of(pod)["OUTRIDER_THREADS"] == "requests.cpu"
    asked, limits = (container_of(pod)["resources"][each] for each in ("requests", "limits"))
    assert int(asked["cpu"]) >= 1
    assert "cpu" not in limits
    asked_gib, limit_gib = (int(each["memory"].removesuffix("Gi")) for each in (asked, limits))
    assert asked_gib > SIM_PRESETS[preset].parameter_count * 2 / 2**30 + 4
    assert limit_gib > asked_gib


def test_the_example_serves_a_model_of_yours() -> None:
    """From the claim that it makes and all pods mount; the gateway reads the files of the target that is served."""
    made = rendered("example")
    pods = pods_of(made)
    variables = {name: variables_of(pod) for name, pod in pods.items()}
    assert variables["gateway"]["OUTRIDER_TOKENIZER"] == variables["target"]["OUTRIDER_MODEL"]
    assert variables["target"]["OUTRIDER_MODEL"] != variables["draft"]["OUTRIDER_MODEL"]
    [claim] = of_kind(made, "PersistentVolumeClaim")
    for pod in pods.values():
        volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
        assert volumes["models"]["persistentVolumeClaim"] == {"claimName": claim, "readOnly": True}
    others = [each for each in made if each["kind"] not in {"Deployment", "PersistentVolumeClaim"}]
    assert others == [each for each in rendered("base") if each["kind"] != "Deployment"]


def test_the_overlay_gives_each_service_a_gpu() -> None:
    """Target and draft have one each, and use it; everything else is as in the base."""
    made = deepcopy(rendered("gpu"))
    pods = pods_of(made)
    for name in ("target", "draft"):
        (container,) = pods[name]["spec"]["containers"]
        assert container["resources"]["limits"].pop("nvidia.com/gpu") == 1
        container["env"].remove({"name": "OUTRIDER_DEVICE", "value": "cuda"})
    assert made == rendered("base")
