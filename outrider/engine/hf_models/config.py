"""Facts of a model, and whether it can be served: by its files, and by one forward without numbers.

What cannot be served is refused by name, before any of its weights is read.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.engine.hf_models.decoder import NAME, AttentionCall, layer_of
from outrider.engine.models.config import MAX_LAYERS, DecoderFacts, read_architecture
from outrider.engine.models.json_keys import JsonKeys, read_json
from outrider.engine.models.rope_keys import FULL, SLIDING
from outrider.errors import ModelRefused

PACKAGE = f"transformers-{transformers.__version__}"
# What would make transformers read other files than those that are checked here.
ELSEWHERE = ("transformers_weights", "fusion_config")
SEVERAL_MODELS = ("vision_config", "audio_config", "text_config", "encoder", "decoder")
# Keys that say how many there are of what a class makes one by one, before anything else could refuse the number.
COUNTS = re.compile(r"(layer|expert|label)s?$")

SURVEY_ROWS = 3
# Keywords without a bearing on the result of an inference, and those that are none when they are None or false.
HARMLESS = ("dropout", "use_cache", "position_ids", "output_router_logits", "output_attentions")
PRODUCTS = (torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum, torch.tensordot,
            Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.baddbmm, Tensor.__matmul__, Tensor.__rmatmul__,
            functional.scaled_dot_product_attention)  # fmt: skip
ACROSS_ROWS = (torch.conv1d, torch.conv2d, functional.conv1d, functional.conv2d, torch.cumsum, Tensor.cumsum)


def read_configuration(folder: Path) -> PretrainedConfig:
    """The configuration, set up for our attention. Raises ModelRefused."""
    keys = JsonKeys(folder / "config.json", read_json(folder / "config.json"))
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
    for key, value in keys.values.items():
        if COUNTS.search(key) and isinstance(value, int) and value > MAX_LAYERS:
            raise keys.refuse(key, f"is {value}, but at most {MAX_LAYERS} are served")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what a class says about its keys has no common type
        raise ModelRefused(f"{keys.path} is refused by {PACKAGE}: {first_line(error)}", file=keys.path) from error
    unknown = set(getattr(config, "layer_types", None) or ()) - {FULL, SLIDING}
    if unknown:
        fault = f"names {min(unknown)}, but only layers that can be rolled back to any earlier token are served"
        raise keys.refuse("layer_types", fault)
    config._attn_implementation = NAME
    config._experts_implementation = NAME
    # A file may ask for tuples, and the decoder reads a field.
    config.return_dict = True
    pad, num_rows = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
    if isinstance(pad, int) and isinstance(num_rows, int) and not 0 <= pad < num_rows:
        # Nothing is ever filled up here, and some classes are not made with an id that has no row.
        config.pad_token_id = None
    for rope in _ropes(config):
        # Up to max_position_embeddings a "dynamic" embedding is the default one, and it asks the device every forward.
        if rope.get("rope_type") == "dynamic":
            rope["rope_type"] = "default"
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
        fault = f"is {found.__name__}, whose state cannot be rolled back to an earlier token"
        raise keys.refuse("architectures", fault)
    if not found._supports_attention_backend:
        fault = f"is {found.__name__}, whose attention cannot be replaced in {PACKAGE}, as our cache needs"
        raise keys.refuse("architectures", fault)
    return found


def first_line(error: BaseException) -> str:
    """Text of an error, as far as it fits into a sentence."""
    lines = (line.strip(". ") for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


def _ropes(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The rotary embeddings of a configuration: one, or one for each type of layer, or none."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


class Unfit(Exception):
    """A model does something that cannot be served; says what, without a subject."""


def survey(model: PreTrainedModel, context_len: int, eos_token_ids: frozenset[int]) -> DecoderFacts:
    """Sizes of a model on the meta device, found by watching one forward; raises Unfit."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embedding is None or head.weight.shape[0] != embedding.weight.shape[0]:
        raise Unfit("does not embed the tokens that it predicts")
    if any(getattr(module, "is_transposed", False) for module in model.modules()):
        raise Unfit("keeps its experts transposed, and multiplies them in sums that depend on the number of rows")
    stored: list[tuple[int, int, int]] = []

    def look(call: AttentionCall) -> Tensor:
        """Stands where the cache stands in a real forward; returns no numbers."""
        _check_call(call)
        stored.append((layer_of(call), call.key.shape[1], call.key.shape[3]))
        return torch.empty_like(call.query.transpose(1, 2))

    rows = torch.zeros(1, SURVEY_ROWS, dtype=torch.int64, device="meta")
    wanted = torch.zeros(2, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), _Watch():
            model(input_ids=rows, position_ids=rows, use_cache=False, logits_to_keep=wanted, outrider=look)
    except Unfit:
        raise
    except Exception as error:  # any code may run here
        raise Unfit(f"cannot be run with our attention: {first_line(error)}") from error
    if sorted(layer for layer, *_ in stored) != list(range(len(stored))) or not stored:
        raise Unfit("does not call our attention once in every layer")
    sizes = sorted({(heads, size) for _, heads, size in stored})
    if len(sizes) > 1:
        raise Unfit("stores keys of different shapes in its layers: " + " and ".join(map(str, sizes)))
    return DecoderFacts(head.weight.shape[0], len(stored), *sizes[0], context_len, eos_token_ids)


def _check_call(call: AttentionCall) -> None:
    if call.key.shape != call.value.shape or call.query.shape[3] != call.key.shape[3]:
        sizes = call.query.shape[3], call.key.shape[3], call.value.shape[3]
        raise Unfit(f"has heads of {sizes[0]}, {sizes[1]} and {sizes[2]} for queries, keys and values, not of one size")
    if call.key.shape[2] != SURVEY_ROWS or call.query.shape[0] != 1:
        raise Unfit("stores other rows than those of its tokens")
    if call.mask is not None:
        raise Unfit("makes an attention mask of its own")
    if not getattr(call.module, "is_causal", True) or call.others.get("is_causal") is False:
        raise Unfit("looks at tokens behind a token, and is no decoder")
    types: Sequence[str] | None = getattr(getattr(call.module, "config", None), "layer_types", None)
    if types and (types[layer_of(call)] == SLIDING) and call.window is None:
        raise Unfit(f"does not say how wide the window of layer {layer_of(call)} is")
    if call.window is not None and call.window < 1:
        raise Unfit(f"has a window of {call.window} in layer {layer_of(call)}, but it must be at least 1")
    if not isinstance(call.scale, int | float) or not 0 < call.scale < inf:
        raise Unfit(f"multiplies its attention scores by {call.scale!r}, which is no positive number")
    given = {name for name, value in call.others.items() if value is not None and value is not False}
    strange = sorted(given - {*HARMLESS, "is_causal"})
    if strange:
        names = {"softcap": "a cap on attention scores", "s_aux": "attention sinks"}
        raise Unfit(f"needs {names.get(strange[0], strange[0])} in its attention, which ours has not")


class _Watch(TorchFunctionMode):
    """Refuses what would make a row depend on its neighbours or their number."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = getattr(func, "__name__", str(func))
        first = next((arg for arg in args if isinstance(arg, Tensor)), None)
        # With one term in each sum, as in rotary frequencies times positions, nothing is summed.
        is_outer = first is not None and first.dim() > 1 and first.shape[-1] == 1
        if func in PRODUCTS and not is_outer:
            raise Unfit(f"multiplies matrices with torch's {name}, whose sums depend on the number of rows")
        if func in ACROSS_ROWS:
            raise Unfit(f"mixes rows with torch's {name}")
        return func(*args, **(kwargs or {}))
