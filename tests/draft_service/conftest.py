"""A tiny model and a draft over it, for tests without a server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.basics import check_empty
from support.models.tiny_models import write_tiny_model
from support.services.stepped_draft import CONTEXT_LEN, Draft

from outrider.engine.runner import ModelRunner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "qwen3", vocab_size=257, context_len=CONTEXT_LEN)


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return ModelRunner.load(str(folder), dtype="float32", kv_tokens=2048)


@pytest.fixture
def draft(runner: ModelRunner) -> Iterator[Draft]:
    made = Draft(runner)
    yield made
    made.table.clear()
    check_empty(runner.pool)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = write_tiny_model(
        tmp_path_factory.mktemp("smaller") / "model", "llama", vocab_size=257, context_len=CONTEXT_LEN, seed=3
    )
    return ModelRunner.load(str(folder), dtype="float32", kv_tokens=2048)


@pytest.fixture(scope="module")
def twin(folder: Path) -> ModelRunner:
    """The draft's own weights once more."""
    return ModelRunner.load(str(folder), dtype="float32", kv_tokens=2048)
