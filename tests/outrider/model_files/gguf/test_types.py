"""What the blocks of each type stand for: by the description, by the gguf package, in llama.cpp's mixes."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from support.models.gguf_blocks import FORMS, every_scale, hostile_blocks, quantised, random_blocks, reference
from support.models.tiny_gguf import DYNAMIC, mixed_type, write_gguf
from support.models.tiny_models import write_tiny_model

from outrider.model_files.gguf.header import GgufFile

KINDS = pytest.mark.parametrize("kind", FORMS)


@KINDS
def test_the_description_has_the_packages_numbers(kind: str) -> None:
    """To the bit: random blocks, every pattern of a packed scale; zero, subnormal, negative, largest scales."""
    assert GGML_QUANT_SIZES[GGMLQuantizationType[kind]] == (FORMS[kind].length, FORMS[kind].size)
    found = [random_blocks(kind, 256, 512, scales="any"), random_blocks(kind, 64, 512), every_scale(kind)]
    for stored in (*found, hostile_blocks(kind)):
        with np.errstate(all="ignore"):
            expected = np.asarray(dequantize(stored, GGMLQuantizationType[kind]), np.float32)
        assert np.array_equal(reference(kind, stored).view(np.uint32), expected.view(np.uint32))


@KINDS
def test_quantising_keeps_what_the_bits_can_say(kind: str) -> None:
    """The error of normal numbers is about a step's; what is on the grid stays, and zeros stay zeros."""
    numbers = np.random.default_rng(3).standard_normal((8, 512)).astype(np.float32)
    numbers[2] = 0
    once = reference(kind, quantised(kind, numbers))
    assert np.sqrt(np.mean((once - numbers) ** 2)) < 2.2 / 2 ** FORMS[kind].bits
    assert not once[2].any()


@pytest.mark.parametrize("is_tied", [False, True])
def test_mixes_are_those_of_llama_cpp(tmp_path: Path, is_tied: bool) -> None:
    """Its quantiser's types for four layers, of which two get more bits, and of a width that has no whole blocks."""
    folder = write_tiny_model(
        tmp_path / "tiny",
        "llama",
        hidden_size=256,
        intermediate_size=352,
        head_dim=64,
        num_hidden_layers=4,
        tie_word_embeddings=is_tied,
    )
    file = GgufFile.read(write_gguf(folder, tmp_path / "tiny.gguf", "Q4_K_M"))
    types = {name: place.type.name for name, place in file.tensors.items()}
    assert types.pop("token_embd.weight") == ("Q6_K" if is_tied else "Q4_K")
    assert types.pop("output.weight", None) == (None if is_tied else "Q6_K")
    assert [types[f"blk.{layer}.attn_v.weight"] for layer in range(4)] == ["Q4_K", "Q4_K", "Q6_K", "Q6_K"]
    assert [types[f"blk.{layer}.ffn_down.weight"] for layer in range(4)] == ["Q5_0", "Q5_0", "Q8_0", "Q8_0"]
    others = {kind for name, kind in types.items() if "attn_v" not in name and "ffn_down" not in name}
    assert others == {"Q4_K", "F32"}


def test_narrow_and_dynamic_mixes_have_many_types() -> None:
    """Of 135 million SmolLM2's width nothing fits 256; a dynamic mix has every type, and three in queries to values."""
    assert mixed_type("Q4_K_M", "blk.0.attn_q.weight", 576, 30, has_output=False) == "Q5_0"
    assert mixed_type("Q4_K_M", "token_embd.weight", 576, 30, has_output=False) == "Q8_0"
    assert mixed_type("Q4_K_M", "blk.29.ffn_down.weight", 1536, 30, has_output=False) == "Q6_K"
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    layers = [
        [mixed_type(DYNAMIC, f"blk.{n}.{part}.weight", 256, 4, has_output=True) for part in parts] for n in range(2)
    ]
    assert all(len(set(layer)) == len(parts) for layer in layers)
    assert {kind for layer in layers for kind in layer} == FORMS.keys()
