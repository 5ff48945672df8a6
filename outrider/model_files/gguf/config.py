"""Keys of config.json for a GGUF file, as transformers would give them to the same model.

Keys of GGUF carry the architecture's name in front, as in `llama.block_count`; here they stand without it. Whatever
would make other numbers than the families that are served, and cannot be said in those keys, is refused by name.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import ModelRefused, shown
from outrider.model_files.gguf.header import GgufFile

# Mistral's models, and many others of Llama's shape, call themselves llama.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
MISTRAL = "MistralForCausalLM"
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
ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def architecture_of(file: GgufFile) -> str:
    """`general.architecture`, one of ARCHITECTURES. Raises ModelRefused."""
    found = file.metadata.get("general.architecture")
    if not isinstance(found, str) or found not in ARCHITECTURES:
        raise file.refuse("general.architecture", f"is {shown(found)}, but must be one of {', '.join(ARCHITECTURES)}")
    return found


def spelled(file: GgufFile) -> dict[str, str]:
    """Names in the file of the keys of `json_config`, for errors."""
    prefix = architecture_of(file)
    return {key: f"{prefix}.{name}" for key, name in (KEYS | SCALING).items()}


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
        if key not in KNOWN and not (is_off if neutral is None else value in neutral):
            unknown = "a key that is not known here and may change the numbers"
            limit = unknown if neutral is None else f"but only {neutral[0]!r} is served"
            raise file.refuse(f"{name}.{key}", f"is {shown(value)}, {limit}")
    embedding = file.tensors.get(EMBEDDING)
    if embedding is None:
        raise ModelRefused(f"{file.path} lacks the tensor {EMBEDDING}", file=file.path, tensor=EMBEDDING)
    heads, width = config["num_attention_heads"], config["hidden_size"]
    if "head_dim" not in config and type(heads) is int and type(width) is int and heads > 0:
        config["head_dim"] = width // heads
    for key in ("attention.value_length", "rope.dimension_count"):
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
    window, key = given.get("attention.sliding_window", 0), f"{name}.attention.sliding_window"
    window = 0 if window == -1 else window
    if type(window) is not int or window < 0:
        raise file.refuse(key, f"is {shown(window)}, but must be a number of positions")
    context_len = config["max_position_embeddings"]
    if window and not (type(context_len) is int and window >= context_len):
        if name != "llama" or config["attention_bias"] or config["mlp_bias"]:
            raise file.refuse(key, f"is {window}, but does not say in which layers; only Mistral's shape has it in all")
        config |= {"architectures": [MISTRAL], "sliding_window": window}
    return config | ({"eos_token_id": ends} if ends else {})
