"""Services that a real Ray holds (make test-harness): replaced when they are killed, and more with more load."""

import asyncio
import os
import random
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import kubernetes_validate
import pytest
import yaml
from support.basics import eventually
from support.processes import children_of, command_words

from gateway.server import start
from gateway.settings import GatewaySettings
from outrider.client import AsyncClient, Speculation
from outrider.model_files.model_names import embedded_model
from outrider.process.children import HOST, free_port
from outrider.rpc.channels import open_channel
from outrider.v1 import model_service_pb2 as pb
from outrider.v1.model_service_pb2_grpc import ModelServiceStub

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PROMPT = "Once upon a time"
PATIENCE_S = 120.0


def descendants(pid: int) -> dict[int, tuple[int, list[str]]]:
    """Parent and words of every process that a process has started, or one of those has."""
    found = {}
    for child, words in children_of(pid).items():
        found[child] = (pid, words)
        found |= descendants(child)
    return found


@dataclass
class Fleet:
    """What serve.yaml starts, on ports of its own and with short delays."""

    config: dict[str, Any]
    folder: Path
    ports: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for application in self.config["applications"]:
            self.ports[application["name"]] = [free_port(HOST) for _ in application["args"]["ports"]]
            application["args"]["ports"] = self.ports[application["name"]]
            application["args"]["addresses"] = str(self.folder / application["name"])
        (scaled,) = (each for each in self.config["applications"][0]["deployments"])
        scaled["autoscaling_config"] |= {"upscale_delay_s": 1, "downscale_delay_s": 1, "look_back_period_s": 11}
        (self.folder / "serve.yaml").write_text(yaml.safe_dump(self.config), encoding="utf-8")
        private = {"RAY_USAGE_STATS_ENABLED": "0", "HOME": str(self.folder), "TMPDIR": str(self.folder)}
        private["RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "1"
        self.process = subprocess.Popen(
            [".venv-ray/bin/serve", "run", self.folder / "serve.yaml"],
            cwd=ROOT,
            env={**os.environ, **private, "PYTHONPATH": str(ROOT / "deploy" / "ray")},
            start_new_session=True,
        )

    def holders(self) -> dict[int, tuple[int, int]]:
        """The process of each service and its holder, by the port that it listens on."""
        started = descendants(self.process.pid).items()
        return {
            int(words[words.index("--listen") + 1].rpartition(":")[2]): (pid, parent)
            for pid, (parent, words) in started
            if "--listen" in words
        }

    async def serving(self, name: str) -> dict[int, int]:
        """Sessions of each process of a service that answers, by its port."""
        found = {}
        for port in self.ports[name]:
            async with open_channel(f"{HOST}:{port}") as channel:
                try:
                    answer = await ModelServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest(), timeout=2)
                except grpc.aio.AioRpcError:
                    continue
                found[port] = answer.session_count
        return found

    def listed(self, name: str) -> set[int]:
        """Ports of a service in the file that gateways read."""
        return {int(each.rpartition(":")[2]) for each in (self.folder / name).read_text(encoding="utf-8").split()}

    async def until(self, **counts: int) -> None:
        """Waits until so many processes of each service answer."""

        async def are_there() -> bool:
            assert self.process.poll() is None
            return all([len(await self.serving(name)) == count for name, count in counts.items()])

        await eventually(are_there, PATIENCE_S)


