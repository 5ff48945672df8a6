"""deploy/compose.yaml on a real engine: `make test-docker`, with BASE_IMAGE and PIP_OPTIONS as compose takes them.

Skipped, loudly, where no engine answers; with REQUIRE_DOCKER=1 that is a failure.
"""

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import docker
import grpc
import httpx
import pytest
from deploy.locks import ROOT, pins
from docker.models.containers import Container
from faults.load import PATIENCE_S, Load, said, until_health
from grpc_health.v1 import health_pb2, health_pb2_grpc
from packaging.utils import canonicalize_name
from support.basics import eventually
from support.keys import bearer, write_keys
from support.observability import families
from support.stack import request_of

from outrider.client import AsyncClient
from outrider.errors import PeerLost
from outrider.rpc.channels import open_channel
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]

FILE, KEYS_FILE = ROOT / "deploy" / "compose.yaml", ROOT / "deploy" / "compose.keys.yaml"
OUTRIDER = str(Path(sys.executable).with_name("outrider"))
BUILD_S, UP_S = 1800, 300
# Tokens for some seconds, so that no request ends by itself before a busy engine has done something to its gateway.
LONG = 1500
PROMPT = "The fox said to the wolf,"


def environment_without_ours() -> dict[str, str]:
    """The environment, in which nothing is set that the stack or a command would take up."""
    return {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}


