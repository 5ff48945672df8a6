"""Rotary tables: bit for bit those of transformers, and each row that of its own position."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.models.model_cases import ORIGINAL_LEN, SCALINGS, THETA
from support.models.tiny_models import TARGET
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.engine.models.config import ModelConfig
from outrider.engine.models.json_keys import JsonKeys
from outrider.engine.models.rope import DynamicRope, Llama3Rope, Rope, YarnRope, rotary_tables, yarn_amplitude
from outrider.engine.models.rope_keys import read_rope
from outrider.engine.models.transformer import TABLE_POSITIONS

CPU = torch.device("cpu")
LENGTH = 300
# As the files of these models have it: Llama 3.1 8B, Qwen 2.5 7B with long contexts, DeepSeek's use of YaRN.
REAL: list[tuple[int, int, dict[str, Any]]] = [
    (
        128,
        131072,
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    (
        128,
        32768,
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    (
        64,
        163840,
        {
            "rope_type": "yarn",
            "rope_theta": 10000,
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "mscale": 0.707,
            "mscale_all_dim": 1.0,
        },
    ),
    (64, 8192, {"rope_type": "default", "rope_theta": 123456.789}),
]


def theirs(head_dim: int, max_positions: int, parameters: dict[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [P, D/2] of transformers, all positions in one forward."""
    config = transformers.LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=max_positions,
        rope_parameters=dict(parameters),
    )
    tables = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    cos, sin = (table[0, :, : head_dim // 2] for table in tables)
    return cos, sin


def ours(head_dim: int, max_positions: int, parameters: dict[str, Any], length: int) -> tuple[Tensor, Tensor]:
    """cos and sin [length, D/2]."""
    rope = read_rope(JsonKeys(Path("config.json"), {"rope_parameters": parameters}), max_positions, head_dim)
    return rotary_tables(rope, head_dim, length, CPU)


def test_tables_of_the_embedded_target_are_those_of_transformers() -> None:
    """At every position of the context."""
    config = ModelConfig.read(TARGET)
    tables = rotary_tables(config.ropes[0], config.head_dim, config.context_len, CPU)
    embedding = LlamaRotaryEmbedding(transformers.AutoConfig.from_pretrained(TARGET))
    expected = embedding(torch.zeros(1), torch.arange(config.context_len)[None])
    for table, both_halves in zip(tables, expected, strict=True):
        assert table.shape == (config.context_len, config.head_dim // 2)
        assert torch.equal(torch.cat((table, table), dim=-1), both_halves[0])


@pytest.mark.parametrize("scaling", [name for name in SCALINGS if name != "dynamic"])
@pytest.mark.parametrize("head_dim", [2, 12, 16, 128])
def test_scaled_tables_are_those_of_transformers(scaling: str, head_dim: int) -> None:
    """Bit for bit, within the original context and past it."""
    parameters = {"rope_theta": THETA, **SCALINGS[scaling]}
    expected = theirs(head_dim, ORIGINAL_LEN, parameters, torch.arange(LENGTH))
    for table, other in zip(ours(head_dim, ORIGINAL_LEN, parameters, LENGTH), expected, strict=True):
        assert torch.equal(table, other)


@pytest.mark.parametrize(("head_dim", "max_positions", "parameters"), REAL)
def test_tables_of_real_models_are_those_of_transformers(
    head_dim: int, max_positions: int, parameters: dict[str, Any]
) -> None:
    """Published numbers, at the beginning of the context and at its end."""
    tables = ours(head_dim, max_positions, parameters, max_positions)
    positions = torch.cat((torch.arange(50), torch.arange(max_positions - 50, max_positions)))
    for table, other in zip(tables, theirs(head_dim, max_positions, parameters, positions), strict=True):
        assert torch.equal(table[positions], other)


@pytest.mark.parametrize("factor", [1.0, 2.5, 4.0])
@pytest.mark.parametrize("head_dim", [4, 16, 128])
def test_dynamic_rows_are_those_of_a_forward_that_ends_there(head_dim: int, factor: float) -> None:
    """Each row is the last one that transformers computes for a sequence of that length."""
    parameters = {"rope_type": "dynamic", "factor": factor, "rope_theta": THETA}
    tables = ours(head_dim, ORIGINAL_LEN, parameters, LENGTH)
    for position in (*range(ORIGINAL_LEN + 20), LENGTH - 1):
        expected = theirs(head_dim, ORIGINAL_LEN, parameters, torch.tensor([position]))
        for table, other in zip(tables, expected, strict=True):
            assert torch.equal(table[position : position + 1], other)


def test_dynamic_rows_depend_on_nothing_but_their_position() -> None:
    """A longer table begins with the shorter one; within the original context it is the unscaled one."""
    rope = DynamicRope(theta=THETA, factor=4.0, original_len=ORIGINAL_LEN)
    short, long = (rotary_tables(rope, 16, length, CPU)[0] for length in (100, LENGTH))
    assert torch.equal(short, long[:100])
    plain = rotary_tables(Rope(theta=THETA), 16, LENGTH, CPU)[0]
    assert torch.equal(long[:ORIGINAL_LEN], plain[:ORIGINAL_LEN])
    assert not torch.equal(long[ORIGINAL_LEN], plain[ORIGINAL_LEN])


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("head_dim", [4, 12, 128])
def test_shorter_tables_are_the_beginning_of_longer_ones(scaling: str, head_dim: int) -> None:
    """To the bit, by runs of positions: what is served does not depend on how long a context it has room for."""
    parameters, longest = {"rope_theta": THETA, **SCALINGS[scaling]}, 5 * TABLE_POSITIONS
    whole = ours(head_dim, ORIGINAL_LEN, parameters, longest + 3)
    for length in range(TABLE_POSITIONS, longest + 1, TABLE_POSITIONS):
        for table, other in zip(ours(head_dim, ORIGINAL_LEN, parameters, length), whole, strict=True):
            assert torch.equal(table, other[:length])


def test_the_cases_have_pairs_of_every_speed() -> None:
    """Slow, blended and fast pairs: a formula that is wrong for one kind shows in the comparisons above."""
    llama3 = Llama3Rope(theta=THETA, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_len=64)
    yarn = YarnRope(theta=THETA, factor=8.0, original_len=64, beta_fast=8.0, beta_slow=1.0, truncate=True)
    plain = Rope(theta=THETA).frequencies(16, torch.arange(1))
    for rope in (llama3, yarn):
        shares = plain / rope.frequencies(16, torch.arange(1))
        assert shares.min() == pytest.approx(1)
        assert shares.max() == pytest.approx(8)
        assert ((shares > 1.1) & (shares < 7.9)).any()


def test_yarn_amplitudes() -> None:
    """0.1 ln(factor) + 1 as in the paper; nothing for a factor of 1; DeepSeek's scales only where both are given."""
    assert yarn_amplitude(4.0) == pytest.approx(1.1386294361119891)
    assert yarn_amplitude(1.0) == 1
    assert yarn_amplitude(4.0, 1.0, 1.0) == 1
    assert yarn_amplitude(4.0, 0.5) == yarn_amplitude(4.0, 0.0, 0.5) == yarn_amplitude(4.0)
    assert yarn_amplitude(4.0, 0.5, 1.0) == pytest.approx(1.0693147180559945 / 1.1386294361119891)
