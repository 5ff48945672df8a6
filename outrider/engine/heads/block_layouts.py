"""The layouts of block drafters: DFlash as its authors publish it, others who keep their names, and speculators.

The keys of a drafter stand in "dflash_config" or beside it. Those of its layers are a Qwen 3's, with transformers'
defaults where a file leaves them out. What other publishers' switches would change and is not computed is refused.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.engine.heads.block_head import METHOD, BlockHead, BlockHeadConfig
from outrider.engine.heads.feature_checkpoint import (
    FeatureCheckpoint,
    check_head_tensors,
    draft_vocabulary,
    of_whose_vocabulary,
)
from outrider.engine.heads.head import TargetParts
from outrider.engine.heads.layouts import LAYER_CONFIG, OUTER, HeadReading
from outrider.engine.models.config import Masks, ModelConfig, switched_by_layer
from outrider.engine.models.json_keys import JsonKeys
from outrider.engine.models.weights import EMBEDDING, expected_shapes
from outrider.model_files.safetensors_header import StoredTensor

NAMES = OUTER | {"fc.": "features.", "hidden_norm.": "features.norm.", "layers.": "layers."}
# Of transformers' Qwen 3: speculators writes only what differs from them.
QWEN_3 = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
# Of the authors' code and of speculators'.
BLOCK_SIZE, SPECULATORS_BLOCK_SIZE = 16, 8
MAX_BLOCK_SIZE = 64
# What each switch must be where it is there, and why.
SERVED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "use_aux_hidden_state": ((True,), "the features are all that such a drafter reads"),
    "projector_type": (("dflash",), "other projectors correct guesses by those before them"),
    "shift_label": ((False,), "guesses of the next place are served with sample_from_anchor alone"),
    "causal_head": ((False,), "JetSpec's causal heads are not served"),
    "use_swa": ((False,), "windows are served by layer_types alone"),
    "attention_sink_bias": ((False,), "attention to nothing is not served here"),
    "add_swa_attention_sink_bias": ((False,), "attention to nothing is not served here"),
    "attention_value_scale": ((1,), "values are served as they are"),
    "is_neox_style": ((True,), "rotary embeddings that pair neighbours are not served"),
}


def read_dflash(
    folder: Path, config: Mapping[str, Any], stored: Mapping[str, StoredTensor], target: TargetParts
) -> FeatureCheckpoint:
    """DFlash, in the layout of any publisher that names its tensors as the authors do."""
    reading = HeadReading.of(folder, config, stored, NAMES)
    is_speculators = config.get("speculators_model_type") is not None
    nested = reading.inside("dflash_config")
    keys = replace(
        reading.keys,
        values={**reading.keys.values, **{key: each for key, each in nested.values.items() if each is not None}},
        spelled={key: f"dflash_config.{key}" for key in nested.values},
    )
    for name, (served, reason) in SERVED.items():
        if keys.values.get(name) is not None and keys.values[name] not in served:
            raise keys.refuse(name, f"is {keys.values[name]!r}, but must be {served[0]!r}, or left out: {reason}")
    sizes, is_sliding = _read_layers(reading.inside(LAYER_CONFIG) if is_speculators else keys, target, reading.notes)
    num_target_layers = keys.integer("num_target_layers", target.num_layers)
    if num_target_layers != target.num_layers:
        raise keys.refuse("num_target_layers", f"is {num_target_layers}, but the target has {target.num_layers} layers")
    # Speculators counts boundaries; elsewhere ids are of layers, whose outputs are meant.
    name, shift = ("aux_hidden_state_layer_ids", 0) if is_speculators else ("target_layer_ids", 1)
    taps = reading.boundaries(keys, name, shift, target.num_layers)
    masks = _read_masks(reading, keys, target, is_speculators)
    narrowest = min((window for window in sizes.windows if window is not None), default=MAX_BLOCK_SIZE)
    if narrowest < (masks.block_size or 0):
        raise keys.refuse("sliding_window", f"is {narrowest}, but must hold a block of {masks.block_size}")
    cap = keys.number("final_logit_softcapping", 0, minimum=0)
    law = BlockHeadConfig(
        method=METHOD,
        taps=taps,
        layers=sizes,
        masks=masks,
        causal=_read_causal(reading, keys, is_sliding),
        context_len=min(sizes.context_len, target.context_len),
        embedding_scale=keys.number("input_embedding_scale", 1),
        logit_scale=keys.number("output_multiplier", 1),
        logit_cap=cap or None,
    )
    files = reading.files_of(replace(keys, values={**keys.values, "hidden_size": sizes.hidden_size}), METHOD, taps)
    draft_vocab_size = draft_vocabulary(files, target, sizes.hidden_size)
    check_head_tensors(files, target, *block_tensors(law, target, draft_vocab_size))
    notes = (
        *reading.notes,
        f"rope_theta: {sizes.ropes[0].theta:g}",
        f"rope_scaling: {type(sizes.ropes[0]).__name__}",
        f"context: {law.context_len} positions",
        *of_whose_vocabulary(files, target, draft_vocab_size),
    )
    return FeatureCheckpoint(files=files, law=law, draft_vocab_size=draft_vocab_size, notes=notes, make=BlockHead)


def block_tensors(
    law: BlockHeadConfig, target: TargetParts, draft_vocab_size: int
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Names and shapes of a block drafter's tensors: those that it must have, and those that it may have."""
    width, outer = law.hidden_size, ("model.norm.weight", EMBEDDING, "lm_head.weight")
    layers = expected_shapes(law.layers).items()
    required = {name.removeprefix("model."): shape for name, shape in layers if name not in outer}
    required |= {
        "features.weight": (width, len(law.taps) * target.hidden_size),
        "features.norm.weight": (width,),
        "out_norm.weight": (width,),
    }
    return required, {"embedding.weight": (target.vocab_size, width), "head.weight": (draft_vocab_size, width)}


