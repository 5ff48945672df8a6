"""One pass over a model's files: what is in memory, what its digest is of, and files that change meanwhile."""

import gc
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from support.models.engine_cases import native
from support.models.tiny_gguf import Metadata, Tensors, write_gguf
from support.models.tiny_models import TRAINED, write_tiny_model
from torch import Tensor

from outrider.engine.hf_models import checkpoint as hf_checkpoint
from outrider.engine.models import checkpoints, gguf, reading, weights
from outrider.engine.models.checkpoints import FolderCheckpoint, SizedCheckpoint, find_checkpoint
from outrider.engine.models.weights import kept, model_hash, weight_files
from outrider.engine.ops import Ops, Weight
from outrider.engine.ops.blocks import BlockMatrix, quantise, unpacked
from outrider.engine.ops.eager import EagerOps
from outrider.engine.runner import ModelRunner
from outrider.errors import ModelRefused, NotReady
from outrider.model_files.model_names import Shape

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of several files."""
    return write_tiny_model(tmp_path_factory.mktemp("original") / "tiny", "llama", max_shard_size="60KB")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of one file."""
    return write_tiny_model(tmp_path_factory.mktemp("single") / "tiny", "llama")


@pytest.fixture
def tiny(single: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(single, tmp_path / "tiny"))


def plain_hash(folder: Path) -> str:
    """The digest of a folder, as docs/decisions/models/0025 has it."""
    digest = blake3(json.dumps(json.loads((folder / "config.json").read_text()), sort_keys=True).encode())
    for file in weight_files(folder):
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:32]


@pytest.mark.parametrize("piece_bytes", [250, 3000, reading.PIECE_BYTES])
def test_what_is_read_and_its_digest_do_not_depend_on_pieces(
    original: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    """The tensors are those of the safetensors package, the digest is that of the files' bytes."""
    monkeypatch.setattr(reading, "PIECE_BYTES", piece_bytes)
    stored = {tensor.name: tensor for tensor in weights.stored_tensors(weight_files(original))}
    config = json.loads((original / "config.json").read_text())
    tensors, digest = weights.read_tensors(config, weight_files(original), stored, CPU, torch.float32)
    expected = {name: tensor for file in weight_files(original) for name, tensor in load_file(file).items()}
    assert tensors.keys() == stored.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    assert digest == plain_hash(original) == model_hash(original)


@pytest.mark.parametrize("piece_bytes", [250, 5000])
def test_a_gguf_file_is_the_same_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    """Whole rows, also of queries, whose order is another one; its digest is that of its bytes."""
    file = write_gguf(write_tiny_model(tmp_path / "tiny", "llama"), tmp_path / "tiny.gguf")
    found = find_checkpoint(str(file))
    assert isinstance(found, gguf.GgufCheckpoint)
    expected, whole = found.load(CPU, torch.float32, EagerOps())
    monkeypatch.setattr(reading, "PIECE_BYTES", piece_bytes)
    tensors, digest = found.load(CPU, torch.float32, EagerOps())
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    assert digest == whole == blake3(file.read_bytes()).hexdigest()[:32] == found.digest()


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("piece_bytes", [250, reading.PIECE_BYTES])
def test_blocks_are_filled_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kind: str, piece_bytes: int
) -> None:
    """Whole blocks of outputs and whole heads, whose rows a Llama has in another order: the numbers of the file."""
    sizes = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 24, "num_attention_heads": 4}
    folder = write_tiny_model(tmp_path / "tiny", family, **sizes)
    found = find_checkpoint(str(write_gguf(folder, tmp_path / "tiny.gguf", GGMLQuantizationType[kind])))
    assert isinstance(found, gguf.GgufCheckpoint)
    expected, whole = found.load(CPU, torch.float32, native())
    monkeypatch.setattr(reading, "PIECE_BYTES", piece_bytes)
    tensors, digest = found.load(CPU, None, native())
    assert digest == whole
    matrices = {name: weight for name, weight in tensors.items() if isinstance(weight, BlockMatrix)}
    assert len(matrices) > 10
    for name, weight in tensors.items():
        torch.testing.assert_close(unpacked(weight), unpacked(expected[name]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["safetensors", "F16", "Q5_1"])
@pytest.mark.parametrize("piece_bytes", [250, 20000])
def test_matrices_are_quantised_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, bits: int, piece_bytes: int
) -> None:
    """To the bits of a whole matrix in bfloat16; what is looked up stays in that."""
    neurons = 160 if kind == "Q5_1" else 168
    sizes = {"hidden_size": 96, "intermediate_size": neurons, "head_dim": 24, "num_attention_heads": 4}
    place = write_tiny_model(tmp_path / "tiny", "llama", **sizes)
    if kind != "safetensors":
        place = write_gguf(place, tmp_path / "tiny.gguf", GGMLQuantizationType[kind])
    found = find_checkpoint(str(place))
    assert isinstance(found, FolderCheckpoint)
    expected, whole = found.load(CPU, torch.bfloat16, native())
    monkeypatch.setattr(reading, "PIECE_BYTES", piece_bytes)
    tensors, digest = found.load(CPU, torch.bfloat16, native(packed_bits=bits))
    assert digest == whole
    assert sum(isinstance(weight, BlockMatrix) for weight in tensors.values()) > 10
    for name, weight in tensors.items():
        own = expected[name]
        assert isinstance(own, Tensor)
        packed = quantise([own], bits).data if isinstance(weight, BlockMatrix) else own
        assert torch.equal(weight.data, packed), name


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "gemma3", "phi3"])
def test_what_decides_or_is_looked_up_is_not_quantised(tmp_path: Path, family: str) -> None:
    """Routers by any name, biases and norms are as in bfloat16; all matrices of products are quantised from that."""
    found = find_checkpoint(str(write_tiny_model(tmp_path / "tiny", family)))
    assert isinstance(found, FolderCheckpoint)
    expected, tensors = (found.load(CPU, torch.bfloat16, ops)[0] for ops in (native(), native(packed_bits=8)))
    assert tensors.keys() == expected.keys()
    for name, weight in tensors.items():
        own = expected[name]
        assert isinstance(own, Tensor)
        stays = own.ndim == 1 or name.endswith((".bias", "mlp.gate.weight", "embed_tokens.weight"))
        assert isinstance(weight, Tensor if stays else BlockMatrix), name
        assert torch.equal(weight.data, own if stays else quantise([own], 8).data), name


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize(("fault", "words"), [(float("nan"), "NaN or infinity"), (1e7, "beyond .* another dtype can")])
def test_weights_that_have_no_scale_are_refused(tmp_path: Path, dtype: str, fault: float, words: str) -> None:
    """By the file and the name of the tensor."""
    folder = write_tiny_model(tmp_path / "tiny", "llama")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][-1, -1] = fault
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelRefused, match=rf"model\.safetensors: .*{re.escape(name)} .*{words}"):
        ModelRunner.load(str(folder), dtype=dtype, kv_tokens=64)


