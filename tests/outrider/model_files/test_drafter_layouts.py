"""Published drafters that are no models are refused by name as one, also by doctor; and as a head if not served."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.heads.tiny_heads import tiny_target

from outrider.cli.doctor.models import read_model
from outrider.engine.heads.checkpoint import read_head
from outrider.engine.models.checkpoints import find_checkpoint
from outrider.errors import ModelRefused
from outrider.model_files.drafter_layouts import refused_drafter

LAYER = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2}
# config.json of each publisher, as far as it says what it is; and the name that the refusal has.
HEADS: dict[str, tuple[dict[str, Any], str]] = {
    "z-lab": (
        {
            **LAYER,
            "architectures": ["DFlashDraftModel"],
            "block_size": 16,
            "dflash_config": {"target_layer_ids": [1, 9], "mask_token_id": 151669},
        },
        "DFlash drafter",
    ),
    "z-lab-qwen3.5": (
        {**LAYER, "architectures": ["DFlashDraftModel"], "dflash_config": {"block_size": 16}},
        "DFlash dr",
    ),
    "speculators-dflash": ({"speculators_model_type": "dflash", "mask_token_id": 5}, "DFlash drafter"),
    "deepspec-dflash": ({**LAYER, "architectures": ["Qwen3DFlashModel"]}, "DFlash drafter"),
}
PUBLISHED: dict[str, tuple[dict[str, Any], str]] = {
    "z-lab-2": ({**LAYER, "architectures": ["DFlash2DraftModel"], "dflash_config": {"selector_rank": 256}}, "DFlash 2"),
    "renamed-2": ({"architectures": ["DFlashDraftModel"], "dflash_config": {"conv_kernel_size": 2}}, "DFlash 2"),
    "speculators-2": ({"speculators_model_type": "dflash2"}, "DFlash 2"),
    "deepspec": (
        {**LAYER, "architectures": ["Qwen3DSparkModel"], "markov_rank": 256, "sample_from_anchor": True},
        "DSpark",
    ),
    "deepspec-gemma": ({"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text"}, "DSpark"),
    "renamed-dspark": ({"architectures": ["DFlashDraftModel"], "dflash_config": {"markov_rank": 64}}, "DSpark"),
    "speculators-dspark": ({"speculators_model_type": "dspark"}, "DSpark"),
    "amazon": ({"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 200020, "model_type": "llama"}, "P-EAGLE"),
    "vllm-peagle": ({"architectures": ["LlamaForCausalLMEagle3"], "parallel_drafting": True}, "P-EAGLE"),
    "speculators-peagle": ({"speculators_model_type": "peagle", "pard_token": 0}, "P-EAGLE"),
    "pard-2": ({**LAYER, "architectures": ["Qwen3ForCausalLM"], "pard_token": 5, "spd_type": "pard2"}, "PARD-2"),
    "pard-2-by-its-keys": ({"architectures": ["LlamaForCausalLM"], "pard_token": 5, "pard2_scale": 0.02}, "PARD-2"),
    "gemma": ({"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant"}, "Gemma 4"),
    "xpress": ({"speculators_model_type": "xpress"}, "XPress"),
}
SERVED: list[dict[str, Any]] = [
    {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    {"architectures": ["LlamaForCausalLM"], "pard_token": 128256, "spd_type": "pard"},
    {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000},
    {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"},
    {"architectures": "LlamaForCausalLM", "dflash_config": None},
    {"speculators_model_type": "eagle3"},
    {},
]


@pytest.mark.parametrize(("config", "name"), (PUBLISHED | HEADS).values(), ids=(PUBLISHED | HEADS).keys())
def test_a_drafter_that_is_no_model_is_refused_by_name(tmp_path: Path, config: dict[str, Any], name: str) -> None:
    """The same sentence everywhere, with the folder, what it holds and why, and before any weight is looked for.

    Of one that is served as a head it says so.
    """
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    what = refused_drafter(config)
    assert what is not None
    assert name in what
    is_head = (config, name) in HEADS.values()
    assert what.endswith("name it with --head, beside its target") == is_head
    reads = [lambda: find_checkpoint(str(folder)), lambda: read_model("draft", str(folder))]
    for read in (*reads, *([] if is_head else [lambda: read_head(folder, tiny_target())])):
        with pytest.raises(ModelRefused) as caught:
            read()
        assert caught.value.message == f"{folder} holds {what}"


@pytest.mark.parametrize("config", SERVED)
def test_what_is_served_is_no_such_drafter(config: dict[str, Any]) -> None:
    """Models, heads of EAGLE, and PARD, which is a model."""
    assert refused_drafter(config) is None


@pytest.mark.parametrize("config", [config for config, _ in HEADS.values()])
def test_a_block_drafter_is_served_as_a_head(config: dict[str, Any]) -> None:
    """Nothing refuses it by its name alone."""
    assert refused_drafter(config, is_head=True) is None