@dataclass
class Compose:
    """A stack of these files, under a name of its own, on free ports, and of images with a tag of their own."""

    engine: docker.DockerClient
    project: str = field(default_factory=lambda: f"outrider-test-{secrets.token_hex(4)}")
    files: tuple[Path, ...] = (FILE,)
    variables: Mapping[str, str] = field(default_factory=dict)

    def run(self, *words: str, timeout_s: float = UP_S) -> str:
        """What `docker compose` prints; fails with its error."""
        files = [word for file in self.files for word in ("-f", str(file))]
        command = ["docker", "compose", "-p", self.project, *files, *words]
        own = {"OUTRIDER_PUBLISH": "127.0.0.1:", "OUTRIDER_PUBLISH_REST": "127.0.0.1:", "OUTRIDER_TAG": "test"}
        own["OUTRIDER_PAIR"] = "tales"
        environment = {**environment_without_ours(), **own, **self.variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    def containers(self, service: str) -> list[Container]:
        """The containers of a service, the first one first."""
        labels = [f"com.docker.compose.project={self.project}", f"com.docker.compose.service={service}"]
        found = self.engine.containers.list(all=True, filters={"label": labels})
        return sorted(found, key=lambda each: int(each.labels["com.docker.compose.container-number"]))

    def address(self, port: int) -> str:
        """Where the gateway is published now."""
        return self.run("port", "gateway", str(port)).strip()

    def disconnect(self, container: Container) -> None:
        self.engine.networks.get(f"{self.project}_default").disconnect(container)

    def connect(self, container: Container) -> None:
        # Without its alias the service's name would be lost.
        service = container.labels["com.docker.compose.service"]
        self.engine.networks.get(f"{self.project}_default").connect(container, aliases=[service])


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    """The stack, built and healthy."""
    try:
        engine = docker.from_env()
        engine.ping()
    except docker.errors.DockerException as error:
        if os.environ.get("REQUIRE_DOCKER", "0") not in {"", "0"}:
            raise
        pytest.skip(f"NO DOCKER ENGINE: the compose stack is not tested on this machine: {error}")
    stack = Compose(engine)
    try:
        stack.run("build", timeout_s=BUILD_S)
        stack.run("up", "--detach", "--wait", "--wait-timeout", str(UP_S), timeout_s=UP_S + 60)
        yield stack
    except BaseException:
        sys.stderr.write(stack.run("logs", "--tail", "60"))
        raise
    finally:
        stack.run("down", "--volumes", "--timeout", "2")
        engine.close()


@pytest.fixture
async def channel(compose: Compose) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the gateway, wherever it is published now."""
    async with open_channel(compose.address(50050)) as opened:
        await until_health(opened, "SERVING")
        yield opened


async def until_guesses_are_accepted(channel: grpc.aio.Channel) -> None:
    """Waits until a draft is part of the rounds again."""
    stub = GenerationServiceStub(channel)

    async def are() -> bool:
        asked = request_of(text=PROMPT, max_tokens=16, draft_count=4, drafter="model")
        messages = [each async for each in stub.Generate(asked)]
        return messages[-1].completion.speculation.accepted_tokens > 0

    await eventually(are, PATIENCE_S)


def pause(_: Compose, container: Container) -> None:
    """Freezes all that runs in a container; under load an engine with the older control groups has to try again."""
    for attempt in range(10):
        try:
            container.pause()
            break
        except docker.errors.APIError as error:
            if attempt == 9 or "unable to freeze" not in str(error):
                raise


Act = Callable[[Compose, Container], None]
FAULTS: dict[str, tuple[Act, Act]] = {
    "killed": (lambda _, each: each.kill(), lambda _, each: each.start()),
    "paused": (pause, lambda _, each: each.unpause()),
    "disconnected": (Compose.disconnect, Compose.connect),
}


def test_nobody_is_root_or_could_build(compose: Compose) -> None:
    """A user without rights, a root file system that is read-only, and neither compiler nor pip in either image."""
    for service in ("gateway", "target", "draft"):
        (container,) = compose.containers(service)
        assert container.attrs["HostConfig"]["ReadonlyRootfs"] is True
        assert container.attrs["HostConfig"]["CapDrop"] == ["ALL"]
        assert container.exec_run(["id", "-u"]).output.strip() == b"10001"
        assert container.exec_run(["touch", "/etc/mine"]).exit_code != 0
        for tool in ("gcc", "cc", "ld", "as", "make", "pip", "pip3"):
            assert container.exec_run(["sh", "-c", f"command -v {tool}"]).exit_code != 0, tool


@pytest.mark.parametrize(
    ("service", "locks", "torch"), [("gateway", ["gateway"], set()), ("target", ["gateway", "engine"], {"torch"})]
)
def test_an_image_has_what_is_locked(compose: Compose, service: str, locks: list[str], torch: set[str]) -> None:
    """Nothing else, and in no other version; torch comes from an index of its own, and with nothing for GPUs."""
    (container,) = compose.containers(service)
    listing = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"

    def there(python: str) -> dict[str, str]:
        found = json.loads(container.exec_run([python, "-c", listing]).output)
        return {canonicalize_name(name): version for name, version in found.items()}

    locked = {name: version for lock in locks for name, version in pins(ROOT / "deploy" / f"{lock}.lock").items()}
    installed = there("python")
    assert all(installed[name] == pins(ROOT / "constraints.txt")[name] + "+cpu" for name in torch)
    assert {name: installed[name] for name in installed.keys() - {"outrider", *torch}} == locked
    base = container.exec_run(["python", "-c", "import sys; print(sys._base_executable, end='')"]).output.decode()
    assert not {"pip", "setuptools", "wheel"} & there(base).keys()


async def test_rest_grpc_and_the_command_line_say_the_same(compose: Compose, channel: grpc.aio.Channel) -> None:
    """One prompt with one seed, asked in three ways."""
    async with AsyncClient(compose.address(50050), timeout_s=PATIENCE_S) as client:
        text = (await client.generate(PROMPT, max_tokens=24, temperature=0.8, seed=5).result()).text
    body = {"model": "target", "prompt": PROMPT, "max_tokens": 24, "temperature": 0.8, "seed": 5}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as rest:
        answer = await rest.post(f"http://{compose.address(8080)}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == text
    words = [OUTRIDER, "generate", PROMPT, "--address", compose.address(50050)]
    words += ["--max-tokens", "24", "--temperature", "0.8", "--seed", "5"]
    done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, check=True)
    assert text.strip() in done.stdout


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_draft_is_missed_by_no_token(compose: Compose, channel: grpc.aio.Channel, fault: str) -> None:
    """The stream goes on without it, to its end; when it is back, it guesses again."""
    harm, mend = FAULTS[fault]
    (container,) = compose.containers("draft")
    expected = await said(channel)
    async with Load(channel) as load:
        await load.begun()
        await asyncio.to_thread(harm, compose, container)
        try:
            assert await load.token_ids() == expected
        finally:
            await asyncio.to_thread(mend, compose, container)
    await until_guesses_are_accepted(channel)


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_target_is_waited_for(compose: Compose, channel: grpc.aio.Channel, fault: str) -> None:
    """The stream pauses while it is away, which health says, and goes on with the same tokens."""
    harm, mend = FAULTS[fault]
    (container,) = compose.containers("target")
    expected = await said(channel)
    async with Load(channel) as load:
        await load.begun()
        await asyncio.to_thread(harm, compose, container)
        try:
            await until_health(channel, "NOT_SERVING")
        finally:
            await asyncio.to_thread(mend, compose, container)
        assert await load.token_ids() == expected
    await until_health(channel, "SERVING")


async def test_a_target_that_hangs_shows_no_sign_of_life(compose: Compose, channel: grpc.aio.Channel) -> None:
    """Its process stands still and nothing else does: what Kubernetes asks for life fails until it goes on."""
    (container,) = compose.containers("target")
    python, module_flag, probe, *words = container.attrs["Config"]["Healthcheck"]["Test"][1:]

    def lives() -> bool:
        return bool(container.exec_run([python, module_flag, probe, "--live", *words]).exit_code == 0)

    def send(signal: str) -> None:
        # The service is the only child of the first process, which is the engine's.
        assert container.exec_run(["sh", "-c", f"kill -{signal} $(cat /proc/1/task/1/children)"]).exit_code == 0

    assert await asyncio.to_thread(lives)
    send("STOP")
    try:
        assert not await asyncio.to_thread(lives)
        await until_health(channel, "NOT_SERVING")
    finally:
        send("CONT")
    await eventually(lives, PATIENCE_S)
    await until_health(channel, "SERVING")


async def test_a_target_is_replaced_under_load(compose: Compose, channel: grpc.aio.Channel) -> None:
    """What runs ends on the old one or moves to the new one, and what comes meanwhile is answered too."""
    expected = await said(channel)
    (old,) = compose.containers("target")
    async with Load(channel) as load, Load(channel) as later:
        await load.begun()
        words = ("up", "--detach", "--no-deps", "--force-recreate", "--wait", "target")
        replaced = asyncio.create_task(asyncio.to_thread(compose.run, *words))
        assert await load.token_ids() == expected
        assert await later.token_ids() == expected
        await replaced
    (new,) = compose.containers("target")
    assert new.id != old.id
    assert await said(channel) == expected


async def test_one_of_two_drafts_is_enough(compose: Compose, channel: grpc.aio.Channel) -> None:
    """The draft is scaled up under load, its first container is killed, and guesses go on."""
    expected = await said(channel)
    try:
        async with Load(channel) as load:
            await load.begun()
            words = ("up", "--detach", "--no-deps", "--no-recreate", "--wait", "--scale", "draft=2", "draft")
            await asyncio.to_thread(compose.run, *words)
            assert await load.token_ids() == expected
        first, second = compose.containers("draft")
        async with Load(channel) as load:
            await load.begun()
            await asyncio.to_thread(first.kill)
            assert await load.token_ids() == expected
        await until_guesses_are_accepted(channel)
        assert second.status == "running"
    finally:
        words = ("up", "--detach", "--no-deps", "--no-recreate", "--scale", "draft=1", "draft")
        await asyncio.to_thread(compose.run, *words)


SESSIONS = """
from urllib.request import urlopen
lines = urlopen("http://127.0.0.1:9102/metrics").read().decode().splitlines()
print(*(line for line in lines if line.startswith("outrider_sessions{")))
"""


def num_sessions(container: Container) -> int:
    """Sessions that a target holds, as its metrics say."""
    done = container.exec_run(["python", "-c", SESSIONS])
    assert done.exit_code == 0, done.output
    return int(float(done.output.split()[-1]))


async def until_up(compose: Compose, **counts: int) -> None:
    """Waits until the gateway has links to so many services of each role, and to no other."""
    async with httpx.AsyncClient(base_url=f"http://{compose.address(8080)}", timeout=PATIENCE_S) as rest:

        async def are() -> bool:
            samples = families((await rest.get("/metrics")).text)["outrider_service_up"].samples
            up = Counter(each.labels["service"] for each in samples if each.value)
            return up == counts and up.total() == len(samples)

        await eventually(are, PATIENCE_S)


async def test_targets_come_and_go_under_load(compose: Compose, channel: grpc.aio.Channel) -> None:
    """Four share the streams; one is killed, one stopped, and then there are five: each stream says the same."""
    expected = await said(channel, LONG)

    async def scale(targets: int, drafts: int) -> None:
        sizes = ("--scale", f"target={targets}", "--scale", f"draft={drafts}", "target", "draft")
        await asyncio.to_thread(compose.run, "up", "--detach", "--no-deps", "--no-recreate", "--wait", *sizes)
        await until_up(compose, target=targets, draft=drafts)

    try:
        await scale(4, 2)
        async with Load(channel, LONG) as load:
            await load.begun()
            busy = [each for each in compose.containers("target") if num_sessions(each)]
            assert len(busy) > 1
            await asyncio.to_thread(busy[0].kill)
            stopping = asyncio.create_task(asyncio.to_thread(busy[1].stop))
            assert await load.token_ids() == expected
            await stopping
        await until_up(compose, target=2, draft=2)
        await scale(5, 2)
        async with Load(channel, LONG) as load:
            await load.begun()
            assert len([each for each in compose.containers("target") if num_sessions(each)]) > 1
            assert await load.token_ids() == expected
    finally:
        await scale(1, 1)


@pytest.mark.parametrize("fault", ["killed", "disconnected"])
async def test_a_gateway_comes_back(compose: Compose, channel: grpc.aio.Channel, fault: str) -> None:
    """Its streams break with a sentence, after tokens that were right; asked again it says the same."""
    harm, mend = FAULTS[fault]
    expected = await said(channel, LONG)
    (container,) = compose.containers("gateway")
    async with Load(channel, LONG) as load:
        await load.begun()
        await asyncio.to_thread(harm, compose, container)
        try:
            for request, end, token_ids in zip(load.requests, await load.ended(), expected, strict=True):
                assert isinstance(end, PeerLost)
                assert token_ids[: len(request.token_ids)] == request.token_ids
        finally:
            await asyncio.to_thread(mend, compose, container)
    async with open_channel(compose.address(50050)) as again:
        await until_health(again, "SERVING")
        assert await said(again, LONG) == expected


async def test_a_gateway_pauses(compose: Compose, channel: grpc.aio.Channel) -> None:
    """While it does no client is answered; then its streams go on with the same tokens."""
    expected = await said(channel, LONG)
    (container,) = compose.containers("gateway")
    async with Load(channel, LONG) as load:
        await load.begun()
        await asyncio.to_thread(pause, compose, container)
        try:
            with pytest.raises(grpc.aio.AioRpcError) as unanswered:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
            assert unanswered.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert all(request.completion is None for request in load.requests)
        finally:
            await asyncio.to_thread(container.unpause)
        assert await load.token_ids() == expected


@pytest.fixture
def assistant(compose: Compose) -> Iterator[Compose]:
    """Another stack, which serves what it does where nothing is said."""
    stack = replace(compose, project=f"{compose.project}-assistant", variables={"OUTRIDER_PAIR": ""})
    try:
        stack.run("up", "--detach", "--wait", "--wait-timeout", str(UP_S), timeout_s=UP_S + 60)
        yield stack
    finally:
        stack.run("down", "--volumes", "--timeout", "2")


async def test_the_assistant_is_served_by_default(assistant: Compose) -> None:
    """It answers in chat, with guesses of the drafts made for it; the page opens; and it is fetched once."""
    async with httpx.AsyncClient(base_url=f"http://{assistant.address(8080)}", timeout=PATIENCE_S) as rest:
        page = await rest.get("/")
        assert page.headers["content-type"].startswith("text/html")
        [model] = (await rest.get("/v1/models")).json()["data"]
        assert model["id"] == "SmolLM2-135M-Instruct"
        assert model["generation_defaults"]["temperature"] == 0.2
        body = {"model": model["id"], "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        for drafter in ("model", "eagle3"):
            speculation = {"draft_count": 2, "drafter": drafter}
            answer = await rest.post("/v1/chat/completions", json={**body, "seed": 2, "speculation": speculation})
            assert answer.status_code == 200, answer.text
            assert "Paris" in answer.json()["choices"][0]["message"]["content"]
            assert answer.json()["outrider"]["accepted_tokens"] > 0
    # Without an index nothing could be fetched.
    assert "The target is /assistant/outrider/" in assistant.run("run", "--rm", "--env", "PIP_NO_INDEX=1", "models")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file with alice's key."""
    return Path(write_keys(tmp_path / "keys.toml", alice={}))


@pytest.fixture
def guarded(compose: Compose, keys: Path) -> Iterator[Compose]:
    """The stack, whose gateway asks for keys meanwhile."""
    stack = replace(compose, files=(FILE, KEYS_FILE), variables={"OUTRIDER_KEYS": str(keys)})
    words = ("up", "--detach", "--no-deps", "--wait", "gateway")
    stack.run(*words)
    yield stack
    compose.run(*words)


async def test_nobody_comes_in_without_a_key(guarded: Compose, keys: Path) -> None:
    """Neither over REST nor over gRPC nor by a command; the file is seen by the gateway alone, and read again."""
    rest_address, address = guarded.address(8080), guarded.address(50050)

    def command(key: str) -> int:
        words = [OUTRIDER, "generate", PROMPT, "--address", address, "--max-tokens", "4"]
        environment = {**environment_without_ours(), "OUTRIDER_API_KEY": key}
        return subprocess.run(words, env=environment, capture_output=True, check=False).returncode

    async with httpx.AsyncClient(base_url=f"http://{rest_address}", timeout=PATIENCE_S) as rest:

        async def status(headers: dict[str, str]) -> int:
            body = {"model": "target", "prompt": PROMPT, "max_tokens": 4}
            return (await rest.post("/v1/completions", json=body, headers=headers)).status_code

        async with open_channel(address) as channel:

            async def code(headers: dict[str, str]) -> grpc.StatusCode:
                asked = request_of(text=PROMPT, max_tokens=4)
                call = GenerationServiceStub(channel).Generate(asked, metadata=tuple(headers.items()))
                with suppress(grpc.aio.AioRpcError):
                    assert [each async for each in call][-1].HasField("completion")
                return await call.code()

            for headers, wanted in (({}, 401), (bearer("wrong"), 401), (bearer("alice"), 200)):
                assert await status(headers) == wanted
                assert await code(headers) is (grpc.StatusCode.UNAUTHENTICATED if wanted == 401 else grpc.StatusCode.OK)
                key = headers.get("authorization", "").removeprefix("Bearer ")
                assert await asyncio.to_thread(command, key) == (77 if wanted == 401 else 0)
        # Into the same file: one in its place would not be that which is mounted.
        write_keys(keys, bobby={})
        assert [await status(bearer(name)) for name in ("alice", "bobby")] == [401, 200]
    for service in ("target", "draft"):
        (container,) = guarded.containers(service)
        assert container.exec_run(["ls", "/run/secrets"]).exit_code != 0


# Asks a service what it is, with the certificate of the container in which this runs.
ASK = """
import sys, grpc
from outrider.rpc.channels import open_blocking_channel
from outrider.rpc.tls import Tls, TlsFiles
from outrider.v1.model_service_pb2 import GetModelInfoRequest
from outrider.v1.model_service_pb2_grpc import ModelServiceStub
files = TlsFiles(Tls(*("/certificates/" + name for name in ("ca.crt", "tls.crt", "tls.key"))))
with open_blocking_channel(sys.argv[1], files) as channel:
    try:
        ModelServiceStub(channel).GetModelInfo(GetModelInfoRequest(), timeout=30)
        print("let in")
    except grpc.RpcError as error:
        print(error.details())
"""


@pytest.mark.parametrize("address", ["target:50052", "draft:50051"])
def test_services_let_in_the_gateway_alone(compose: Compose, address: str) -> None:
    """Plaintext, no certificate, and that of another service are refused, each with a sentence."""
    asked, _, _ = address.partition(":")
    (gateway,) = compose.containers("gateway")
    (other,) = compose.containers({"target": "draft", "draft": "target"}[asked])
    for words, sentence in (
        ((), f"{address} speaks TLS, and was called without it."),
        (("/certificates/ca.crt",), f"{address} lets nobody in without a certificate, and none was given."),
    ):
        found = gateway.exec_run(["python", "-m", "outrider.process.health_probe", address, *words])
        assert found.exit_code == 69
        assert sentence in found.output.decode()
    assert gateway.exec_run(["python", "-c", ASK, address]).output.decode().strip() == "let in"
    refused = other.exec_run(["python", "-c", ASK, address]).output.decode()
    assert "is not one of those that are let in" in refused
