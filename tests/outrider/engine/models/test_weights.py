"""Finding and loading weights: sharded files, types in memory, the digest, and every model that is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.model_cases import all_logits, random_ids
from support.models.tiny_models import TARGET, write_tiny_model
from torch import Tensor

from outrider.engine.models import weights
from outrider.engine.models.config import ModelConfig
from outrider.engine.models.weights import load_tensors, model_hash, resolve, weight_files
from outrider.engine.runner import ModelRunner
from outrider.errors import ModelRefused

CPU = torch.device("cpu")
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of one file."""
    return write_tiny_model(tmp_path_factory.mktemp("original") / "tiny", "llama")


@pytest.fixture
def tiny(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """All tensors of a folder on the CPU."""
    return load_tensors(folder, ModelConfig.read(folder), CPU, dtype)[0]


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    """An index with many files gives the same tensors as one file."""
    one = write_tiny_model(tmp_path / "one", "qwen3", seed=3)
    many = write_tiny_model(tmp_path / "many", "qwen3", seed=3, max_shard_size="60KB")
    assert len(weight_files(many)) > 2
    expected, loaded = load(one), load(many)
    assert expected.keys() == loaded.keys()
    assert all(torch.equal(expected[name], loaded[name]) for name in expected)


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_shards_without_an_index_load_like_one_file(tmp_path: Path, family: str) -> None:
    """They say by their names how many there are, also for a model of transformers' own code."""
    one = write_tiny_model(tmp_path / "one", family)
    shards = write_tiny_model(tmp_path / "shards", family, max_shard_size="60KB")
    (shards / "model.safetensors.index.json").unlink()
    assert len(weight_files(shards)) > 2
    decoded = [
        all_logits(ModelRunner.load(str(folder), dtype="float32", kv_tokens=512), random_ids(20, 300), 12)[0]
        for folder in (one, shards)
    ]
    assert torch.equal(*decoded)


@pytest.mark.parametrize(
    "beginnings", [("model.language_model.", "model.vision_tower."), ("language_model.model.", "vision_tower.")]
)
def test_of_a_model_of_pictures_the_one_of_text_is_read(tmp_path: Path, beginnings: tuple[str, str]) -> None:
    """Under both names that its tensors have had; the tower is left out."""
    alone = write_tiny_model(tmp_path / "alone", "gemma3")
    config, tensors = json.loads((alone / "config.json").read_text()), load_file(alone / "model.safetensors")
    whole = Path(shutil.copytree(alone, tmp_path / "whole"))
    keys = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config, "vision_config": {}}
    (whole / "config.json").write_text(json.dumps(keys))
    renamed = {name.replace("model.", beginnings[0], 1): tensor for name, tensor in tensors.items()}
    save_file(renamed | {f"{beginnings[1]}patch.weight": torch.zeros(3, 3)}, whole / "model.safetensors")
    expected, found = load(alone), load(whole)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert torch.equal(found["model.norm.weight"], tensors["model.norm.weight"] + 1)


def test_a_missing_shard_is_named_without_an_index(tmp_path: Path) -> None:
    """And so is one that is another model's, or left over."""
    folder = write_tiny_model(tmp_path / "shards", "llama", max_shard_size="60KB")
    (folder / "model.safetensors.index.json").unlink()
    files = sorted(folder.glob("*.safetensors"))
    shutil.copy(files[0], folder / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelRefused, match=f"has model-00001-of-00002.safetensors and {files[0].name}, but no model."):
        weight_files(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    files[1].unlink()
    with pytest.raises(ModelRefused, match=f"has no {files[1].name}; what it has is {files[0].name}"):
        resolve(str(folder))


def test_files_of_other_names_are_told(tiny: Path) -> None:
    """What a folder has instead of the model's file."""
    (tiny / "model.safetensors").rename(tiny / "weights.safetensors")
    with pytest.raises(ModelRefused, match=r"has no model\.safetensors; what it has is weights\.safetensors"):
        weight_files(tiny)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_take_the_wanted_type_and_vectors_stay_float32(tiny: Path, dtype: torch.dtype) -> None:
    """float32 files are rounded to bfloat16 on demand; norms and biases never are."""
    stored, loaded = load_file(tiny / "model.safetensors"), load(tiny, dtype)
    for name, tensor in loaded.items():
        assert torch.equal(tensor, stored[name].to(dtype if tensor.ndim > 1 else torch.float32)), name


def test_bfloat16_files_are_widened_exactly() -> None:
    """The embedded pair in float32 holds the numbers of its files."""
    stored, loaded = load_file(TARGET / "model.safetensors"), load(TARGET)
    assert all(tensor.dtype == torch.float32 for tensor in loaded.values())
    assert all(torch.equal(tensor, stored[name].float()) for name, tensor in loaded.items())


def test_loaded_tensors_do_not_change_with_the_file(tiny: Path) -> None:
    """Overwriting the file under a running service changes no weight."""
    loaded = load(tiny)
    before = {name: tensor.clone() for name, tensor in loaded.items()}
    file = tiny / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(-1000, 2)
        stream.write(bytes(1000))
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.items())


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> Path:
    """Rewrites the weights after an edit of the dictionary."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tensors: tensors.pop(NORM), f"lacks the tensor {NORM}"),
        (lambda tensors: tensors.update(stray=torch.zeros(1)), "holds the tensor stray, which config.json"),
        (lambda tensors: tensors.update({NORM: torch.zeros(7)}), f"{NORM} has the shape [7], but config.json asks"),
        (lambda tensors: tensors.update({NORM: torch.zeros(48, dtype=torch.int8)}), f"{NORM} has the type I8"),
        (lambda tensors: tensors.pop("lm_head.weight"), "lacks the tensor lm_head.weight"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(
    tiny: Path, edit: Callable[[dict[str, Tensor]], object], words: str
) -> None:
    """Missing, unexpected, misshapen and quantized tensors are named, in one line."""
    with pytest.raises(ModelRefused) as caught:
        load(change(tiny, edit))
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_refusal_comes_before_any_tensor_is_read(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The headers show it, so a model of any size is refused at once."""
    change(tiny, lambda tensors: tensors.pop(NORM))
    monkeypatch.setattr(weights, "read_pieces", pytest.fail)
    with pytest.raises(ModelRefused):
        load(tiny)


