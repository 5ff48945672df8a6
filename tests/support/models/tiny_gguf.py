"""GGUF files for tests: a model folder written anew by the gguf package, in the way of llama.cpp's converter.

Matrices have one type, or those of a mix, as the rules of llama.cpp's quantiser give them by layer and width.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load_file
from support.models.gguf_blocks import FORMS, quantised
from torch import Tensor

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "GptOssForCausalLM": "gpt-oss",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
OF_GPT_OSS = {
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router": "ffn_gate_inp",
}
OF_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
F32 = GGMLQuantizationType.F32
# The type of most matrices in a mix.
MIXES = {"Q4_K_M": "Q4_K", "Q4_K_S": "Q4_K", "Q5_K_M": "Q5_K", "Q6_K": "Q6_K", "IQ4_XS": "IQ4_XS"}
DYNAMIC = "dynamic"
"""A mix in which each matrix has another type than the one before it, so that no two of a layer share one by a rule."""
# What a type of 256 weights a block becomes where a width has no whole blocks.
NARROW = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"

Metadata = dict[str, Any]
Tensors = dict[str, tuple[np.ndarray[Any, Any], GGMLQuantizationType]]


def write_gguf(
    folder: Path,
    file: Path,
    kind: GGMLQuantizationType | str = F32,
    edit: Callable[[Metadata, Tensors], object] | None = None,
) -> Path:
    """Writes the model of a folder into a file, its matrices in one type or a mix of MIXES; returns the file.

    What is written may be edited before: metadata by full key, and tensors by name, each an array with its type.
    """
    metadata, tensors = metadata_of(folder), tensors_of(folder, kind)
    if edit is not None:
        edit(metadata, tensors)
    return write_parts(file, metadata, tensors)


def write_parts(file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """Writes metadata and tensors as they are; returns the file."""
    writer = GGUFWriter(file, str(metadata.get("general.architecture", "none")))
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        is_list = isinstance(value, list)
        kind = GGUFValueType.ARRAY if is_list else GGUFValueType.get_type(value)
        kind = GGUFValueType.BOOL if isinstance(value, bool) else kind
        writer.add_key_value(key, value, kind)
    for name, (array, type_id) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=type_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def metadata_of(folder: Path) -> Metadata:
    """What the converter would say of the model in a folder and of its tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    name = ARCHITECTURES[config["architectures"][0]]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    own = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.dimension_count": head_dim,
    }
    if name == "qwen3moe":
        own |= {
            "expert_count": config["num_local_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    if name == "gpt-oss":
        own |= {
            "expert_count": config["num_local_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["intermediate_size"],
        }
    if config.get("sliding_window") and name in ("llama", "gemma3", "phi3", "gpt-oss"):
        own["attention.sliding_window"] = config["sliding_window"]
    rope = config["rope_parameters"]
    if name == "gemma3":
        own |= {
            "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
            "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
        }
        rope = rope["full_attention"]
    own["rope.freq_base"] = float(rope["rope_theta"])
    kind, factor = rope["rope_type"], rope.get("factor")
    if kind in ("linear", "yarn"):
        own |= {"rope.scaling.type": kind, "rope.scaling.factor": float(factor)}
    if kind in ("yarn", "longrope"):
        own["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if name == "phi3":
        own["rope.dimension_count"] = int(head_dim * rope["partial_rotary_factor"])
    if kind == "longrope":
        stretch, original = config["max_position_embeddings"], rope["original_max_position_embeddings"]
        own["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(stretch / original) / math.log(original))
    return {
        "general.architecture": name,
        **{f"{name}.{key}": value for key, value in own.items()},
        **tokenizer_of(folder, config["vocab_size"]),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": CHAT,
    }


def tokenizer_of(folder: Path, vocab_size: int) -> Metadata:
    """Tokens, types and merges of a folder's tokenizer; rows without a token are padding, and one of them a merge."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    by_id = {token_id: token for token, token_id in model["vocab"].items()}
    merges = [" ".join(merge) for merge in model["merges"]]
    if not merges:
        merges, by_id[len(by_id)] = ["a b"], "ab"
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [by_id.get(index, f"[PAD{index}]") for index in range(vocab_size)],
        "tokenizer.ggml.token_type": [3 if index == 0 else 1 if index in by_id else 5 for index in range(vocab_size)],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,
    }


def tensors_of(folder: Path, kind: GGMLQuantizationType | str) -> Tensors:
    """The tensors of a folder under the names of GGUF; a Llama's queries and keys in the order of llama.cpp."""
    config = json.loads((folder / "config.json").read_text())
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    stored, tensors = with_experts_together(load_file(folder / "model.safetensors")), Tensors()
    is_gemma = config["architectures"] == ["Gemma3ForCausalLM"]
    for name, tensor in stored.items():
        array, gguf_name = tensor.float().numpy(), name
        if is_gemma and "norm" in name:
            array = array + 1
        more = OF_GEMMA if is_gemma else OF_GPT_OSS if config["architectures"] == ["GptOssForCausalLM"] else {}
        for own, theirs in (NAMES | more).items():
            gguf_name = gguf_name.replace(own, theirs)
        part = gguf_name.split(".")[-2]
        if ARCHITECTURES[config["architectures"][0]] == "llama" and part in heads:
            halves = array.reshape(heads[part], 2, -1, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if array.ndim == 1 or gguf_name.endswith(".bias") or kind == F32 or part == "ffn_gate_inp":
            tensors[gguf_name] = (array, F32)
        elif isinstance(kind, str):
            own_kind = mixed_type(
                kind, gguf_name, array.shape[-1], config["num_hidden_layers"], "lm_head.weight" in stored
            )
            blocks = quantised(own_kind, array.reshape(-1, array.shape[-1]))
            tensors[gguf_name] = (blocks.reshape(*array.shape[:-1], -1), GGMLQuantizationType[own_kind])
        else:
            tensors[gguf_name] = (quantize(array, kind), kind)
    for length in ("short", "long") if config["rope_parameters"].get("rope_type") == "longrope" else ():
        factors = np.array(config["rope_parameters"][f"{length}_factor"], np.float32)
        tensors[f"rope_factors_{length}.weight"] = (factors, F32)
    return tensors


def with_experts_together(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same with one tensor [experts, outputs, inputs] in place of one for each expert."""
    together, experts = dict[str, Tensor](), dict[str, dict[int, Tensor]]()
    for name, tensor in stored.items():
        one = re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)", name)
        if one is None:
            together |= halves_of_gpt_oss(name, tensor)
        else:
            experts.setdefault(f"{one[1]}.{one[3]}", {})[int(one[2])] = tensor
    return together | {name: torch.stack([each[i] for i in range(len(each))]) for name, each in experts.items()}


def halves_of_gpt_oss(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Experts of gpt-oss [experts, outputs, inputs], gate and up apart, and their biases; any other tensor as it is."""
    found = re.fullmatch(r"(.+\.experts)\.(gate_up|down)_proj(_bias)?", name)
    if found is None:
        return {name: tensor}
    of, outputs = ("bias", tensor) if found[3] else ("weight", tensor.transpose(1, 2).contiguous())
    if found[2] == "down":
        return {f"{found[1]}.down_proj.{of}": outputs}
    halves = {"gate": outputs[:, ::2].contiguous(), "up": outputs[:, 1::2].contiguous()}
    return {f"{found[1]}.{half}_proj.{of}": each for half, each in halves.items()}


def mixed_type(mix: str, name: str, width: int, num_layers: int, has_output: bool) -> str:
    """Type of a matrix in a mix, by its name in the file; a type's own name is one in which all have it if they can."""
    kind, part = MIXES.get(mix, mix), name.split(".")[-2]
    layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
    gets_more = layer < num_layers // 8 or layer >= 7 * num_layers // 8 or (layer - num_layers // 8) % 3 == 2
    if mix == DYNAMIC:
        parts = [each for each in NAMES.values() if "norm" not in each]
        kind = [*FORMS][(parts.index(part) + 7 * layer) % len(FORMS)]
    elif mix in MIXES and part in ("output", "token_embd") and (part == "output") == has_output:
        kind = "Q8_0" if width % FORMS[kind].length else "Q6_K"
    elif mix.endswith("_M") and part in ("attn_v", "attn_qkv", "ffn_down") and gets_more:
        kind = "Q6_K"
    elif (
        mix == "Q4_K_S" and part in ("attn_v", "ffn_down") and layer < {"attn_v": 4, "ffn_down": num_layers // 8}[part]
    ):
        kind = "Q5_K"
    return NARROW[kind] if width % FORMS[kind].length else kind
