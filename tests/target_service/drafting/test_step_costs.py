"""Costs of a head's steps that a target measures before it serves."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.basics import check_empty
from support.heads.heads import random_head
from support.heads.kangaroo import write_kangaroo
from support.heads.tiny_chains import CHAINS, VOCAB, write_chain
from support.models.layers import write_layered_model
from support.models.tiny_models import write_tiny_model
from support.services.stepped_target import VOCABULARY_SIZE

from outrider.drafters.hosted import host_head
from outrider.engine.runner import ModelRunner
from outrider.parameters import SamplingParameters
from target_service.server import load_head
from target_service.step_costs import measure_steps

PATIENT_S = 600.0


@pytest.fixture
def target(folder: Path) -> ModelRunner:
    return ModelRunner.load(str(folder), dtype="float32", kv_tokens=8192)


def test_steps_of_a_feature_head_are_measured_by_their_rows(target: ModelRunner) -> None:
    """One row of each session; nothing stays."""
    head = host_head(target, random_head(target), "")
    found = measure_steps(head, target, SamplingParameters(), PATIENT_S)
    assert list(found) == [1, 2, 4, 8, 16, 32]
    assert all(us >= 1 for us in found.values())
    assert target.forward_counts.num_rows == 0
    check_empty(target.pool)
    assert head.runner is not None
    check_empty(head.runner.pool)


def kangaroo(folder: Path) -> tuple[Path, Path]:
    return write_layered_model(folder / "model"), write_kangaroo(folder / "head", VOCABULARY_SIZE)


def medusa(folder: Path) -> tuple[Path, Path]:
    model = write_tiny_model(folder / "model", "llama", vocab_size=VOCAB)
    return model, write_chain(folder / "head", CHAINS["medusa"]())


@pytest.mark.parametrize("write", [kangaroo, medusa])
def test_steps_of_other_heads_are_measured_too(tmp_path: Path, write: Callable[[Path], tuple[Path, Path]]) -> None:
    """Of a chain of heads, and of an adapter with the target's lower layers below it."""
    model, folder = write(tmp_path)
    target = ModelRunner.load(str(model), dtype="float32", kv_tokens=8192)
    head = load_head(target, str(folder), "float32")
    found = measure_steps(head, target, SamplingParameters(), PATIENT_S)
    assert list(found) == [1, 2, 4, 8, 16, 32]
    check_empty(target.pool)


def test_it_ends_where_cache_or_time_do(folder: Path, target: ModelRunner) -> None:
    """A small cache has room for few sessions, and without time nothing is measured."""
    assert measure_steps(host_head(target, random_head(target), ""), target, SamplingParameters(), 0.0) == {}
    small = ModelRunner.load(str(folder), dtype="float32", kv_tokens=64)
    found = measure_steps(host_head(small, random_head(small), ""), small, SamplingParameters(), PATIENT_S)
    assert max(found) == 2
