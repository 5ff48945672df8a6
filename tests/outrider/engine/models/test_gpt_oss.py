"""gpt-oss: sinks, windows in alternate layers, biases, untruncated YaRN and clamped experts, against transformers."""

from json import dumps
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from support.models.engine_cases import close, decoded, finish, random_ids
from support.models.model_cases import worst_difference
from support.models.tiny_gguf import write_gguf
from support.models.tiny_models import write_tiny_model

from outrider.engine.batching import Feed
from outrider.engine.models.config import ModelConfig
from outrider.engine.models.weights import load_tensors
from outrider.engine.runner import ModelRunner
from outrider.errors import ModelRefused

# No key of GGUF says another.
RELEASED: dict[str, Any] = {"swiglu_limit": 7.0}
# Widths that blocks of MXFP4 divide.
WHOLE_BLOCKS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def logits_of(model: Path, dtype: str, token_ids: list[int]) -> torch.Tensor:
    """Logits of all positions, decoded one by one, after the same rows at once gave the same bits."""
    runner = ModelRunner.load(str(model), dtype=dtype, kv_tokens=1024)
    steps = decoded(runner, token_ids, 1)
    session = runner.open(token_ids, 1)
    last = finish(runner, Feed(session))[0][-1]
    assert torch.equal(last, steps[-1])
    close(runner, session)
    return steps


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    """Past the original positions of YaRN and the windows, decoded and at once, up to the rounding of float32."""
    assert worst_difference(write_tiny_model(tmp_path / "tiny", "gpt_oss", seed=7), 150, 60) <= 1


@pytest.mark.parametrize("tensor", ["self_attn.sinks", "mlp.router.bias", "experts.gate_up_proj_bias", "o_proj.bias"])
def test_each_part_counts(tmp_path: Path, tensor: str) -> None:
    """A part that nothing read would not be missed: with it at nought the logits are others."""
    folder, ids = write_tiny_model(tmp_path / "tiny", "gpt_oss", seed=7), random_ids(40, vocab_size=300)
    before = logits_of(folder, "float32", ids)
    tensors = load_file(folder / "model.safetensors")
    changed = {name: torch.zeros_like(each) if tensor in name else each for name, each in tensors.items()}
    save_file(changed, folder / "model.safetensors")
    assert float((logits_of(folder, "float32", ids) - before).abs().max()) > 1e-3


def test_a_gguf_file_has_the_same_model(tmp_path: Path) -> None:
    """Names, biases, experts and keys of the format: bit for bit the logits of the folder."""
    folder, ids = write_tiny_model(tmp_path / "tiny", "gpt_oss", seed=7, **RELEASED), random_ids(90, vocab_size=300)
    file = write_gguf(folder, tmp_path / "tiny.gguf")
    assert torch.equal(logits_of(file, "float32", ids), logits_of(folder, "float32", ids))


def test_experts_of_a_file_stay_in_mxfp4(tmp_path: Path) -> None:
    """As the released files have them: near the same numbers in float32, and far fewer bytes."""
    folder = write_tiny_model(tmp_path / "tiny", "gpt_oss", seed=7, **RELEASED, **WHOLE_BLOCKS)
    file = write_gguf(folder, tmp_path / "tiny.gguf", GGMLQuantizationType.MXFP4)
    small, wide = (ModelRunner.load(str(file), dtype=dtype, kv_tokens=256).model for dtype in ("file", "float32"))
    few, many = (sum(weight.nbytes for weight in model.weights) for model in (small, wide))
    assert few < many / 4
    ids = random_ids(40, vocab_size=300)
    exact, found = logits_of(file, "float32", ids), logits_of(file, "file", ids)
    assert float((found - exact).norm() / exact.norm()) < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_biases_of_experts_keep_their_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    """In float32 whatever the type of matrices is, gate and up apart."""
    folder = write_tiny_model(tmp_path / "tiny", "gpt_oss", seed=7)
    stored = load_file(folder / "model.safetensors")["model.layers.1.mlp.experts.gate_up_proj_bias"]
    found = load_tensors(folder, ModelConfig.read(folder), torch.device("cpu"), dtype)[0]
    for kind, first in (("gate", 0), ("up", 1)):
        own = found[f"model.layers.1.mlp.experts.{kind}_proj.bias"]
        assert torch.equal(own, stored[:, first::2])


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ({"num_local_experts": 5000}, "num_local_experts"),
        ({"swiglu_limit": -1.0}, "swiglu_limit"),
        ({"sliding_window": None}, "sliding_window"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
    ],
)
def test_keys_that_are_not_served_are_named(tmp_path: Path, keys: dict[str, Any], name: str) -> None:
    """Numbers out of range, layers with a window of no size, and released blocks, which are read from GGUF alone."""
    folder = write_tiny_model(tmp_path / "tiny", "gpt_oss")
    path = folder / "config.json"
    path.write_text(
        path.read_text().rstrip().removesuffix("}") + "".join(f', "{k}": {dumps(v)}' for k, v in keys.items()) + "}"
    )
    with pytest.raises(ModelRefused, match=name):
        ModelConfig.read(folder)
