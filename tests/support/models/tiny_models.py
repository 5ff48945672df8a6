"""Real model folders for tests: tiny random models with tokenizers, drafts that guess as differently as drafts can."""

import json
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from target_service.server import TargetSettings

MODELS = Path(__file__).resolve().parents[3] / "models"
TARGET = MODELS / "target"
CONTEXT_LEN = 256
# Sizes that are awkward on purpose: no multiples of a kernel's tile, heads that do not add up to the hidden size.
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"head_dim": 16}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        transformers.GptOssForCausalLM,
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 24,
            "swiglu_limit": 0.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 300.0,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": 128}),
    "gemma3": (
        transformers.Gemma3TextConfig,
        transformers.Gemma3ForCausalLM,
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24, "sliding_window_pattern": 2},
    ),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM, {"pad_token_id": 0, "sliding_window": 28}),
}
# Those that transformers' own code computes.
HF_FAMILIES = {
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel, {"n_inner": 88}),
    "gpt_neox": (transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM, {"intermediate_size": 88}),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM, {"pad_token_id": 0}),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM, {"num_local_experts": 4}),
}


def write_tiny_model(
    folder: Path,
    family: str,
    vocab_size: int = 300,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    context_len: int = CONTEXT_LEN,
    **overrides: object,
) -> Path:
    """Writes a random model of a family of either table with its tokenizer; returns the folder.

    The tokenizer is the embedded pair's for 4,096 ids, else one id for each of 256 bytes and `<|endoftext|>` = 0. Other
    keys of config.json can be given as overrides.
    """
    config_class, model_class, special = (FAMILIES | HF_FAMILIES)[family]
    keys = {"vocab_size": vocab_size, "max_position_embeddings": context_len, "bos_token_id": 0, "eos_token_id": 0}
    config = config_class(**{**SIZES, **special, **keys, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        for name, parameter in model.named_parameters():
            # Defaults leave biases at 0, norms at 1 and logits near 0: wrong uses of them would not show.
            torch.nn.init.normal_(
                parameter, 1.0 if "norm" in name or "ln_" in name else 0.0, 0.2 if parameter.ndim > 1 else 0.1
            )
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder, vocab_size)
    generation = {"bos_token_id": 0, "eos_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json with at most vocab_size ids."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(TARGET / "tokenizer_config.json", folder)
    if vocab_size == 4096:
        shutil.copy(TARGET / "tokenizer.json", folder)
        return
    # Below 257 ids some bytes have none; such a tokenizer drops them, as models.BPE does without an unknown token.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: vocab_size - 1]
    vocabulary = {"<|endoftext|>": 0} | {byte: index for index, byte in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))


TRAINED = MODELS / "draft"


def write_adversary(folder: Path) -> Path:
    """Writes the target with its output matrix negated: its most probable token is the target's least probable one."""
    shutil.copytree(TARGET, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": -tensors["model.embed_tokens.weight"]}, folder / "model.safetensors")
    return folder


def write_drafts(folder: Path) -> dict[str, Path]:
    """Returns the folders of four drafts: trained, random weights, the target itself, always wrong."""
    return {
        "trained": TRAINED,
        "random": write_tiny_model(folder / "random", "llama", vocab_size=4096, seed=7),
        "itself": TARGET,
        "adversary": write_adversary(folder / "adversary"),
    }


SETTINGS = TargetSettings(str(TARGET), listen="127.0.0.1:0", threads=1, kv_tokens=8192)
PROMPT = (0, 401, 913, 260, 555, 12)


def write_recommending(folder: Path, **recommended: object) -> Path:
    """Writes the embedded target with a generation_config.json that also says this; the other files are links."""
    folder.mkdir(parents=True)
    for path in TARGET.iterdir():
        if path.name != "generation_config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((TARGET / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | recommended))
    return folder
