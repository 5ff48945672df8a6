"""The transformer against transformers' modelling code: tiny random models of each family, and the embedded pair."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.model_cases import (
    GEMMA_ROPES,
    PARTIAL,
    SPARSE_STEP,
    all_logits,
    logits_and_reach,
    random_ids,
    reference,
    worst_difference,
)
from support.models.tiny_models import TARGET, write_tiny_model

from outrider.engine.runner import ModelRunner

BIASED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", BIASED),
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen3", {"max_shard_size": "60KB"}),
    ("mistral", {}),
    ("gemma3", {}),
    ("gemma3", GEMMA_ROPES),
    ("gemma3", {"query_pre_attn_scalar": 24, "head_dim": 20, "tie_word_embeddings": False, "attention_bias": True}),
    ("phi3", {}),
    ("phi3", PARTIAL),
    ("phi3", {"sliding_window": None, "num_key_value_heads": 1}),
    ("qwen3_moe", {}),
    ("qwen3_moe", SPARSE_STEP),
]


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_tiny_models_agree_with_transformers(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    """Up to float32's rounding, for prompt, single steps and a chain."""
    assert worst_difference(write_tiny_model(tmp_path / "model", family, seed=11, **overrides)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["target", "draft"])
def test_embedded_pair_agrees_with_transformers(name: str) -> None:
    """The pair's bfloat16 weights, widened to float32."""
    assert worst_difference(TARGET.parent / name, length=120, prompt_len=100) <= 1


# What a small fault of a loader or a kernel would change in a tiny Qwen 2: the tensor, which of it, and by how much.
FAULTS: dict[str, tuple[str, tuple[int, ...], float]] = {
    "a bias left out": ("0.self_attn.k_proj.bias", (), -1.0),
    "one weight off by a twentieth": ("1.mlp.down_proj.weight", (3, 5), 0.05),
    "one gain off by a thousandth": ("0.input_layernorm.weight", (7,), 1e-3),
    "queries off by a ten-thousandth": ("0.self_attn.q_proj.weight", (), 1e-4),
}


@pytest.mark.parametrize(("name", "place", "share"), FAULTS.values(), ids=FAULTS.keys())
def test_a_small_fault_would_be_noticed(tmp_path: Path, name: str, place: tuple[int, ...], share: float) -> None:
    """What rounding may do is so little that a model with one wrong number has not the logits of the right one."""
    folder, token_ids = write_tiny_model(tmp_path / "model", "qwen2", seed=11), random_ids(40, 300)
    expected, limit = logits_and_reach(reference(folder), token_ids, 29)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.{name}"][place] *= 1 + share
    save_file(tensors, folder / "model.safetensors")
    decoded, _ = all_logits(ModelRunner.load(str(folder), dtype="float32", kv_tokens=1024), token_ids, 30)
    assert (decoded - expected).abs().max() > 5 * limit


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the CUDA smoke test needs one")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuda_smoke(dtype: str) -> None:
    """On a GPU the embedded target agrees with itself on the CPU, up to the rounding of the type."""
    token_ids = random_ids(60, 4096)
    device_runner = ModelRunner.load(str(TARGET), device="cuda:0", dtype=dtype, kv_tokens=1024)
    assert device_runner.numerics_id == f"cuda-{dtype}-eager"
    expected, _ = all_logits(ModelRunner.load(str(TARGET), dtype="float32", kv_tokens=1024), token_ids, 50)
    for logits in all_logits(device_runner, token_ids, 50):
        assert logits.device.type == "cuda"
        tolerance = 1e-2 if dtype == "float32" else 0.5
        torch.testing.assert_close(logits.cpu(), expected, atol=tolerance, rtol=0)
