"""The transformer against transformers' modelling code: tiny random models of each family, and the embedded pair."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import TARGET, write_tiny_model
from torch import Tensor

from outrider.engine.model import rotary_tables
from outrider.engine.model_config import ModelConfig
from outrider.engine.runner import Feed, ModelRunner
from outrider.engine.tree import TokenTree

TOLERANCE = 1e-4
BIASED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", BIASED),
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen3", {"max_shard_size": "60KB"}),
    ("mistral", {}),
]


def expected_logits(folder: Path, token_ids: list[int]) -> Tensor:
    """Logits [len(token_ids), V] of transformers in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def random_ids(count: int, vocab_size: int) -> list[int]:
    """Token ids from a fixed seed."""
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(5)).tolist()


def all_logits(runner: ModelRunner, token_ids: list[int], prompt_len: int) -> tuple[Tensor, Tensor]:
    """Logits of the positions from prompt_len - 1 on, decoded one by one, and at once as the rows of a chain."""
    decoded = runner.open(token_ids[:prompt_len], prompt_len)
    steps = [runner.forward([Feed(decoded)]).logits]
    for token_id in token_ids[prompt_len:]:
        decoded.extend([token_id])
        steps.append(runner.forward([Feed(decoded)]).logits)
    chained = runner.open(token_ids[:prompt_len], prompt_len)
    at_once = runner.forward([Feed(chained, TokenTree.chain(token_ids[prompt_len:]))]).logits
    decoded.free()
    chained.free()
    return torch.cat(steps), at_once


def assert_close(folder: Path, length: int = 40, prompt_len: int = 30) -> None:
    """Compares prefill, decoding and a chain with transformers."""
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=1024)
    token_ids = random_ids(length, runner.config.vocab_size)
    expected = expected_logits(folder, token_ids)[prompt_len - 1 :]
    for logits in all_logits(runner, token_ids, prompt_len):
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_tiny_models_agree_with_transformers(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    """Logits within 1e-4 in float32, for prompt, single steps and a chain."""
    assert_close(write_tiny_model(tmp_path / "model", family, seed=11, **overrides))


@pytest.mark.parametrize("name", ["target", "draft"])
def test_embedded_pair_agrees_with_transformers(name: str) -> None:
    """The pair's bfloat16 weights, widened to float32."""
    assert_close(TARGET.parent / name, length=120, prompt_len=100)


def test_old_rotary_keys_give_the_same_logits(tmp_path: Path) -> None:
    """A file of transformers 4 with `rope_theta` is read like its successor."""
    folder = write_tiny_model(
        tmp_path / "model", "llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_parameters"]["rope_theta"] == 500.0
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    (folder / "config.json").write_text(json.dumps(old | {"rope_theta": 500.0, "rope_scaling": None}))
    assert_close(folder)


def test_a_wrong_bias_would_be_noticed(tmp_path: Path) -> None:
    """The tolerance is tight enough: zeroing one bias vector of a tiny model exceeds it."""
    folder = write_tiny_model(tmp_path / "model", "qwen2", seed=11)
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=1024)
    token_ids = random_ids(40, 300)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.0.self_attn.k_proj.bias": torch.zeros(24)}, folder / "model.safetensors")
    decoded, _ = all_logits(runner, token_ids, 30)
    assert (decoded - expected_logits(folder, token_ids)[29:]).abs().max() > 10 * TOLERANCE


def test_rotary_tables_are_those_of_transformers() -> None:
    """Bit for bit, at every position of the context."""
    config = ModelConfig.read(TARGET)
    embedding = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
        transformers.AutoConfig.from_pretrained(TARGET)
    )
    expected = embedding(torch.zeros(1), torch.arange(config.context_len)[None])
    for ours, theirs in zip(rotary_tables(config, torch.device("cpu")), expected, strict=True):
        assert ours.shape == (config.context_len, config.head_dim // 2)
        assert torch.equal(torch.cat((ours, ours), dim=-1), theirs[0])


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
