"""gpt-oss: sinks, windows in alternate layers, biases, untruncated YaRN and clamped experts, against transformers."""

from collections.abc import Callable
from json import dumps, loads
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from safetensors.torch import load_file, save_file
from support.models.engine_cases import close, decoded, finish, native, random_ids
from support.models.model_cases import worst_difference
from support.models.tiny_gguf import Metadata, Tensors, tensors_of, write_gguf
from support.models.tiny_models import write_tiny_model
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from outrider.cli.doctor.weights import Weights
from outrider.engine.batching import Feed
from outrider.engine.models.config import ModelConfig
from outrider.engine.models.weights import load_tensors
from outrider.engine.ops.blocks import BlockMatrix
from outrider.engine.ops.native import NativeOps
from outrider.engine.runner import ModelRunner
from outrider.errors import ModelRefused

BF16, MXFP4 = GGMLQuantizationType.BF16, GGMLQuantizationType.MXFP4
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
        ({"quantization_config": {"quant_method": "gptq"}}, "only unquantized weights and mxfp4 are served"),
    ],
)
def test_keys_that_are_not_served_are_named(tmp_path: Path, keys: dict[str, Any], name: str) -> None:
    """Numbers out of range, layers with a window of no size, and other blocks than the released ones."""
    folder = write_tiny_model(tmp_path / "tiny", "gpt_oss")
    path = folder / "config.json"
    path.write_text(
        path.read_text().rstrip().removesuffix("}") + "".join(f', "{k}": {dumps(v)}' for k, v in keys.items()) + "}"
    )
    with pytest.raises(ModelRefused, match=name):
        ModelConfig.read(folder)


def released(folder: Path, least: int = 118, most: int = 126) -> Path:
    """A tiny model with experts as OpenAI released them: random blocks, and powers of two between these."""
    write_tiny_model(folder, "gpt_oss", seed=7, dtype=torch.bfloat16, **RELEASED, **WHOLE_BLOCKS)
    tensors, numbers = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "experts.down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        shape = count, outputs, inputs // 32
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=numbers, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(least, most + 1, shape, generator=numbers, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    config = loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(dumps(config))
    return folder


def as_transformers_dequantises(folder: Path, to: Path, dtype: torch.dtype) -> Path:
    """The same model, dequantised by transformers."""
    copytree(folder, to)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        stem = name.removesuffix("_blocks")
        tensors[stem] = convert_moe_packed_tensors(tensors.pop(name), tensors.pop(f"{stem}_scales"), dtype=dtype)
    save_file(tensors, to / "model.safetensors")
    return to


def loaded(folder: Path, dtype: torch.dtype, native: NativeOps | None = None) -> dict[str, Any]:
    return load_tensors(folder, ModelConfig.read(folder), torch.device("cpu"), dtype, native=native)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_released_blocks_are_the_numbers_of_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    """All tensors, those of experts in their own order too."""
    folder = released(tmp_path / "model")
    other = loaded(as_transformers_dequantises(folder, tmp_path / "other", dtype), dtype)
    found = loaded(folder, dtype)
    assert found.keys() == other.keys()
    assert all(torch.equal(found[name], other[name]) and found[name].dtype == other[name].dtype for name in other)


def test_released_blocks_keep_their_bits(tmp_path: Path) -> None:
    """On CPUs by default, for all powers of two that there are: in blocks, which stand for exactly the same numbers."""
    folder = released(tmp_path / "model", 0, 252)
    other = loaded(as_transformers_dequantises(folder, tmp_path / "other", torch.float32), torch.float32)
    found = loaded(folder, torch.bfloat16, native())
    packed = {name: each for name, each in found.items() if isinstance(each, BlockMatrix)}
    assert [each.kind for each in packed.values()] == ["MXFP4"] * 6
    assert all(torch.equal(each.unpack(), other[name]) for name, each in packed.items())
    with_blocks = ModelRunner.load(str(folder), dtype="auto", kv_tokens=64)
    assert with_blocks.identity.dtype == "file"
    said, size = Weights.of_folder(folder, loads((folder / "config.json").read_text())), 0
    for runner in (with_blocks, ModelRunner.load(str(folder), dtype="bfloat16", kv_tokens=64)):
        size = sum(each.nbytes for each in runner.model.weights)
        assert said.memory_bytes(runner.identity.dtype) == pytest.approx(size, rel=0.05)
    assert said.count == pytest.approx(size / 2, rel=0.05)


def test_released_blocks_say_what_a_gguf_file_says(tmp_path: Path) -> None:
    """With the same numbers in both, bit for bit; and int8 is made of the numbers that they stand for."""

    def only_experts(_: Metadata, tensors: Tensors) -> None:
        for name, (array, _) in tensors_of(wide, GGMLQuantizationType.F32).items():
            if tensors[name][1] == MXFP4 and "_exps" not in name:
                tensors[name] = quantize(array, BF16), BF16

    folder, ids = released(tmp_path / "model"), random_ids(40, vocab_size=300)
    wide = as_transformers_dequantises(folder, tmp_path / "wide", torch.bfloat16)
    file = write_gguf(wide, tmp_path / "model.gguf", MXFP4, edit=only_experts)
    assert torch.equal(logits_of(folder, "file", ids), logits_of(file, "file", ids))
    for dtype in ("int8", "bfloat16"):
        assert torch.equal(logits_of(folder, dtype, ids), logits_of(wide, dtype, ids))


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


STEM = "model.layers.1.mlp.experts.down_proj"
BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "lacks scales": (without(f"{STEM}_scales"), f"lacks the tensor {STEM}_scales"),
    "scales of another type": (
        lambda tensors: tensors.update({f"{STEM}_scales": tensors[f"{STEM}_scales"].int()}),
        f"{STEM}_scales has the type I32, but must have one of U8",
    ),
    "blocks of another shape": (
        lambda tensors: tensors.update({f"{STEM}_blocks": tensors[f"{STEM}_blocks"].flatten(2)}),
        f"{STEM}_blocks has the shape [6, 64, 48], but config.json asks for [6, 64, 3, 16]",
    ),
    "a scale that is no number": (
        lambda tensors: tensors[f"{STEM}_scales"].fill_(255),
        f"{STEM}_scales holds 255, but a power of two must be at most 252",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_released_blocks_that_do_not_fit_are_refused(tmp_path: Path, fault: str) -> None:
    """By the tensor's name, in every type."""
    folder, (change, words) = released(tmp_path / "model"), BROKEN[fault]
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    for dtype in ("file", "bfloat16"):
        with pytest.raises(ModelRefused) as caught:
            ModelRunner.load(str(folder), dtype=dtype, kv_tokens=64)
        assert words in caught.value.message
