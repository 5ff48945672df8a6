"""Models whose matrices stay as a GGUF file has them, in mixes of types: logits, rows, memory, and what is refused."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.engine_cases import native
from support.models.gguf_blocks import FORMS
from support.models.model_cases import all_logits, random_ids
from support.models.tiny_gguf import DYNAMIC, MIXES, Metadata, Tensors, write_gguf
from support.models.tiny_models import write_tiny_model

from outrider.engine.models.config import ModelConfig
from outrider.engine.models.gguf import load_gguf, read_config
from outrider.engine.models.transformer import Transformer
from outrider.engine.ops.blocks import BlockMatrix, parts_of, unpacked
from outrider.engine.runner import ModelRunner
from outrider.errors import InvalidRequest, ModelRefused
from outrider.model_files.gguf.header import BLOCK_DTYPES, GgufFile

CPU = torch.device("cpu")
# Of a K type's width, but for one matrix, which has types of 32.
SIZES = {"hidden_size": 256, "intermediate_size": 352, "head_dim": 64, "context_len": 256}
QUICK: list[tuple[str, str, dict[str, Any]]] = [
    ("Q4_K_M", "llama", {"tie_word_embeddings": True}),
    (DYNAMIC, "llama", {}),
    (DYNAMIC, "qwen3_moe", {"moe_intermediate_size": 352}),
    ("Q4_K_M", "qwen3_moe", {"moe_intermediate_size": 256}),
]
OTHERS: list[tuple[str, str, dict[str, Any]]] = [
    *((mix, "llama", {}) for mix in MIXES),
    (DYNAMIC, "qwen2", {"tie_word_embeddings": True}),
    (DYNAMIC, "qwen3", {}),
    ("Q4_K_M", "mistral", {"sliding_window": 20}),
    *((kind, "llama", {"intermediate_size": 512}) for kind in FORMS),
]
MODELS = [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)]
IDS = random_ids(48, 300)


def written(folder: Path, mix: str, family: str, overrides: dict[str, Any]) -> Path:
    """A tiny model's file; skips where nothing could read its blocks."""
    native()
    model = write_tiny_model(folder / "tiny", family, seed=5, **{**SIZES, **overrides})
    return write_gguf(model, folder / "tiny.gguf", mix)


def loaded(file: Path, dtype: str = "file") -> ModelRunner:
    """A runner, with a cache for three sessions."""
    return ModelRunner.load(str(file), dtype=dtype, num_threads=2, kv_tokens=1024)


@pytest.mark.parametrize(("dtype", "most_lost"), [("file", 0.08), ("file-a15", 1e-3)])
@pytest.mark.parametrize(("mix", "family", "overrides"), MODELS, ids=lambda each: each if isinstance(each, str) else "")
def test_a_files_own_bits_are_served(
    tmp_path: Path, mix: str, family: str, overrides: dict[str, Any], dtype: str, most_lost: float
) -> None:
    """Nothing but the inputs is rounded; a row's bits are its own; the forward in one call is that op by op."""
    file = written(tmp_path, mix, family, overrides)
    runner, exact = loaded(file, dtype), loaded(file, "float32")
    decoded, at_once = all_logits(runner, IDS, 20)
    assert torch.equal(decoded, at_once)
    expected, _ = all_logits(exact, IDS, 20)
    lost, size = (decoded - expected).double().norm(), expected.double().norm()
    assert most_lost / 800 < lost / size < most_lost
    # And the values are the file's, rounded nowhere.
    read = GgufFile.read(file)
    kept, _ = load_gguf(read, read_config(read), CPU, None, native(input_bits=BLOCK_DTYPES[dtype]))
    wide, _ = load_gguf(read, read_config(read), CPU, torch.float32, native())
    assert all(torch.equal(unpacked(kept[name]).float(), unpacked(tensor)) for name, tensor in wide.items())
    assert isinstance(runner.config, ModelConfig)
    runner.model = Transformer(runner.config, kept, native())
    assert torch.equal(all_logits(runner, IDS, 20)[1], decoded)