@pytest.fixture
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Ray with both applications, ended as an operator does; nothing that it started is left."""
    # Paths of Ray's sockets have to be short.
    folder = tmp_path_factory.mktemp("r")
    made = Fleet(yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text(encoding="utf-8")), folder)
    try:
        yield made
        started = descendants(made.process.pid)
        services = [pid for pid, _ in made.holders().values()]
        assert len(services) == 3
        made.process.send_signal(signal.SIGINT)
        await asyncio.to_thread(made.process.wait, PATIENCE_S)
        assert [pid for pid in services if command_words(pid)] == []
        # Ray's own take a moment longer.
        await eventually(lambda: not any(command_words(pid) == words for pid, (_, words) in started.items()))
    finally:
        os.killpg(made.process.pid, signal.SIGKILL) if made.process.poll() is None else None


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[AsyncClient]:
    """A client of a gateway that finds the replicas by the files of their addresses."""
    await fleet.until(target=2, draft=1)
    target, draft = (f"file:{fleet.folder / name}" for name in ("target", "draft"))
    gateway = await start(
        GatewaySettings(target, embedded_model("target"), draft, listen=f"{HOST}:0", rest_listen="", no_auth=True)
    )
    async with AsyncClient(gateway.address) as opened:
        yield opened
    await gateway.stop(0)


async def test_a_killed_holder_changes_no_token_and_load_says_how_many_there_are(
    fleet: Fleet, client: AsyncClient
) -> None:
    """Its process ends with it and another one comes; a third target while prompts wait, and two when none does."""
    alone = Speculation(enabled=False)
    plain = await client.generate(PROMPT, max_tokens=400, temperature=0, ignore_eos=True, speculation=alone).result()
    stream = client.generate(PROMPT, max_tokens=400, temperature=0, ignore_eos=True)
    pieces = []
    async for text in stream.text():
        pieces.append(text)
        if len(pieces) == 3:
            (busy,) = (port for port, sessions in (await fleet.serving("target")).items() if sessions)
            process, holder = fleet.holders()[busy]
            os.kill(holder, signal.SIGKILL)
    answer = await stream.result()
    assert "".join(pieces) == answer.text == plain.text
    assert answer.token_ids == plain.token_ids
    assert sum(each.facts.target_reopens for each in answer.samples[0].rounds) == 1
    await eventually(lambda: not command_words(process))
    await fleet.until(target=2, draft=1)

    source = random.Random(7)
    is_enough = asyncio.Event()

    async def ask() -> None:
        while not is_enough.is_set():
            await client.generate([0, *source.choices(range(100, 1000), k=3000)], max_tokens=1).result()

    async with asyncio.TaskGroup() as group:
        for _ in range(16):
            group.create_task(ask())
        await fleet.until(target=3)
        is_enough.set()
    assert fleet.listed("target") == set(fleet.ports["target"])
    await fleet.until(target=2)
    assert fleet.listed("target") == (await fleet.serving("target")).keys()


def test_ray_takes_the_configuration_of_a_cluster() -> None:
    """By the schema that Serve reads it with, pods by Kubernetes' own; a worker has what each holder asks for."""
    service = yaml.safe_load((ROOT / "deploy" / "ray" / "rayservice.yaml").read_text(encoding="utf-8"))
    program = (
        "import sys, yaml; from ray.serve.schema import ServeDeploySchema; from holders import ReplicasByLoad, Held\n"
        "for application in ServeDeploySchema(**yaml.safe_load(sys.stdin)).applications:\n"
        "    Held(**application.args)\n"
        "    if isinstance(scaled := application.deployments[0].autoscaling_config, dict):\n"
        "        ReplicasByLoad(**scaled['policy']['policy_kwargs'])\n"
    )
    for text in (
        service["spec"]["serveConfigV2"],
        (ROOT / "deploy" / "ray" / "serve.yaml").read_text(encoding="utf-8"),
    ):
        command = [".venv-ray/bin/python", "-c", program]
        environment = {**os.environ, "PYTHONPATH": "deploy/ray"}
        done = subprocess.run(
            command, cwd=ROOT, input=text, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": group["template"]["spec"]}
        kubernetes_validate.validate(pod, "1.34", strict=True)
        (container,) = pod["spec"]["containers"]
        assert container["env"] == [{"name": "PYTHONPATH", "value": "/home/ray/holders"}]
    resources = cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["resources"]
    ports = {}
    for application in yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]:
        (deployment,) = application["deployments"]
        assert deployment["ray_actor_options"]["num_cpus"] <= int(resources["requests"]["cpu"])
        assert deployment["ray_actor_options"]["num_gpus"] <= resources["limits"]["nvidia.com/gpu"]
        ports[application["name"]] = application["args"]["ports"]
    found = yaml.safe_load((ROOT / "deploy" / "ray" / "service.yaml").read_text(encoding="utf-8"))
    kubernetes_validate.validate(found, "1.34", strict=True)
    assert found["metadata"]["namespace"] == service["metadata"]["namespace"]
    assert found["spec"]["selector"]["ray.io/group"] == cluster["workerGroupSpecs"][0]["groupName"]
    assert {each["name"]: [each["port"]] for each in found["spec"]["ports"]} == ports
