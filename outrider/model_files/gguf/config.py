"""Keys of config.json for a GGUF file, as transformers would give them to the same model.

Keys of GGUF carry the architecture's name in front, as in `llama.block_count`; here they stand without it. Whatever
would make other numbers than the families that are served, and cannot be said in those keys, is refused by name.
"""

from array import array
from collections.abc import Mapping, Sequence
from math import nextafter
from typing import Any

from outrider.errors import ModelRefused, shown
from outrider.model_files.gguf.header import GgufFile

# Values of "layer_types".
FULL, SLIDING = "full_attention", "sliding_attention"
# Mistral's models, and many others of Llama's shape, call themselves llama.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
MISTRAL = "MistralForCausalLM"
# What others have that is not served, where a reader may expect them.
UNSERVED = {"gemma2": "has caps on attention scores and logits, which are not served"}
# Keys of config.json, and those of GGUF that hold the same.
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
SCALING = {
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
# Keys that are looked at one by one.
LOOKED_AT = ("attention.value_length", "rope.dimension_count", "attention.sliding_window")
# Those of one architecture.
OWN: Mapping[str, Mapping[str, str]] = {
    "gemma3": {
        "sliding_window": "attention.sliding_window",
        "sliding_window_pattern": "attention.sliding_window_pattern",
        "layer_types": "attention.sliding_window_pattern",
        "rope_local_base_freq": "rope.freq_base_swa",
    },
    "qwen3moe": {
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    },
    "gpt-oss": {
        "sliding_window": "attention.sliding_window",
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "intermediate_size": "expert_feed_forward_length",
    },
    "phi3": {
        "sliding_window": "attention.sliding_window",
        "partial_rotary_factor": "rope.dimension_count",
        "attention_factor": "rope.scaling.attn_factor",
    },
}
# Of Gemma 3 27B, whose scores are scaled by the width of a head where others have the size of its keys.
LAYERS_OF_27B = 62
# What would change the numbers, with the only values at which it does not. A factor of 0 is switched off.
NEUTRAL: Mapping[str, Sequence[float]] = {
    "expert_count": (0,),
    "rope.scale_linear": (1.0, 0.0),
    "rope.scaling.attn_factor": (1.0, 0.0),
    "rope.scaling.yarn_attn_factor": (1.0, 0.0),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.output_scale": (0.0, 1.0),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0.0,),
    "attention.causal": (True,),
    "logit_scale": (1.0, 0.0),
    "residual_scale": (1.0, 0.0),
    "embedding_scale": (1.0, 0.0),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
}
# What is for nothing here: a number of rows that the embedding has, and what converters and other programs look at.
NOTHING = (
    "vocab_size",
    "tensor_data_layout",
    "rope.scaling.finetuned",
    "attention.layer_norm_epsilon",
    "expert_used_count",
    "pooling_type",
    "decoder_start_token_id",
)
KNOWN = frozenset((*KEYS.values(), *SCALING.values(), *LOOKED_AT, *NOTHING))
# Ids that stand for none: -1, and what it becomes where only 32 bits without a sign are written.
NO_TOKEN = (-1, 2**32 - 1)
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def architecture_of(file: GgufFile) -> str:
    """`general.architecture`, one of ARCHITECTURES. Raises ModelRefused."""
    found = file.metadata.get("general.architecture")
    if isinstance(found, str) and found in UNSERVED:
        raise file.refuse("general.architecture", f"is {found!r}, which {UNSERVED[found]}")
    if not isinstance(found, str) or found not in ARCHITECTURES:
        raise file.refuse("general.architecture", f"is {shown(found)}, but must be one of {', '.join(ARCHITECTURES)}")
    return found


def spelled(file: GgufFile) -> dict[str, str]:
    """Names in the file of the keys of `json_config`, for errors."""
    prefix = architecture_of(file)
    return {key: f"{prefix}.{name}" for key, name in (KEYS | SCALING | dict(OWN.get(prefix, {}))).items()}


def json_config(file: GgufFile) -> dict[str, Any]:
    """The keys of config.json, those that the file states or its tensors show. Raises ModelRefused.

    Values are as the file has them: the reader checks types and limits as for any config.json.
    """
    name = architecture_of(file)
    given = {key.removeprefix(f"{name}."): value for key, value in file.metadata.items() if key.startswith(f"{name}.")}
    config = {key: given[spelling] for key, spelling in KEYS.items() if spelling in given}
    missing = next((key for key in REQUIRED if key not in config), None)
    if missing is not None:
        raise file.refuse(f"{name}.{KEYS[missing]}", "is missing")
    for key, value in given.items():
        neutral = NEUTRAL.get(key)
        is_off = not any(value) if isinstance(value, array | list) else not value
        is_known = key in KNOWN or key in OWN.get(name, {}).values()
        if not is_known and not (is_off if neutral is None else value in neutral):
            unknown = "a key that is not known here and may change the numbers"
            limit = unknown if neutral is None else f"but only {neutral[0]!r} is served"
            raise file.refuse(f"{name}.{key}", f"is {shown(value)}, {limit}")
    embedding = file.tensors.get(EMBEDDING)
    if embedding is None:
        raise ModelRefused(f"{file.path} lacks the tensor {EMBEDDING}", file=file.path, tensor=EMBEDDING)
    heads, width = config["num_attention_heads"], config["hidden_size"]
    if "head_dim" not in config and type(heads) is int and type(width) is int and heads > 0:
        config["head_dim"] = width // heads
    for key in ("attention.value_length", *(() if name == "phi3" else ("rope.dimension_count",))):
        if given.get(key, config.get("head_dim")) != config.get("head_dim"):
            limit = f"the size of a head, {shown(config.get('head_dim'))}"
            raise file.refuse(f"{name}.{key}", f"is {shown(given[key])}, but must be {limit}")
    scaling = {key: given[spelling] for key, spelling in SCALING.items() if spelling in given}
    if scaling.get("rope_type") not in (None, "none"):
        config["rope_scaling"] = scaling
    config |= {
        "architectures": [ARCHITECTURES[name]],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": OUTPUT not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }
    named = {file.metadata[key] for key in ENDS if type(file.metadata.get(key)) is int}
    ends = sorted(named - set(NO_TOKEN))
    config |= {"eos_token_id": ends} if ends else {}
    window = given.get("attention.sliding_window", 0)
    window = 0 if window == -1 else window
    if type(window) is not int or window < 0:
        key = f"{name}.attention.sliding_window"
        raise file.refuse(key, f"is {shown(window)}, but must be a number of positions")
    own = {"gemma3": _of_gemma, "phi3": _of_phi, "qwen3moe": _of_experts, "gpt-oss": _of_gpt_oss}.get(name, _of_mistral)
    return config | own(file, config, given, window)


def _of_mistral(file: GgufFile, config: Mapping[str, Any], _: Mapping[str, Any], window: int) -> dict[str, Any]:
    """What a window makes of a Llama."""
    name, context_len = architecture_of(file), config["max_position_embeddings"]
    if not window or (type(context_len) is int and window >= context_len):
        return {}
    if name != "llama" or config["attention_bias"] or config["mlp_bias"]:
        fault = f"is {window}, but does not say in which layers; only Mistral's shape has it in all"
        raise file.refuse(f"{name}.attention.sliding_window", fault)
    return {"architectures": [MISTRAL], "sliding_window": window}


def _of_gemma(_: GgufFile, config: Mapping[str, Any], given: Mapping[str, Any], window: int) -> dict[str, Any]:
    """The keys that Gemma 3 has beside those of all; llama.cpp knows the scale of scores by the number of layers."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    is_27b = config["num_hidden_layers"] == LAYERS_OF_27B and type(width) is type(heads) is int and heads > 0
    found = {"query_pre_attn_scalar": width // heads if is_27b else config.get("head_dim")}
    if "rope.freq_base_swa" in given:
        found["rope_local_base_freq"] = given["rope.freq_base_swa"]
    pattern = given.get("attention.sliding_window_pattern")
    if not window:
        # Every layer is the last of one.
        return found | {"sliding_window_pattern": 1}
    if isinstance(pattern, list | array):
        return found | {"sliding_window": window, "layer_types": [SLIDING if each else FULL for each in pattern]}
    return found | {"sliding_window": window} | ({} if pattern is None else {"sliding_window_pattern": pattern})


def _of_experts(file: GgufFile, config: Mapping[str, Any], given: Mapping[str, Any], window: int) -> dict[str, Any]:
    """The keys that Qwen 3 MoE has beside those of all; llama.cpp makes the shares of chosen experts add up to 1."""
    found = _all_of("qwen3moe", file, given)
    num_layers = config["num_hidden_layers"]
    layers = range(num_layers if type(num_layers) is int else 0)
    dense = [layer for layer in layers if f"blk.{layer}.ffn_gate.weight" in file.tensors]
    found |= {"norm_topk_prob": True, "mlp_only_layers": dense}
    return found | _of_mistral(file, config, given, window)


def _of_gpt_oss(file: GgufFile, config: Mapping[str, Any], given: Mapping[str, Any], window: int) -> dict[str, Any]:
    """The keys that gpt-oss has beside those of all; its yarn is not truncated, which no key of the format says."""
    found = _all_of("gpt-oss", file, given) | {"sliding_window": window or None}
    rope = config.get("rope_scaling")
    if rope is None:
        return found | {"rope_parameters": {"rope_type": "default"}}
    return found | {"rope_scaling": rope | {"truncate": False}}


def _all_of(name: str, file: GgufFile, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of its own that an architecture cannot do without; raises ModelRefused for the first that is missing."""
    missing = next((spelling for spelling in OWN[name].values() if spelling not in given), None)
    if missing is not None:
        raise file.refuse(f"{name}.{missing}", "is missing")
    return {key: given[spelling] for key, spelling in OWN[name].items()}


def _of_phi(file: GgufFile, config: Mapping[str, Any], given: Mapping[str, Any], window: int) -> dict[str, Any]:
    """The keys that Phi 3 and 4 have beside those of all; short factors are a tensor, and not among them."""
    head_dim, factor = config.get("head_dim"), given.get("rope.scaling.attn_factor")
    turning = given.get("rope.dimension_count", head_dim)
    if type(turning) is not int or type(head_dim) is not int or not 2 <= turning <= head_dim or turning % 2:
        limit = f"an even number from 2 to the size of a head, {shown(head_dim)}"
        raise file.refuse("phi3.rope.dimension_count", f"is {shown(turning)}, but must be {limit}")
    # The product with the size of a head is rounded down.
    found = {"partial_rotary_factor": nextafter(turning / head_dim, 1), "sliding_window": window or None}
    original = given.get("rope.scaling.original_context_length", config["max_position_embeddings"])
    if SHORT_FACTORS not in file.tensors:
        if factor not in (None, *NEUTRAL["rope.scaling.attn_factor"]):
            fault = f"is {shown(factor)}, but the file has no tensor {SHORT_FACTORS}"
            raise file.refuse("phi3.rope.scaling.attn_factor", fault)
        return found
    scaling = {"rope_type": "longrope", "attention_factor": factor}
    return found | {"rope_scaling": scaling, "original_max_position_embeddings": original}
