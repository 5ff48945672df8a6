"""Reading config.json of the families, old and new spellings, and one sentence for each model that is refused."""

import json
from pathlib import Path

import pytest
from support.models.tiny_models import TARGET

from outrider.engine.models.config import ModelConfig
from outrider.engine.models.rope import LinearRope, Rope
from outrider.errors import ModelRefused

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def read(folder: Path, **changes: object) -> ModelConfig:
    """Reads LLAMA with some keys changed."""
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return ModelConfig.read(folder)


def test_embedded_target_is_read() -> None:
    """The pair that comes with the repository, in transformers' newest spelling."""
    config = ModelConfig.read(TARGET)
    assert (config.vocab_size, config.num_layers, config.head_dim, config.context_len) == (4096, 6, 64, 4096)
    assert (set(config.ropes), config.tied_embeddings, config.norm_epsilon) == ({Rope(theta=200000.0)}, True, 1e-6)
    assert config.windows == (None,) * 6
    assert config.eos_token_ids == {0}


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    """Absent keys and null mean the same."""
    config = read(tmp_path, num_key_value_heads=None, head_dim=None)
    assert (config.num_kv_heads, config.head_dim, config.norm_epsilon) == (4, 16, 1e-6)
    assert config.ropes == (Rope(theta=10000.0),) * 2
    assert not config.tied_embeddings
    assert config.eos_token_ids == frozenset()


def test_a_scaling_stretches_the_context(tmp_path: Path) -> None:
    """Positions of the file times the factor, or what the kind of scaling says; the embedding comes along."""
    config = read(tmp_path, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.5})
    assert (config.ropes[1], config.context_len) == (LinearRope(theta=5e5, factor=2.5), 1280)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 128}, (128, 128)),
        ({"architectures": ["MistralForCausalLM"]}, (None, None)),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 128}, (None, None)),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 128}
            | {"max_window_layers": 1},
            (None, 128),
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "sliding_window": 64}
            | {"layer_types": ["sliding_attention", "full_attention"]},
            (64, None),
        ),
    ],
)
def test_a_sliding_window_leaves_the_context(
    tmp_path: Path, changes: dict[str, object], windows: tuple[int | None, ...]
) -> None:
    """It hides earlier positions from some layers; 4,096, Mistral's default, hides none of 512."""
    config = read(tmp_path, **changes)
    assert (config.windows, config.context_len) == (windows, 512)


@pytest.mark.parametrize(
    ("architecture", "switches"),
    [
        ("LlamaForCausalLM", (False, False, False)),
        ("MistralForCausalLM", (False, False, False)),
        ("Qwen2ForCausalLM", (True, False, False)),
        ("Qwen3ForCausalLM", (False, False, True)),
    ],
)
def test_families_differ_in_biases_and_norms(
    tmp_path: Path, architecture: str, switches: tuple[bool, bool, bool]
) -> None:
    """Query, key and value biases; output bias; norms of heads."""
    config = read(tmp_path, architectures=[architecture])
    assert (config.qkv_bias, config.output_bias, config.qk_norm) == switches


@pytest.mark.parametrize(
    ("generation", "expected"),
    [({"eos_token_id": [7, 9]}, {5, 7, 9}), ({"eos_token_id": 0}, {0, 5}), ({}, {5}), ({"eos_token_id": -1}, {5})],
)
def test_both_configurations_name_ends(tmp_path: Path, generation: dict[str, object], expected: set[int]) -> None:
    """None overrules the other, be it an integer or a list; -1 is no token."""
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read(tmp_path, eos_token_id=5).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures", "MambaForCausalLM, whose running state"),
        ({"architectures": ["RwkvForCausalLM"]}, "architectures", "rolled back"),
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures", "must be one of LlamaForCausalLM"),
        ({"architectures": None}, "architectures", "must name one architecture"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map", "never run"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "unquantized"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8}}, "rope_scaling.rope_type", "'longrope'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 1e9}}, "max_position_embeddings", "at most 16777216"),
        ({"max_position_embeddings": 2**31 - 1}, "max_position_embeddings", "2147483647 positions"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "whole heads"),
        ({"hidden_act": "gelu"}, "hidden_act", "'gelu'"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types", "linear_attention"),
        ({"hidden_size": "64"}, "hidden_size", "'64', but must be an integer"),
        ({"hidden_size": None}, "hidden_size", "is missing"),
        ({"vocab_size": 0}, "vocab_size", "is 0, but must be an integer of at least 1"),
        ({"vocab_size": 10**12}, "vocab_size", "is 1000000000000, but must be an integer from 1 to 2147483647"),
        ({"num_hidden_layers": 0}, "num_hidden_layers", "from 1 to 4096"),
        ({"num_hidden_layers": 4097}, "num_hidden_layers", "from 1 to 4096"),
        ({"num_hidden_layers": True}, "num_hidden_layers", "True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "does not divide 4"),
        ({"head_dim": 15}, "head_dim", "even"),
        ({"rms_norm_eps": -1}, "rms_norm_eps", "positive"),
        ({"rms_norm_eps": 1e39}, "rms_norm_eps", "is 1e+39, but must be a positive number that float32 can hold"),
        ({"rope_theta": float("nan")}, "rope_theta", "positive"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "true or false"),
        ({"quantization_config": {}}, "quantization_config", "unquantized"),
        ({"eos_token_id": [-2]}, "eos_token_id", "token id"),
        ({"eos_token_id": 2**31}, "eos_token_id", "token id"),
    ],
)
def test_unservable_models_are_refused_with_file_and_key(
    tmp_path: Path, changes: dict[str, object], key: str, words: str
) -> None:
    """One sentence that names the file, the key and what is wrong with it."""
    with pytest.raises(ModelRefused) as caught:
        read(tmp_path, **changes)
    message = caught.value.message
    assert f'{tmp_path / "config.json"}: "{key}"' in message
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\x80"])
def test_files_that_are_no_json_object_are_refused(tmp_path: Path, text: str) -> None:
    """A broken file is a refused model, not a traceback."""
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelRefused, match=r"config\.json"):
        ModelConfig.read(tmp_path)


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    """The missing file is named."""
    with pytest.raises(ModelRefused, match=r"config\.json cannot be read: No such file"):
        ModelConfig.read(tmp_path)