@pytest.mark.parametrize("mix", ["Q4_K_M", DYNAMIC])
def test_memory_is_that_of_the_file(tmp_path: Path, mix: str) -> None:
    """No matrix becomes bfloat16, none is there twice, and types of four bits and fewer cost what four bits do."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 512, "num_hidden_layers": 4}
    file = written(tmp_path, mix, "llama", sizes)
    runner, read = loaded(file), GgufFile.read(file)
    parts = [part for weight in runner.model.weights for part in parts_of(weight) if len(part.shape) > 1]
    assert all(isinstance(part, BlockMatrix) for part in parts)
    numbers = {name: int(np.prod(place.shape)) for name, place in read.tensors.items() if len(place.shape) > 1}
    # Scales of six bits take bytes, and two and three bits a nibble.
    stored = sum(
        {"Q2_K": 0.65, "Q3_K": 0.5703125}.get(read.tensors[name].type.name, 0) * count
        if read.tensors[name].type.name in ("Q2_K", "Q3_K")
        else read.tensors[name].size
        for name, count in numbers.items()
    )
    assert sum(part.nbytes for part in parts) <= 1.03 * stored
    assert sum(part.numel() for part in parts) == sum(numbers.values())


def test_the_type_is_named_and_is_the_default(tmp_path: Path) -> None:
    """A file with quantised weights is served as it is; its numerics id says so, and other types are other ids."""
    file = written(tmp_path, "Q4_K_M", "llama", {})
    by_default, *others = (loaded(file, dtype).numerics_id for dtype in ("auto", "file-a15", "file", "bfloat16"))
    assert by_default == others[0]
    assert len(set(others)) == 3
    assert [name in others[place] for place, name in enumerate(("cpu-file-a15-native", "cpu-file-native"))] == [
        True
    ] * 2
    plain = write_gguf(tmp_path / "tiny", tmp_path / "plain.gguf")
    assert "cpu-bfloat16-" in loaded(plain, "auto").numerics_id


def test_small_models_get_activations_of_fifteen_bits(tmp_path: Path) -> None:
    """Where nobody asks: up to 500 million parameters, by the file's header."""
    file = GgufFile.read(written(tmp_path, "Q4_K_M", "llama", {}))
    (name, place), *_ = file.tensors.items()
    for count, dtype in ((500_000_000, "file-a15"), (500_000_001, "file")):
        others = sum(prod(each.shape) for each in file.tensors.values() if each is not place)
        grown = file.tensors | {name: replace(place, shape=(1, count - others))}
        assert replace(file, tensors=grown).block_dtype == dtype
    assert GgufFile.read(write_gguf(tmp_path / "tiny", tmp_path / "plain.gguf")).block_dtype == ""


@pytest.mark.parametrize("model", ["tiny", "plain.gguf", "sized:100m"])
def test_what_has_no_blocks_is_refused(tmp_path: Path, model: str) -> None:
    """By name, before anything is loaded."""
    written(tmp_path, "Q4_K_M", "llama", {})
    write_gguf(tmp_path / "tiny", tmp_path / "plain.gguf")
    place = model if model.startswith("sized:") else str(tmp_path / model)
    with pytest.raises((ModelRefused, InvalidRequest), match="dtype is file, which is for GGUF files"):
        loaded(Path(place))


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("name", ["token_embd", "blk.1.attn_v", "output"])
def test_scales_that_are_no_numbers_are_refused(tmp_path: Path, value: float, name: str) -> None:
    """With the file, the tensor and how many there are."""

    def spoil(_: Metadata, tensors: Tensors) -> None:
        stored, kind = tensors[f"{name}.weight"]
        form = FORMS[kind.name]
        assert form.scale is not None
        stored[7, form.scale : form.scale + 2] = np.array([value], "<f2").view(np.uint8)

    model = write_tiny_model(tmp_path / "tiny", "llama", **SIZES)
    file = write_gguf(model, tmp_path / "tiny.gguf", "Q4_K_M", spoil)
    with pytest.raises(ModelRefused, match=rf"tiny\.gguf: the tensor {name}\.weight holds 1 scales that are NaN"):
        loaded(file)


def test_other_types_beside_blocks_keep_their_own(tmp_path: Path) -> None:
    """A matrix in bfloat16 or float32 in a quantised file stays exact."""
    model = write_tiny_model(tmp_path / "tiny", "llama", seed=5, **SIZES)
    whole = write_gguf(model, tmp_path / "whole.gguf")
    stored = {
        name: np.fromfile(place.file, np.float32, int(np.prod(place.shape)), offset=place.offset).reshape(place.shape)
        for name, place in GgufFile.read(whole).tensors.items()
    }

    def mix(_: Metadata, tensors: Tensors) -> None:
        for name in ("blk.0.attn_k.weight", "blk.1.ffn_up.weight", "output.weight"):
            tensors[name] = (stored[name], tensors["output_norm.weight"][1])

    file = write_gguf(model, tmp_path / "tiny.gguf", "Q6_K", mix)
    decoded, at_once = all_logits(loaded(file), IDS, 20)
    assert torch.equal(decoded, at_once)
    expected, _ = all_logits(loaded(file, "float32"), IDS, 20)
    assert (decoded - expected).norm() / expected.norm() < 0.08
