"""GGUF files as models: the same numbers as safetensors, every type of tensor, and what does not fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from support.models.engine_cases import native
from support.models.model_cases import (
    GEMMA_ROPES,
    LLAMA3,
    PARTIAL,
    THETA,
    YARN,
    all_logits,
    logits_and_reach,
    random_ids,
    reference,
)
from support.models.tiny_gguf import F32, Metadata, Tensors, metadata_of, tensors_of, write_gguf, write_parts
from support.models.tiny_models import TARGET, TRAINED, write_tiny_model
from support.stack import PATIENT, answers, running_stack, token_ids
from torch import Tensor

from outrider.cli.bench.common import OPENINGS
from outrider.engine.models import gguf as module
from outrider.engine.models.checkpoints import find_checkpoint
from outrider.engine.models.config import ModelConfig
from outrider.engine.models.rope import DividedRope, Llama3Rope
from outrider.engine.ops.blocks import BlockMatrix, unpacked
from outrider.engine.runner import ModelRunner
from outrider.errors import ModelRefused
from outrider.model_files.gguf.header import GgufFile
from outrider.model_files.gguf.types import KINDS, TYPES
from outrider.model_files.vocabulary import Vocabulary

CPU = torch.device("cpu")
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": THETA}}),
    ("qwen2", {}),
    ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": THETA, **YARN}}),
    ("qwen3", {}),
    ("qwen3_moe", {}),
    ("mistral", {"sliding_window": 9}),
    ("gemma3", {}),
    ("gemma3", GEMMA_ROPES),
    ("phi3", {}),
    ("phi3", PARTIAL),
]


def logits(model: Path, dtype: str = "float32") -> torch.Tensor:
    """Logits of 40 random tokens, the last ten steps."""
    decoded, _ = all_logits(ModelRunner.load(str(model), dtype=dtype, kv_tokens=1024), random_ids(40, 300), 30)
    return decoded


@pytest.mark.parametrize(("family", "overrides"), MODELS)
def test_a_gguf_file_has_the_logits_of_the_same_safetensors(
    tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    """To the bit, for every family, biases, tied embeddings, scaled rotary embeddings and windows."""
    folder = write_tiny_model(tmp_path / "tiny", family, seed=11, **overrides)
    file = write_gguf(folder, tmp_path / "tiny.gguf")
    found = find_checkpoint(str(file))
    assert (found.name, found.folder, found.modelling) == ("tiny", file, "")
    assert torch.equal(logits(file), logits(folder))


def test_llama_3_embeddings_are_read_from_their_tensor(tmp_path: Path) -> None:
    """rope_freqs.weight divides the frequencies as Llama 3's formula does."""
    rope = {"rope_type": "llama3", "rope_theta": THETA, **LLAMA3}
    folder = write_tiny_model(tmp_path / "tiny", "llama", seed=11, rope_parameters=rope, context_len=512)
    law, positions = ModelConfig.read(folder).ropes[0], torch.arange(4)
    assert isinstance(law, Llama3Rope)
    plain = DividedRope(theta=THETA, divisors=(1.0,) * 8).frequencies(16, positions)
    divisors = (plain / law.frequencies(16, positions)).numpy()
    assert divisors.max() == pytest.approx(8.0)

    def add(_: Metadata, tensors: Tensors) -> None:
        tensors["rope_freqs.weight"] = (divisors, F32)

    file = write_gguf(folder, tmp_path / "tiny.gguf", edit=add)
    _, limit = logits_and_reach(reference(folder), random_ids(40, 300), 29)
    torch.testing.assert_close(logits(file), logits(folder), atol=limit, rtol=0)
    without = write_gguf(folder, tmp_path / "without.gguf")
    assert (logits(without) - logits(folder)).abs().max() > 1e-2


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Metadata, Tensors]:
    """Metadata and tensors of a model whose rows are whole blocks of every type."""
    folder = write_tiny_model(
        tmp_path_factory.mktemp("wide"), "qwen2", hidden_size=256, intermediate_size=512, head_dim=64
    )
    return metadata_of(folder), tensors_of(folder, F32)


