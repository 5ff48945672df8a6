"""Reads what transformers says about a model, and refuses by name what cannot be served."""

import re
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.engine.hf_models import decoder
from outrider.engine.models.config import MAX_LAYERS, JsonKeys, read_architecture, read_json
from outrider.errors import ModelRefused

PACKAGE = f"transformers-{transformers.__version__}"
# What would make transformers read other files than those that are checked here.
ELSEWHERE = ("transformers_weights", "fusion_config")
SEVERAL_MODELS = ("vision_config", "audio_config", "text_config", "encoder", "decoder")
LAYER_TYPES = ("full_attention", "sliding_attention")
# Keys that say how many there are of what a class makes one by one, before anything else could refuse the number.
COUNTS = re.compile(r"(layer|expert|label)s?$")


def read_configuration(folder: Path) -> PretrainedConfig:
    """The configuration, set up for our attention. Raises ModelRefused."""
    keys = JsonKeys(folder / "config.json", read_json(folder / "config.json"))
    _refuse_kinds(keys)
    _refuse_counts(keys)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what a class says about its keys has no common type
        raise ModelRefused(f"{keys.path} is refused by {PACKAGE}: {first_line(error)}", file=keys.path) from error
    unknown = set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES)
    if unknown:
        fault = f"names {min(unknown)}, but only layers that can be rolled back to any earlier token are served"
        raise keys.refuse("layer_types", fault)
    config._attn_implementation = decoder.NAME
    config._experts_implementation = decoder.NAME
    # A file may ask for tuples, and the decoder reads a field.
    config.return_dict = True
    for rope in _ropes(config):
        _hold_still(rope)
    return config


def context_len(folder: Path, config: PretrainedConfig) -> int:
    """Longest sequence in tokens: as far as the model's rotary frequencies depend on the position alone.

    transformers computes those of "longrope" anew for each forward, from the longest of the rows that happen to be in
    it; up to the original positions they are always the same.
    """
    # Some classes call it otherwise in the file, and have a default where the file is silent.
    values = {"max_position_embeddings": getattr(config, "max_position_embeddings", None)}
    keys = JsonKeys(folder / "config.json", values)
    longest = keys.integer("max_position_embeddings")
    for rope in _ropes(config):
        if rope.get("rope_type") == "longrope":
            longest = min(longest, JsonKeys(keys.path, rope).integer("original_max_position_embeddings"))
    return longest


def model_class(folder: Path) -> type[PreTrainedModel]:
    """The class that config.json names, if it lets its attention be replaced. Raises ModelRefused."""
    keys = JsonKeys(folder / "config.json", read_json(folder / "config.json"))
    found: type[PreTrainedModel] = getattr(transformers, read_architecture(keys))
    if found._is_stateful:
        raise keys.refuse(
            "architectures", f"is {found.__name__}, whose state cannot be rolled back to an earlier token"
        )
    if not found._supports_attention_backend:
        fault = f"is {found.__name__}, whose attention cannot be replaced in {PACKAGE}, as our cache needs"
        raise keys.refuse("architectures", fault)
    return found


def first_line(error: BaseException) -> str:
    """What an error says, as far as it fits into a sentence."""
    lines = (line.strip(". ") for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


def _refuse_kinds(keys: JsonKeys) -> None:
    name = read_architecture(keys)
    if keys.values.get("is_encoder_decoder"):
        raise keys.refuse("is_encoder_decoder", f"is set: {name} has an encoder, and only decoders are served")
    elsewhere = next((key for key in ELSEWHERE if keys.values.get(key)), None)
    if elsewhere is not None:
        raise keys.refuse(elsewhere, "is set, but only a model's own weights in its own layout are served")
    several = next((key for key in SEVERAL_MODELS if isinstance(keys.values.get(key), dict)), None)
    if several is not None:
        raise keys.refuse(several, f"is there: {name} is made of several models, and only those of text are served")
    model_type = keys.values.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise keys.refuse("model_type", f"is {model_type!r}, which {PACKAGE} does not know")
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) != name:
        fault = f'is {name}, which is no causal language model of the "model_type" {model_type!r} in {PACKAGE}'
        raise keys.refuse("architectures", fault)


def _refuse_counts(keys: JsonKeys) -> None:
    for key, value in keys.values.items():
        if COUNTS.search(key) and isinstance(value, int) and value > MAX_LAYERS:
            raise keys.refuse(key, f"is {value}, but at most {MAX_LAYERS} are served")


def _ropes(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The rotary embeddings of a configuration: one, or one for each type of layer, or none."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def _hold_still(rope: dict[str, Any]) -> None:
    # Up to max_position_embeddings a "dynamic" embedding is the default one, and it asks the device at every forward.
    if rope.get("rope_type") == "dynamic":
        rope["rope_type"] = "default"
