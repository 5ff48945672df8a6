"""A tiny target for tests without a server, and the embedded one with a server on a free port."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from support.basics import check_empty
from support.models.tiny_models import SETTINGS, write_tiny_model
from support.services.session_clients import TargetClient, channel_to
from support.services.stepped_target import VOCABULARY_SIZE, Target

from outrider.engine.runner import ModelRunner
from outrider.model_service.server import LoadedModel, RunningModelService, load_model
from target_service.server import start_with


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("tiny") / "model", "llama", vocab_size=VOCABULARY_SIZE, context_len=640
    )


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return ModelRunner.load(str(folder), dtype="float32", kv_tokens=4096)


@pytest.fixture
def target(runner: ModelRunner) -> Iterator[Target]:
    made = Target(runner)
    yield made
    made.table.clear()
    check_empty(runner.pool)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(SETTINGS)


@pytest.fixture
async def service(model: LoadedModel) -> AsyncIterator[RunningModelService]:
    running = await start_with(model, SETTINGS)
    yield running
    await running.stop(0)
    check_empty(running.runner.pool)


@pytest.fixture
async def channel(service: RunningModelService) -> AsyncIterator[grpc.aio.Channel]:
    async with channel_to(service.address) as opened:
        yield opened


@pytest.fixture
def client(channel: grpc.aio.Channel) -> TargetClient:
    return TargetClient(channel)
