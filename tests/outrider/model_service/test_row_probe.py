"""The probe of row invariance on a tiny model: it finds nothing where there is nothing, and a planted fault."""

from pathlib import Path

import pytest
from support.models.tiny_models import write_tiny_model
from torch import Tensor

from outrider.engine import ops
from outrider.engine.runner import ModelRunner
from outrider.model_service import row_probe
from outrider.model_service.row_probe import Comparison, compare, engine_facts, weight_speed

ROWS = {"a row alone and in a batch": 72, "prefill and decoding": 24, "a proposal and plain decoding": 9}


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    write_tiny_model(tmp_path, "llama")
    return ModelRunner.load(str(tmp_path), num_threads=2, kv_tokens=4096)


def test_rows_of_our_engine_are_independent(runner: ModelRunner) -> None:
    """Every row of every comparison has the same bits, and no block stays taken."""
    assert compare(runner) == [Comparison(name, rows, rows) for name, rows in ROWS.items()]
    assert runner.pool.num_used == 0


def test_a_planted_dependence_is_found(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that give single rows other low bits than rows of a batch."""
    forward = type(runner.model).forward

    def careless(model: object, plan: object, cache: object, wanted: Tensor) -> Tensor:
        logits: Tensor = forward(model, plan, cache, wanted)  # type: ignore[arg-type]
        return logits * (1 + 1e-6) if len(logits) == 1 else logits

    monkeypatch.setattr(type(runner.model), "forward", careless)
    found = {each.name: each.equal_rows for each in compare(runner)}
    assert found["prefill and decoding"] < ROWS["prefill and decoding"]
    assert found["a proposal and plain decoding"] < ROWS["a proposal and plain decoding"]


def test_the_speed_of_weights_is_that_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes a second, by products that read a matrix; nothing where no kernels are built."""
    monkeypatch.setattr(row_probe, "SPEED_OUTPUTS", 64)
    speed = weight_speed(1)
    assert speed is not None
    assert speed > 1e6
    monkeypatch.setattr(ops, "load_kernels", lambda: None)
    assert weight_speed(1) is None


def test_facts_without_a_model() -> None:
    """What computes here, as plain values."""
    facts = engine_facts()
    host = {"torch", "torch_threads", "kernels", "processor_levels"}
    assert host | {"cuda", "cuda_runtime", "cuda_seen", "triton", "triton_missing"} == set(facts)
