"""Rotary scalings and sliding windows against transformers: tiny random models, in float32 up to its rounding."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.models.model_cases import ORIGINAL_LEN, SCALINGS, THETA, WINDOWS, respell, worst_difference
from support.models.tiny_models import write_tiny_model

from outrider.engine.batching import RowPlan
from outrider.engine.models import rope

FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]
SPELLINGS = ["new", "old"]
# A model that is blind to positions and windows would agree with one that is not.
FAR = 100


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products are done before a second thread has woken up."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def scaled_model(folder: Path, family: str, scaling: str, spelling: str = "new") -> Path:
    """A tiny model of 64 original positions, of which "max_position_embeddings" are those or the scaled ones."""
    context_len = 256 if scaling == "llama3" else ORIGINAL_LEN
    parameters = {"rope_theta": THETA, **SCALINGS[scaling]}
    write_tiny_model(folder, family, seed=7, context_len=context_len, rope_parameters=parameters)
    if spelling == "old":
        respell(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("scaling", [name for name in SCALINGS if name != "dynamic"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scaled_positions_agree_with_transformers(tmp_path: Path, family: str, scaling: str, spelling: str) -> None:
    """Every family with every scaling in both spellings, across the end of the original context."""
    folder = scaled_model(tmp_path / "model", family, scaling, spelling)
    assert worst_difference(folder, length=150, prompt_len=60) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_dynamic_positions_agree_with_transformers_step_by_step(tmp_path: Path, family: str, spelling: str) -> None:
    """A prompt within the original context, then token by token with transformers' cache, far past its end."""
    folder = scaled_model(tmp_path / "model", family, "dynamic", spelling)
    assert worst_difference(folder, length=150, prompt_len=60, stepped=True) <= 1


def test_long_prompts_of_dynamic_models_differ_from_transformers(tmp_path: Path) -> None:
    """There one length turns all rows of a forward; ours turn by their own positions (docs/decisions/models/0009)."""
    folder = scaled_model(tmp_path / "model", "llama", "dynamic")
    assert worst_difference(folder, length=150, prompt_len=60) > FAR


@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_scaling_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scaling: str) -> None:
    """The check finds a model whose scaling is left out."""
    folder = scaled_model(tmp_path / "model", "llama", scaling)
    kind = {"linear": rope.LinearRope, "llama3": rope.Llama3Rope, "dynamic": rope.DynamicRope}.get(scaling)
    monkeypatch.setattr(kind or rope.YarnRope, "frequencies", rope.Rope.frequencies)
    assert worst_difference(folder, length=150, prompt_len=60, stepped=scaling == "dynamic") > FAR


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_agree_with_transformers(tmp_path: Path, name: str) -> None:
    """Windows shorter than the prompt, in all layers and in some."""
    family, overrides = WINDOWS[name]
    assert worst_difference(write_tiny_model(tmp_path / "model", family, seed=7, **overrides)) <= 1


@pytest.mark.parametrize("error", [-1, 1])
@pytest.mark.parametrize("name", [name for name in WINDOWS if name != "mistral-1"])
def test_a_window_off_by_one_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: int) -> None:
    """One position more or less than transformers' mask shows does not pass."""
    whole = RowPlan.windowed

    def windowed(self: RowPlan, window: int | None) -> RowPlan:
        return whole(self, window and window + error)

    monkeypatch.setattr(RowPlan, "windowed", windowed)
    family, overrides = WINDOWS[name]
    assert worst_difference(write_tiny_model(tmp_path / "model", family, seed=7, **overrides)) > 10


def test_a_scaling_and_a_window_together(tmp_path: Path) -> None:
    """Neither knows of the other."""
    overrides = {"sliding_window": 20, "rope_parameters": {"rope_theta": THETA, **SCALINGS["yarn"]}}
    folder = write_tiny_model(tmp_path / "model", "mistral", seed=7, context_len=ORIGINAL_LEN, **overrides)
    assert worst_difference(folder, length=150, prompt_len=60) <= 1


def test_a_smollm_shape(tmp_path: Path) -> None:
    """SmolLM2 is a Llama: three query heads for each key-value head, tied embeddings, a theta of 100,000."""
    heads = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
    rope_parameters = {"rope_type": "default", "rope_theta": 100_000.0}
    overrides = {**heads, "tie_word_embeddings": True, "rope_parameters": rope_parameters}
    assert worst_difference(write_tiny_model(tmp_path / "model", "llama", seed=7, **overrides)) <= 1
