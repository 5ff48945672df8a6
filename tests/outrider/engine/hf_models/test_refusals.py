"""Models that cannot be served, each refused in one sentence that names what is in the way, before a weight is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.models.tiny_models import write_tiny_model
from torch import Tensor, nn

from outrider.engine.hf_models.checkpoint import without_numbers
from outrider.engine.hf_models.config import Unfit, survey
from outrider.engine.models.checkpoints import find_checkpoint
from outrider.engine.runner import ModelRunner
from outrider.errors import ModelRefused

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """A model that is served, for tests that spoil it."""
    return write_tiny_model(tmp_path / "tiny", "gpt2")


def write_config(folder: Path, config: transformers.PretrainedConfig, architecture: str) -> Path:
    """A folder with a configuration and weights that must not be looked at."""
    config.architectures = [architecture]
    config.save_pretrained(folder)
    (folder / "model.safetensors").touch()
    return folder


def edit_config(folder: Path, **changes: object) -> Path:
    """Changes keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def refusal(find: Callable[[], object]) -> str:
    """The sentence of a refusal."""
    with pytest.raises(ModelRefused) as caught:
        find()
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == 78
    return caught.value.message


ARCHITECTURES: list[tuple[type[transformers.PretrainedConfig], dict[str, Any], str, str]] = [
    (transformers.MambaConfig, {}, "MambaForCausalLM", "whose running state cannot be rolled back"),
    (transformers.JambaConfig, {}, "JambaForCausalLM", "whose running state cannot be rolled back"),
    (transformers.Qwen3NextConfig, {}, "Qwen3NextForCausalLM", "whose running state cannot be rolled back"),
    (transformers.OlmoHybridConfig, {}, "OlmoHybridForCausalLM", "linear_attention, but only layers that can"),
    (transformers.T5Config, {}, "T5ForConditionalGeneration", "has an encoder"),
    (transformers.BloomConfig, {}, "BloomForCausalLM", "whose attention cannot be replaced"),
    (transformers.MptConfig, {}, "MptForCausalLM", "whose attention cannot be replaced"),
    (transformers.FalconConfig, {}, "FalconForCausalLM", "whose attention cannot be replaced"),
    (transformers.Gemma2Config, SMALL | {"head_dim": 12}, "Gemma2ForCausalLM", "a cap on attention scores"),
    (transformers.AriaTextConfig, SMALL, "AriaTextForCausalLM", "keeps its experts transposed"),
    (transformers.GraniteSWAConfig, SMALL | {"num_key_value_heads": 2}, "GraniteSWAForCausalLM", "attention sinks"),
    (transformers.DeepseekV3Config, SMALL, "DeepseekV3ForCausalLM", "not of one size"),
    (transformers.Llama4TextConfig, SMALL, "Llama4ForCausalLM", "names chunked_attention"),
    (transformers.DogeConfig, SMALL | {"num_experts": 16}, "DogeForCausalLM", "makes an attention mask of its own"),
    (
        transformers.NemotronConfig,
        SMALL | {"num_key_value_heads": 2},
        "NemotronForCausalLM",
        "does not hand keywords down",
    ),
    (transformers.Mistral3Config, {}, "Mistral3ForConditionalGeneration", "made of several models"),
    (transformers.WhisperConfig, {}, "WhisperForCausalLM", "has an encoder"),
    (transformers.BertConfig, SMALL, "BertLMHeadModel", "is no decoder"),
    (transformers.GPT2Config, {}, "GPT2ForSequenceClassification", "which is no causal language model"),
]


@pytest.mark.parametrize(
    ("kind", "keys", "architecture", "words"), ARCHITECTURES, ids=[case[2] for case in ARCHITECTURES]
)
def test_architectures_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, kind: type[transformers.PretrainedConfig], keys: dict[str, Any], architecture: str, words: str
) -> None:
    """State, encoders, ALiBi, caps, sinks, latent attention, masks of one's own, pictures: each has its sentence."""
    folder = write_config(tmp_path / "model", kind(**keys), architecture)
    message = refusal(lambda: find_checkpoint(str(folder)))
    assert architecture in message or "layer_types" in message
    assert words in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["InventedForCausalLM"], "model_type": "invented"}, "'invented', which transformers-5."),
        ({"model_type": None}, '"model_type" is None'),
        ({"auto_map": {"AutoModelForCausalLM": "code.Model"}}, '"auto_map" asks for code from the model\'s repository'),
        ({"quantization_config": {"quant_method": "gptq"}}, '"quantization_config" is set, but only unquantized'),
        ({"transformers_weights": "other.safetensors"}, '"transformers_weights" is set, but only a model\'s own'),
        ({"vision_config": {"hidden_size": 4}}, '"vision_config" is there'),
        ({"is_encoder_decoder": True}, '"is_encoder_decoder" is set'),
        ({"n_embd": 47}, "GPT2LMHeadModel cannot be made: "),
        ({"n_embd": "many"}, "is refused by transformers-5."),
        ({"n_positions": 0}, '"max_position_embeddings" is 0, but must be an integer of at least 1'),
        ({"layer_types": ["full_attention", "mamba"]}, '"layer_types" names linear_attention'),
        ({"eos_token_id": -2}, "eos_token_id"),
        ({"n_layer": 10**9}, '"n_layer" is 1000000000, but at most 4096 are served'),
        ({"num_local_experts": 10**6}, '"num_local_experts" is 1000000, but at most 4096 are served'),
        ({"num_labels": 10**9}, '"num_labels" is 1000000000, but at most 4096 are served'),
    ],
)
def test_configurations_that_do_not_fit_are_refused(gpt2: Path, changes: dict[str, object], words: str) -> None:
    """The key is named, or what its class says about it."""
    if "eos_token_id" in changes:
        (gpt2 / "generation_config.json").unlink()
    assert words in refusal(lambda: find_checkpoint(str(edit_config(gpt2, **changes))))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_mixture_of_no_experts_is_refused(tmp_path: Path) -> None:
    """transformers makes it, and fails where it asks which files would hold it."""
    folder = edit_config(write_tiny_model(tmp_path / "tiny", "mixtral"), num_local_experts=0)
    assert "MixtralForCausalLM cannot be stored: " in refusal(lambda: find_checkpoint(str(folder)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query_pre_attn_scalar": -1}, "multiplies its attention scores by "),
        ({"sliding_window": 0}, "has a window of 0 in layer 0, but it must be at least 1"),
    ],
)
def test_attention_that_cannot_be_computed_is_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    """What a class takes as it stands, the kernels would not."""
    folder = edit_config(write_tiny_model(tmp_path / "tiny", "gemma3", final_logit_softcapping=3.0), **changes)
    assert words in refusal(lambda: find_checkpoint(str(folder)))