def _read_layers(keys: JsonKeys, target: TargetParts, notes: list[str]) -> tuple[ModelConfig, list[bool]]:
    """Sizes of the layers, and which of them have a window by the file. Raises ModelRefused."""
    kind = keys.values.get("model_type", "qwen3")
    if kind != "qwen3":
        raise keys.refuse("model_type", f"is {kind!r}, but only layers of qwen3 are served in such a drafter")
    absent = {key: default for key, default in QWEN_3.items() if keys.values.get(key) is None}
    notes += [f"{key}: {default} (default)" for key, default in absent.items()]
    # Neither the publisher's code nor the names of his classes matter here, and masks are not those of PARD.
    ours: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "auto_map": None, "pard_token": None}
    vocab_size = keys.integer("vocab_size", target.vocab_size)
    if vocab_size != target.vocab_size:
        raise keys.refuse("vocab_size", f"is {vocab_size}, but the target has {target.vocab_size}")
    layers = replace(keys, values={**keys.values, **absent, **ours, "vocab_size": vocab_size})
    sizes = ModelConfig.of(layers, frozenset())
    return sizes, [window is not None for window in switched_by_layer(layers, sizes.num_layers)]


def _read_masks(reading: HeadReading, keys: JsonKeys, target: TargetParts, is_speculators: bool) -> Masks:
    default = SPECULATORS_BLOCK_SIZE if is_speculators else BLOCK_SIZE
    size = keys.integer("block_size", default, minimum=2, maximum=MAX_BLOCK_SIZE)
    reading.notes.append(f"block_size: {size}{' (default)' if keys.values.get('block_size') is None else ''}")
    token_id = keys.integer("mask_token_id", minimum=0, maximum=target.vocab_size - 1)
    reading.notes.append(f"mask_token_id: {token_id}")
    if not is_speculators and "dflash_config" not in reading.config and keys.values.get("sample_from_anchor") is None:
        # DeepSpec's code for both methods reads the last token's row, which the authors' does not.
        raise keys.refuse("sample_from_anchor", "is missing, and without dflash_config it may have been meant")
    guesses_next = reading.switch((keys,), "sample_from_anchor")
    return Masks(token_id, size, 0 if guesses_next else 1)


def _read_causal(reading: HeadReading, keys: JsonKeys, is_sliding: list[bool]) -> tuple[bool, ...]:
    """Which layers are causal within the block: all or none where a file says so, else those with a window."""
    name = next((each for each in ("is_causal", "causal") if keys.values.get(each) is not None), None)
    if name is not None:
        causal = [keys.flag(name)] * len(is_sliding)
    else:
        sees_all = any(is_sliding) and reading.switch((keys,), "sliding_window_non_causal")
        causal = [each and not sees_all for each in is_sliding]
    places = [str(place) for place, each in enumerate(causal) if each]
    reading.notes.append(f"causal layers: {', '.join(places) or 'none'}")
    return tuple(causal)