def test_old_buffers_are_ignored(tiny: Path) -> None:
    """Checkpoints of earlier years carry rotary frequencies, which are computed here."""
    change(tiny, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert not any(name.endswith("inv_freq") for name in load(tiny))


def test_truncated_file_is_refused(tiny: Path) -> None:
    """A download that broke off is a refused model, not a crash."""
    file = tiny / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelRefused, match="not a sound safetensors file"):
        load(tiny)


def test_pickled_weights_are_refused(tiny: Path) -> None:
    """Only safetensors files are opened, and the sentence says why."""
    (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match="pickled weights are not loaded because they can run code"):
        resolve(str(tiny))


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({}, "must map tensor names to files"),
        ({"a": "../other/model.safetensors"}, "not a safetensors file of this folder"),
        ({"a": "model.bin"}, "not a safetensors file of this folder"),
        ({"a": "absent.safetensors"}, "has no absent.safetensors"),
    ],
)
def test_bad_index_is_refused(tiny: Path, weight_map: dict[str, str], words: str) -> None:
    """An index may name files of its own folder only."""
    (tiny / "model.safetensors").unlink()
    (tiny / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelRefused, match=words):
        resolve(str(tiny))


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "no such id!", "models/target/config.json"])
def test_names_that_are_no_model_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that does not exist is never taken for a hub id, and neither is a string that cannot be one."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelRefused) as caught:
        resolve(name)
    assert name in caught.value.message
    assert "\n" not in caught.value.message


def test_hash_names_configuration_and_weights(tiny: Path) -> None:
    """The same model has the same digest wherever it lies; another number or key changes it; key order does not."""
    first = model_hash(tiny)
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=4))
    assert model_hash(tiny) == first
    assert len(first) == 32
    change(tiny, lambda tensors: tensors[NORM].add_(1))
    second = model_hash(tiny)
    (tiny / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert len({first, second, model_hash(tiny)}) == 3


def test_hash_names_every_byte_of_the_weights(tmp_path: Path) -> None:
    """The output matrix of any one layer replaced by another's is another model."""
    folder = Path(shutil.copytree(TARGET, tmp_path / "target"))
    tensors = load_file(folder / "model.safetensors")
    names = sorted(name for name in tensors if name.endswith("o_proj.weight"))
    digests = {model_hash(folder)}
    for name, other in zip(names, [*names[1:], names[0]], strict=True):
        save_file({**tensors, name: tensors[other].clone()}, folder / "model.safetensors", {"format": "pt"})
        digests.add(model_hash(folder))
    assert len(digests) == 1 + len(names)


def test_hash_names_every_shard(tmp_path: Path) -> None:
    """A number of the second file changed is another model, as is one of the first."""
    folder = write_tiny_model(tmp_path / "many", "qwen3", max_shard_size="60KB")
    digests = {model_hash(folder)}
    for file in weight_files(folder):
        tensors = load_file(file)
        next(iter(tensors.values())).flatten()[0].add_(1)
        save_file(tensors, file, {"format": "pt"})
        digests.add(model_hash(folder))
    assert len(digests) == 1 + len(weight_files(folder)) > 3