@pytest.mark.parametrize("dtype", ["file", "bfloat16"])
def test_scales_that_are_no_numbers_are_found(tmp_path: Path, dtype: str) -> None:
    """In blocks too, by the name of the tensor; the last piece of a tensor is looked at like the first."""
    folder = write_tiny_model(tmp_path / "tiny", "llama", hidden_size=96, intermediate_size=160)

    def spoil(_: Metadata, tensors: Tensors) -> None:
        stored, kind = tensors["blk.1.ffn_up.weight"]
        spoilt = stored.copy()
        # The scale of a block of 32 numbers, at its beginning: infinity in float16.
        spoilt[-1, -34:-32] = 0, 0x7C
        tensors["blk.1.ffn_up.weight"] = spoilt, kind

    file = write_gguf(folder, tmp_path / "tiny.gguf", GGMLQuantizationType.Q8_0, edit=spoil)
    with pytest.raises(ModelRefused, match=r"blk\.1\.ffn_up\.weight holds .*NaN or infinity"):
        ModelRunner.load(str(file), dtype=dtype, kv_tokens=64)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["folder", "file", "sized"])
def test_a_matrix_is_quantised_before_the_next_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, kind: str
) -> None:
    """Of matrices in bfloat16 there are never more than one, and the embedding, which is looked up."""
    folder = write_tiny_model(tmp_path / "tiny", "qwen2")
    place = write_gguf(folder, tmp_path / "tiny.gguf") if kind == "file" else folder
    shape = Shape(204, 360, 3, 6, 2, 128, tied_embeddings=False)
    found = SizedCheckpoint.of("wide", TRAINED, shape, 0) if kind == "sized" else find_checkpoint(str(place))
    before, most = {id(each) for each in tensors_alive()}, 0

    def counted(ops: Ops, name: str, weight: Weight) -> Weight:
        nonlocal most
        alive = {each.untyped_storage().data_ptr() for each in tensors_alive() if id(each) not in before}
        most = max(most, len(alive))
        return kept(ops, name, weight)

    for module in (checkpoints, gguf, weights):
        monkeypatch.setattr(module, "kept", counted)
    ModelRunner.load(found, dtype=dtype, kv_tokens=64)
    assert 1 <= most <= 2


def tensors_alive() -> list[Tensor]:
    """Matrices in bfloat16 that have not been freed."""
    alive = [each for each in gc.get_objects() if type(each) is Tensor]
    return [each for each in alive if each.dtype is torch.bfloat16 and each.ndim == 2]


