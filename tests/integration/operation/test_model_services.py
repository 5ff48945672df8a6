"""Tests of draft and target service as processes: their flags, their line on stdout, their ends."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.basics import PATIENCE_S
from support.models.tiny_models import TARGET, write_tiny_model
from support.services.session_clients import DraftClient, TargetClient, channel_to

from outrider.process.children import Launch, ServiceProcess

Start = Callable[..., "asyncio.Future[ServiceProcess]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "llama", vocab_size=257)


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts services on free ports, and ends what is left of them."""
    started: list[ServiceProcess] = []

    async def run(role: str, *flags: str) -> ServiceProcess:
        launch = Launch(role, (sys.executable, "-m", f"{role}_service", *flags))
        started.append(await ServiceProcess.start(launch, lambda _line: None))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        await process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("role", ["draft", "target"])
async def test_a_service_serves_and_stops_with_its_parent(role: str, folder: Path, start: Start) -> None:
    """It says where it listens, is healthy, knows what its flags said, and ends with 0 when stdin does."""
    process = await start(role, "--model", str(folder), "--threads", "2", "--dtype", "float32", "--kv-tokens", "1600")
    async with channel_to(process.address) as channel:
        client = (DraftClient if role == "draft" else TargetClient)(channel)
        info = await client.info()
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert (info.thread_count, info.weight_dtype, info.block_count) == (2, "float32", 100)
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert await process.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--model", "does-not-exist/at-all/here"], 78, "does-not-exist"),
        (["--dtype", "int3", "--model", "x"], 64, "int3"),
        ([], 64, "--model"),
        (["--model", str(TARGET), "--listen", "127.0.0.1:99999"], 64, "HOST:PORT"),
        (["--model", str(TARGET), "--device", "cuda:99"], 64, "device"),
    ],
)
async def test_what_cannot_be_served_is_one_sentence(flags: list[str], code: int, words: str) -> None:
    """With an exit code that says whose fault it is, and nothing on stdout."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "target_service", *flags)
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert (process.returncode, out) == (code, b"")
    assert words in err.decode()
