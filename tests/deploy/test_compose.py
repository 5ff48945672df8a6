"""deploy/compose.yaml on a real engine: `make test-docker`, with BASE_IMAGE and PIP_OPTIONS as compose takes them.

Skipped, loudly, where no engine answers; with REQUIRE_DOCKER=1 that is a failure.
"""

import asyncio
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import docker
import grpc
import httpx
import pytest
from docker.models.containers import Container
from faults.load import PATIENCE_S, Load, said, until_health
from support.basics import eventually
from support.stack import request_of

from outrider.client import AsyncClient
from outrider.errors import PeerLost
from outrider.rpc.channels import open_channel
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]

FILE = Path(__file__).parents[2] / "deploy" / "compose.yaml"
BUILD_S, UP_S = 1800, 300
PROMPT = "The fox said to the wolf,"


@dataclass
class Compose:
    """A stack of this file, under a name of its own and on free ports."""

    engine: docker.DockerClient
    project: str = field(default_factory=lambda: f"outrider-test-{secrets.token_hex(4)}")

    def run(self, *words: str, timeout_s: float = UP_S) -> str:
        """What `docker compose` prints; fails with its error."""
        command = ["docker", "compose", "-p", self.project, "-f", str(FILE), *words]
        ports = {"OUTRIDER_PUBLISH": "127.0.0.1:", "OUTRIDER_PUBLISH_REST": "127.0.0.1:"}
        done = subprocess.run(
            command, env={**os.environ, **ports}, capture_output=True, text=True, timeout=timeout_s, check=False
        )
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
        if os.environ.get("REQUIRE_DOCKER"):
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
    """A user without rights, a root file system that is read-only, and no compiler in either image."""
    for service in ("gateway", "target", "draft"):
        (container,) = compose.containers(service)
        assert container.attrs["HostConfig"]["ReadonlyRootfs"] is True
        assert container.attrs["HostConfig"]["CapDrop"] == ["ALL"]
        assert container.exec_run(["id", "-u"]).output.strip() == b"10001"
        assert container.exec_run(["touch", "/etc/mine"]).exit_code != 0
        assert container.exec_run(["sh", "-c", "command -v gcc cc make"]).exit_code != 0


async def test_rest_grpc_and_the_command_line_say_the_same(compose: Compose, channel: grpc.aio.Channel) -> None:
    """One prompt with one seed, asked in three ways."""
    async with AsyncClient(compose.address(50050), timeout_s=PATIENCE_S) as client:
        text = (await client.generate(PROMPT, max_tokens=24, temperature=0.8, seed=5).result()).text
    body = {"model": "target", "prompt": PROMPT, "max_tokens": 24, "temperature": 0.8, "seed": 5}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as rest:
        answer = await rest.post(f"http://{compose.address(8080)}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == text
    words = [str(Path(sys.executable).with_name("outrider")), "generate", PROMPT, "--address", compose.address(50050)]
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


@pytest.mark.parametrize("fault", ["killed", "disconnected"])
async def test_a_gateway_comes_back(compose: Compose, channel: grpc.aio.Channel, fault: str) -> None:
    """Its streams break with a sentence, after tokens that were right; asked again it says the same."""
    harm, mend = FAULTS[fault]
    expected = await said(channel)
    (container,) = compose.containers("gateway")
    async with Load(channel) as load:
        await load.begun()
        await asyncio.to_thread(harm, compose, container)
        ends = await load.ended() if fault == "killed" else []
        for request, end, token_ids in zip(load.requests, ends, expected, strict=False):
            assert isinstance(end, PeerLost)
            assert token_ids[: len(request.token_ids)] == request.token_ids
        await asyncio.to_thread(mend, compose, container)
    async with open_channel(compose.address(50050)) as again:
        await until_health(again, "SERVING")
        assert await said(again) == expected