def random_blocks(kind: GGMLQuantizationType, num_rows: int, row_len: int) -> np.ndarray[Any, Any]:
    """Rows of a type: quantised where the package can, else random bytes whose numbers are finite."""
    random = np.random.default_rng(kind)
    try:
        return quantize(random.standard_normal((num_rows, row_len)).astype(np.float32), kind)
    except NotImplementedError:
        block_len, block_bytes = GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 256, (64 * num_rows * row_len // block_len, block_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            is_sound = np.isfinite(dequantize(blocks, kind)).all(axis=1)
        return blocks[is_sound][: num_rows * row_len // block_len].reshape(num_rows, -1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GGMLQuantizationType(each) for each in TYPES], ids=lambda kind: kind.name)
def test_every_type_has_the_packages_numbers(
    tmp_path: Path, wide: tuple[Metadata, Tensors], kind: GGMLQuantizationType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 and in blocks to the bit, and rounded once in bfloat16; in pieces as at once."""
    stored, (metadata, tensors) = random_blocks(kind, 512, 256), wide
    tensors = tensors | {"blk.0.ffn_up.weight": (stored, kind)}
    file = GgufFile.read(write_parts(tmp_path / "tiny.gguf", metadata, tensors))
    config, expected = module.read_config(file), torch.from_numpy(dequantize(stored, kind).astype(np.float32))
    assert expected.shape == (512, 256)
    assert expected.abs().max() > 0
    name = "model.layers.0.mlp.up_proj.weight"
    full, narrow, kept = (
        module.load_gguf(file, config, CPU, dtype, native())[0][name] for dtype in (torch.float32, torch.bfloat16, None)
    )
    assert isinstance(full, Tensor)
    assert isinstance(narrow, Tensor)
    assert torch.equal(full, expected)
    assert torch.equal(narrow, expected.bfloat16())
    is_rare = kind.name not in (*KINDS, "F32", "F16", "BF16")
    assert torch.equal(unpacked(kept).float(), expected.bfloat16().float() if is_rare else expected)
    assert isinstance(kept, BlockMatrix) == (kind.name in KINDS)
    monkeypatch.setattr(module, "PIECE_NUMBERS", 7 * 256)
    again, _ = module.load_gguf(file, config, CPU, torch.float32, native())
    assert torch.equal(unpacked(again[name]), expected)


def test_the_table_of_types_is_the_packages() -> None:
    """What the package turns into float32 is all there, with its sizes, and nothing else."""
    known = {}
    for kind, (block_len, block_bytes) in GGML_QUANT_SIZES.items():
        try:
            dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except NotImplementedError:
            continue
        known[int(kind)] = (kind.name, block_len, block_bytes)
    assert {key: (kind.name, kind.block_len, kind.block_bytes) for key, kind in TYPES.items()} == known


def test_the_memory_of_a_type_is_what_its_blocks_take() -> None:
    """As doctor counts it."""
    for kind in TYPES.values():
        bits = 8 * module.beside_blocks(kind).itemsize
        if kind.name in KINDS:
            num_blocks, num_bytes = KINDS[kind.name].shape(16, 2048)
            bits = 8 * num_blocks * num_bytes / (16 * 2048)
        assert kind.memory_bits == bits


def test_the_hash_is_of_the_content(tmp_path: Path) -> None:
    """Another name or place is the same model; another number or key is another one."""
    folder = write_tiny_model(tmp_path / "tiny", "llama")
    file = write_gguf(folder, tmp_path / "a.gguf")
    digest = find_checkpoint(str(file)).digest()
    (tmp_path / "b").mkdir()
    copy = write_gguf(folder, tmp_path / "b" / "b.gguf")
    assert find_checkpoint(str(tmp_path / "b")).digest() == digest
    assert len(digest) == 32
    with copy.open("r+b") as stream:
        stream.seek(-4, 2)
        stream.write(b"\x01\x02\x03\x04")
    assert find_checkpoint(str(copy)).digest() != digest
    other = write_gguf(folder, tmp_path / "c.gguf", edit=lambda metadata, _: metadata.update({"general.name": "c"}))
    assert find_checkpoint(str(other)).digest() != digest


def test_a_folder_with_one_file_is_a_model_and_safetensors_go_first(tmp_path: Path) -> None:
    """Two GGUF files are a question, whose sentence names them and the way out."""
    folder = write_tiny_model(tmp_path / "tiny", "llama")
    places = [tmp_path / name for name in ("one", "two", "both")]
    for place in places:
        place.mkdir()
        write_gguf(folder, place / "a.gguf")
    write_gguf(folder, places[1] / "b.gguf")
    (places[2] / "config.json").write_bytes((folder / "config.json").read_bytes())
    (places[2] / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert isinstance(find_checkpoint(str(places[0])), module.GgufCheckpoint)
    assert find_checkpoint(str(places[0])).name == "one"
    assert not isinstance(find_checkpoint(str(places[2])), module.GgufCheckpoint)
    with pytest.raises(
        ModelRefused, match=r"has several GGUF files \(a\.gguf, b\.gguf\): name one of them by its path"
    ):
        find_checkpoint(str(places[1]))


def test_ends_are_those_that_the_file_names(tmp_path: Path) -> None:
    """End of sequence, of turn and of message."""
    folder = write_tiny_model(tmp_path / "tiny", "llama")
    ends = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 9}
    file = write_gguf(folder, tmp_path / "a.gguf", edit=lambda metadata, _: metadata.update(ends))
    assert find_checkpoint(str(file)).config.eos_token_ids == {0, 7, 9}


@pytest.mark.slow
async def test_services_serve_a_file_with_a_draft_in_another_format(tmp_path: Path) -> None:
    """The embedded target as GGUF in bfloat16, with the draft's safetensors: the tokens of the embedded pair."""
    file = write_gguf(TARGET, tmp_path / "target.gguf", GGMLQuantizationType.BF16)
    assert Vocabulary.read(file) == Vocabulary.read(TARGET)
    said = []
    for target in (str(TARGET), str(file)):
        async with running_stack(target, str(TRAINED), gateway=PATIENT) as stack:
            said.append(token_ids(await answers(stack, OPENINGS[:4], temperature=0, max_tokens=24, draft_count=3)))
            assert (await stack.info(stack.target)).model_name == Path(target).stem
    assert said[0] == said[1]
    assert all(len(each) > 8 for each in said[0])


def test_the_order_of_queries_would_be_noticed(tmp_path: Path) -> None:
    """A Llama whose queries were not put into llama.cpp's order says something else."""
    folder = write_tiny_model(tmp_path / "tiny", "llama", seed=11)
    stored = load_file(folder / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"].numpy()

    def leave(_: Metadata, tensors: Tensors) -> None:
        tensors["blk.0.attn_q.weight"] = (stored, F32)

    file = write_gguf(folder, tmp_path / "tiny.gguf", edit=leave)
    assert (logits(file) - logits(folder)).abs().max() > 1e-2


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_numbers_that_are_none_are_found_when_a_file_is_loaded(tmp_path: Path, value: float) -> None:
    """The file and its tensor are named."""
    folder = write_tiny_model(tmp_path / "tiny", "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    file = write_gguf(folder, tmp_path / "tiny.gguf")
    with pytest.raises(ModelRefused, match=r"tiny\.gguf: blk\.0\.ffn_up\.weight holds NaN or infinity as float32"):
        logits(file)