def test_an_adapter_is_refused(gpt2: Path) -> None:
    """It would make another model of this one, whose weights were not looked at."""
    (gpt2 / "adapter_config.json").write_text("{}")
    assert "is an adapter of another model" in refusal(lambda: find_checkpoint(str(gpt2)))


@pytest.mark.parametrize("generation", [{"cache_implementation": "other"}, {"watermarking_config": {"key": 1}}])
def test_what_only_loading_finds_is_a_sentence_too(gpt2: Path, generation: dict[str, object]) -> None:
    """transformers reads generation_config.json when it loads the weights, and refuses it in errors of its own."""
    (gpt2 / "generation_config.json").write_text(json.dumps(generation))
    assert "is refused by transformers-" in refusal(lambda: ModelRunner.load(str(gpt2), kv_tokens=64))


NORM = "transformer.h.1.ln_1.weight"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tensors: tensors.pop(NORM), f"lacks the tensor {NORM}"),
        (lambda tensors: tensors.update(stray=tensors[NORM].clone()), "holds the tensor stray, which config.json"),
        (lambda tensors: tensors.update({NORM: tensors[NORM][:7].clone()}), f"{NORM} has the shape [7], but config"),
        (lambda tensors: tensors.update({NORM: tensors[NORM].char()}), f"{NORM} has the type I8"),
        (lambda tensors: tensors.pop("transformer.wte.weight"), "lacks the tensor transformer.wte.weight"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_before_any_is_read(
    gpt2: Path, monkeypatch: pytest.MonkeyPatch, edit: Callable[[dict[str, Tensor]], object], words: str
) -> None:
    """Missing, unexpected, misshapen and quantized tensors are named, from the headers alone."""
    tensors = load_file(gpt2 / "model.safetensors")
    edit(tensors)
    save_file(tensors, gpt2 / "model.safetensors")
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", None)
    assert words in refusal(lambda: ModelRunner.load(str(gpt2), kv_tokens=64))


def test_a_truncated_file_is_refused(gpt2: Path) -> None:
    """A download that broke off is a refused model, not a crash."""
    file = gpt2 / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "not a sound safetensors file" in refusal(lambda: ModelRunner.load(str(gpt2), kv_tokens=64))


def surveyed(monkeypatch: pytest.MonkeyPatch, forward: Callable[[nn.Module, Tensor], Tensor]) -> str:
    """What the survey says about a model whose blocks compute something else."""
    config = transformers.Olmo2Config(**SMALL)
    config._attn_implementation = "outrider"
    monkeypatch.setattr(transformers.models.olmo2.modeling_olmo2.Olmo2MLP, "forward", forward)
    with pytest.raises(Unfit) as caught:
        survey(without_numbers(transformers.Olmo2ForCausalLM, config), 64, frozenset())
    return str(caught.value)


def test_rows_that_are_mixed_outside_of_attention_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix products of torch's own, convolutions and running sums, wherever they hide."""
    matrix = torch.empty(48, 48, device="meta")
    assert "multiplies matrices with torch's" in surveyed(monkeypatch, lambda module, rows: rows @ matrix)
    assert "with torch's einsum" in surveyed(
        monkeypatch, lambda module, rows: torch.einsum("brc,cd->brd", rows, matrix)
    )
    assert "mixes rows with torch's cumsum" in surveyed(monkeypatch, lambda module, rows: rows.cumsum(1))
    kernel = torch.empty(3, 3, 1, device="meta")
    assert "mixes rows with torch's conv1d" in surveyed(monkeypatch, lambda module, rows: torch.conv1d(rows, kernel))
