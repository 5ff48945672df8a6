"""Weights of models that transformers computes: how files may name them, and what they are in memory."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.engine_cases import fresh, random_ids
from support.models.tiny_models import write_tiny_model
from torch import Tensor

from outrider.engine.runner import ModelRunner


def logits_of(folder: Path, dtype: str = "float32") -> Tensor:
    """Logits after a short text."""
    runner = ModelRunner.load(str(folder), dtype=dtype, kv_tokens=64)
    return fresh(runner, random_ids(9, vocab_size=300))[0]


def rename(folder: Path, prefix: str, extra: dict[str, Tensor]) -> Path:
    """Writes the weights without a prefix of their names, and with something besides."""
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name.removeprefix(prefix): tensor for name, tensor in tensors.items()} | extra, folder / "model.safetensors"
    )
    return folder


def test_names_without_the_base_model_and_old_buffers_are_known(tmp_path: Path) -> None:
    """The files of GPT-2 as they were published: `h.0...` instead of `transformer.h.0...`, and masks beside them."""
    folder = write_tiny_model(tmp_path / "tiny", "gpt2", seed=3)
    expected = logits_of(folder)
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(2)}
    assert torch.equal(logits_of(rename(folder, "transformer.", masks)), expected)


def test_a_file_that_asks_for_tuples_changes_nothing(tmp_path: Path) -> None:
    """transformers returns tuples then, without names."""
    folder = write_tiny_model(tmp_path / "tiny", "gpt2", seed=3)
    expected = logits_of(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"return_dict": False}))
    assert torch.equal(logits_of(folder), expected)


def test_an_index_beside_the_single_file_changes_nothing(tmp_path: Path) -> None:
    """All weights are of the file that transformers reads, and none of those that were left over."""
    folder = write_tiny_model(tmp_path / "tiny", "gpt2", seed=3)
    expected = logits_of(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, folder / "old.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "old.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits_of(folder), expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["olmo2", "mixtral"])
def test_shards_load_like_one_file(tmp_path: Path, family: str) -> None:
    """Experts that lie in different files are put together."""
    one = write_tiny_model(tmp_path / "one", family, seed=3)
    many = write_tiny_model(tmp_path / "many", family, seed=3, max_shard_size="60KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(one), logits_of(many))


@pytest.mark.slow
def test_a_tied_head_may_be_stored_all_the_same(tmp_path: Path) -> None:
    """With the embedding's numbers it is the embedding, and its size is not counted twice."""
    folder = write_tiny_model(tmp_path / "tiny", "gpt2", seed=3)
    expected = logits_of(folder)
    size = sum(weight.numel() for weight in ModelRunner.load(str(folder), kv_tokens=64).model.weights)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["transformer.wte.weight"].clone()}, folder / "model.safetensors")
    runner = ModelRunner.load(str(folder), kv_tokens=64)
    assert sum(weight.numel() for weight in runner.model.weights) == size
    assert torch.equal(logits_of(folder), expected)


def test_norms_and_biases_are_never_rounded(tmp_path: Path) -> None:
    """With bfloat16 matrices too they are those of the file, transposed layers included."""
    folder = write_tiny_model(tmp_path / "tiny", "gpt2", seed=3)
    stored = load_file(folder / "model.safetensors")
    weights = ModelRunner.load(str(folder), kv_tokens=64).model.weights
    for name in ("transformer.h.1.ln_1.weight", "transformer.h.0.attn.c_attn.bias"):
        assert any(weight.shape == stored[name].shape and torch.equal(weight, stored[name]) for weight in weights)
    matrix = stored["transformer.h.0.attn.c_attn.weight"].t().bfloat16()
    assert any(weight.shape == matrix.shape and torch.equal(weight, matrix) for weight in weights)


def test_bfloat16_files_in_float32_hold_the_same_numbers(tmp_path: Path) -> None:
    """Files of half the size, read in either type, differ in nothing that is stored."""
    folder = write_tiny_model(tmp_path / "tiny", "olmo2", dtype=torch.bfloat16)
    wide, narrow = (ModelRunner.load(str(folder), dtype=dtype, kv_tokens=64) for dtype in ("float32", "bfloat16"))
    for first, second in zip(wide.model.weights, narrow.model.weights, strict=True):
        assert torch.equal(first, second.float())


def test_loaded_weights_do_not_change_with_the_file(tmp_path: Path) -> None:
    """Overwriting the file under a running service changes no weight."""
    folder = write_tiny_model(tmp_path / "tiny", "olmo2")
    weights = ModelRunner.load(str(folder), dtype="float32", kv_tokens=64).model.weights
    before = [weight.clone() for weight in weights]
    file = folder / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(-5000, 2)
        stream.write(bytes(5000))
    assert all(torch.equal(*pair) for pair in zip(weights, before, strict=True))


def test_nothing_is_said_on_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A service's stderr is one line of JSON for each event."""
    folder = write_tiny_model(tmp_path / "tiny", "gpt2")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token_id": 50256}))
    capfd.readouterr()
    ModelRunner.load(str(folder), kv_tokens=64)
    assert capfd.readouterr() == ("", "")
