"""Reading config.json of the families, old and new spellings, and one sentence for each model that is refused."""

import json
from pathlib import Path

import pytest
from support.models.tiny_models import TARGET
from transformers import Gemma3TextConfig, Phi3Config

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


GEMMA = {"architectures": ["Gemma3ForCausalLM"], "head_dim": None}
PHI = {"architectures": ["Phi3ForCausalLM"]}
EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}


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


def test_a_gemma_that_says_little_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """As the files of Gemma 3 4B, whose keys of text stand in an object of their own, and leave most to defaults."""
    said = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": said | scaled,
        "eos_token_id": [1, 106],
    }
    (tmp_path / "config.json").write_text(json.dumps(whole | {"vision_config": {"hidden_size": 1152}}))
    config, theirs = ModelConfig.read(tmp_path), Gemma3TextConfig(**said, **scaled)
    for own, name in {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}.items():
        assert getattr(config, own) == getattr(theirs, name)
    assert (config.vocab_size, config.head_dim, config.tied_embeddings) == (theirs.vocab_size, theirs.head_dim, True)
    assert (config.context_len, config.score_scale, config.norm_epsilon) == (131072, 256**-0.5, theirs.rms_norm_eps)
    local, everywhere = Rope(theta=10000.0), LinearRope(theta=1e6, factor=8.0)
    windowed = [kind == "sliding_attention" for kind in theirs.layer_types]
    assert config.ropes == tuple(local if each else everywhere for each in windowed)
    assert config.windows == tuple(1024 if each else None for each in windowed)
    assert (windowed.count(False), config.eos_token_ids) == (5, {1, 106})


def test_a_layer_with_a_window_turns_in_its_own_way_though_the_context_is_shorter(tmp_path: Path) -> None:
    """A window that hides nothing is none; the embedding is the layer's all the same."""
    config = read(tmp_path, architectures=["Gemma3ForCausalLM"], sliding_window_pattern=2)
    assert config.windows == (None, None)
    assert [rope.theta for rope in config.ropes] == [10000.0, 1e6]


def test_code_that_phi_brings_along_is_not_needed(tmp_path: Path) -> None:
    """Its repositories name some, which is never run; what a file leaves out is what transformers has."""
    config, theirs = (
        read(tmp_path, **PHI, auto_map={"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}),
        Phi3Config(),
    )
    assert (config.norm_epsilon, config.windows, config.tied_embeddings) == (theirs.rms_norm_eps, (None, None), False)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (True, True)),
        ({"num_experts": None, "num_local_experts": 8}, (True, True)),
        ({"mlp_only_layers": [0]}, (False, True)),
        ({"decoder_sparse_step": 2}, (False, True)),
        ({"decoder_sparse_step": 3}, (False, False)),
        ({"num_experts": 0}, (False, False)),
    ],
)
def test_keys_say_which_layers_have_experts(
    tmp_path: Path, changes: dict[str, object], layers: tuple[bool, ...]
) -> None:
    """By transformers' rule, under both names of their number; sizes have the defaults that they have there."""
    config = read(tmp_path, **(EXPERTS | changes))
    assert tuple(config.experts_of(layer) is not None for layer in range(2)) == layers
    sizes = {(each.num_experts, each.num_chosen, each.size, each.is_normalised) for each in config.experts if each}
    assert sizes == ({(8, 8, 768, False)} if any(layers) else set())


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
        (GEMMA | {"hidden_activation": "silu"}, "hidden_activation", "'silu', but must be \"gelu_pytorch_tanh\""),
        (GEMMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping", "is 30.0, but"),
        (GEMMA | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping", "is 50.0, but"),
        (GEMMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention", "is True, but"),
        (GEMMA | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar", "positive"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config", "is None, but must be an object"),
        (PHI | {"partial_rotary_factor": 0.7}, "partial_rotary_factor", "an even number of a head's 16 coordinates"),
        (EXPERTS | {"num_experts": -1}, "num_experts", "is -1, but must be an integer from 0 to 4096"),
        (EXPERTS | {"num_experts": 10**6}, "num_experts", "from 0 to 4096"),
        (EXPERTS | {"num_experts_per_tok": 9}, "num_experts_per_tok", "is 9, but must be an integer from 1 to 8"),
        (EXPERTS | {"moe_intermediate_size": 0}, "moe_intermediate_size", "is 0, but must be an integer of at least 1"),
        (EXPERTS | {"norm_topk_prob": 1}, "norm_topk_prob", "is 1, but must be true or false"),
        (EXPERTS | {"decoder_sparse_step": 0}, "decoder_sparse_step", "of at least 1"),
        (EXPERTS | {"mlp_only_layers": [2]}, "mlp_only_layers", "is [2], but must be a list of layers from 0 to 1"),
        (EXPERTS | {"mlp_only_layers": 1}, "mlp_only_layers", "is 1, but must be a list"),
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