# In a process of its own, which prints what its memory grew to while it loaded.
LOADING = """
import re, sys
from outrider.engine.runner import ModelRunner
import outrider.engine.models.gguf
def kib(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
before = kib("VmRSS")
runner = ModelRunner.load(sys.argv[1], kv_tokens=64)
print(sum(weight.nbytes for weight in runner.model.weights) >> 10, kib("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not say what memory peaked at")
def test_no_more_than_the_blocks_is_in_memory_while_a_file_is_read(tmp_path: Path) -> None:
    """Neither the file nor a tensor of it besides: two pieces, and what a process grows by."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3, "head_dim": 64}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    folder = write_tiny_model(tmp_path / "model", "llama", 65536, **sizes, **heads)
    file = write_gguf(folder, tmp_path / "model.gguf", GGMLQuantizationType.Q8_0)
    done = subprocess.run((sys.executable, "-c", LOADING, str(file)), capture_output=True, text=True, check=True)
    weights, peak = map(int, done.stdout.split()[-2:])
    assert weights > 150 << 10
    assert peak < weights + (64 << 10)


def renamed_into_place(file: Path) -> None:
    """Another file of the same size and time, as a tool that copies whole files leaves it."""
    new, old = file.with_suffix(".new"), file.stat()
    new.write_bytes(file.read_bytes()[:-1] + b"x")
    os.utime(new, ns=(old.st_atime_ns, old.st_mtime_ns))
    new.replace(file)


def written_to(file: Path) -> None:
    """Other bytes in the same file."""
    with file.open("r+b") as stream:
        stream.seek(-10, 2)
        stream.write(bytes(10))


def cut_off(file: Path) -> None:
    """Half of the file gone."""
    os.truncate(file, file.stat().st_size // 2)


def test_the_digest_is_of_the_bytes_in_memory(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are replaced or deleted while they are read are read to their ends as they were."""
    expected, first, checked = model_hash(tiny), weight_files(tiny)[0], weights.check_numbers

    def change_first(*args: object) -> None:
        monkeypatch.setattr(weights, "check_numbers", checked)
        renamed_into_place(first)
        (tiny / "config.json").unlink()

    monkeypatch.setattr(weights, "check_numbers", change_first)
    assert ModelRunner.load(str(tiny), kv_tokens=64).identity.model_hash == expected


@pytest.mark.parametrize("change", [written_to, cut_off])
@pytest.mark.parametrize("name", ["tiny", "tiny.gguf"])
def test_a_file_that_is_written_to_while_it_is_read_is_not_served(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Path], None]
) -> None:
    """Its bytes in memory may be of before and after."""
    place = write_gguf(tiny, tiny.with_name(name)) if name.endswith(".gguf") else tiny
    file, module = (place, gguf) if place.is_file() else (weight_files(tiny)[0], weights)
    monkeypatch.setattr(reading, "PIECE_BYTES", 1000)
    monkeypatch.setattr(module, "check_numbers", lambda *_: change(file))
    with pytest.raises(NotReady, match=rf"{re.escape(str(file))} (was changed|became shorter) while the model was"):
        ModelRunner.load(str(place), kv_tokens=64)


@pytest.mark.parametrize("change", [renamed_into_place, written_to, Path.unlink])
@pytest.mark.parametrize("name", ["tiny", "tiny.gguf"])
def test_a_file_is_the_one_whose_header_was_read(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Path], None]
) -> None:
    """What lies there when the weights are read is not always what was checked."""
    place = write_gguf(tiny, tiny.with_name(name)) if name.endswith(".gguf") else tiny
    file, module = (place, gguf) if place.is_file() else (weight_files(tiny)[0], weights)

    def read(*args: object) -> object:
        change(file)
        return reading.read_pieces(*args)  # type: ignore[arg-type] - as they were given

    monkeypatch.setattr(module, "read_pieces", read)
    with pytest.raises(NotReady, match=rf"{re.escape(str(file))} (was changed|cannot be read any more)"):
        ModelRunner.load(str(place), kv_tokens=64)


@pytest.mark.parametrize("change", [renamed_into_place, written_to, Path.unlink])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_files_that_change_while_transformers_loads_them_are_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Path], None]
) -> None:
    """Its code maps them by their names, before they are hashed."""
    folder = write_tiny_model(tmp_path / "tiny", "gpt2")

    def changed_meanwhile(folder: Path) -> str:
        change(folder / name)
        return "of what lies there now"

    monkeypatch.setattr(hf_checkpoint, "model_hash", changed_meanwhile)
    with pytest.raises(NotReady, match=rf"{re.escape(name)} was changed while the model was loaded from it"):
        ModelRunner.load(str(folder), kv_tokens=64)
