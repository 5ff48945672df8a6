"""A tiny target with a server on a free port."""

from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest
from support.basics import check_empty
from support.models.tiny_models import SETTINGS, write_tiny_model
from support.services.session_clients import TargetClient, channel_to

from outrider.model_service.server import LoadedModel, RunningModelService, load_model
from target_service.server import start_with


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny") / "m", "llama", vocab_size=257, context_len=640)
    return load_model(replace(SETTINGS, model=str(folder), dtype="float32"))


@pytest.fixture
async def service(model: LoadedModel) -> AsyncIterator[RunningModelService]:
    # What one test says must not shorten what another one computes.
    running = await start_with(model, replace(SETTINGS, prefix_cache=False))
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
