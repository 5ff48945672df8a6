"""Logits of a model folder by transformers and by our forward, and the models that both are compared on."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from support.rounding import reach
from torch import Tensor

from outrider.engine.batching import Feed
from outrider.engine.runner import ModelRunner
from outrider.token_tree import TokenTree

# Lengths are chosen for heads of 12 and 16: some pairs turn fast, some slowly, some in between.
THETA = 300.0
ORIGINAL_LEN = 64
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn-attention-factor": {"rope_type": "yarn", **YARN, "attention_factor": 0.7, "beta_fast": 8, "beta_slow": 2},
    "yarn-mscale": {"rope_type": "yarn", **YARN, "mscale": 0.9, "mscale_all_dim": 0.6},
    "yarn-one-mscale": {"rope_type": "yarn", **YARN, "mscale": 0.9},
    "yarn-untruncated": {"rope_type": "yarn", **YARN, "truncate": False},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}
# Both embeddings of a Gemma 3, of which one is scaled, in three layers of which the last sees everything.
GEMMA_ROPES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 9 * THETA},
        "sliding_attention": {"rope_type": "default", "rope_theta": THETA},
    },
}
# Heads of 20, of which 12 coordinates turn, and LongRoPE as far as it is served.
SHORT_FACTORS = [1.0, 1.25, 1.5, 2.0, 2.5, 3.0]
PARTIAL: dict[str, Any] = {
    "hidden_size": 80,
    "original_max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": THETA,
        "partial_rotary_factor": 0.6,
        "short_factor": SHORT_FACTORS,
        "long_factor": [4.0] * 6,
        "original_max_position_embeddings": 128,
    },
}
# Experts in every other layer, whose shares do not add up to 1.
SPARSE_STEP: dict[str, Any] = {"decoder_sparse_step": 2, "mlp_only_layers": [], "norm_topk_prob": False}
# Each hides something from rows of 40 positions; Qwen's hides it in one of two layers.
WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral-1": ("mistral", {"sliding_window": 1}),
    "mistral-7": ("mistral", {"sliding_window": 7}),
    "mistral-39": ("mistral", {"sliding_window": 39}),
    "qwen2-from-layer-1": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


def respell(folder: Path) -> None:
    """Writes the rotary keys of config.json as transformers 4 did."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    path.write_text(json.dumps(config | {"rope_theta": theta, "rope_scaling": {"type": kind, **rope}}))


def reference(folder: Path) -> transformers.PreTrainedModel:
    """The model by transformers in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def logits_and_reach(
    model: transformers.PreTrainedModel, token_ids: Sequence[int], first: int = 0
) -> tuple[Tensor, float]:
    """Logits of the positions from the first on by a model, all at once, and how far rounding may carry them."""

    @torch.no_grad()
    def compute() -> Tensor:
        logits: Tensor = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0, first:]
        return logits

    return compute(), reach(model.parameters(), compute)


def logprobs_and_reach(model: transformers.PreTrainedModel, token_ids: Sequence[int]) -> tuple[Tensor, float]:
    """Log-probabilities of the token after each position by a model, and how far rounding may carry them."""

    @torch.no_grad()
    def compute() -> Tensor:
        logits: Tensor = model(torch.tensor([list(token_ids)]), use_cache=False).logits
        return logits[0].log_softmax(dim=-1)

    return compute(), reach(model.parameters(), compute)


def stepped_logits(model: transformers.PreTrainedModel, token_ids: list[int], prompt_len: int) -> Tensor:
    """Logits of the positions from prompt_len - 1 on, by transformers with its cache, token by token."""
    cache = transformers.DynamicCache()
    steps = [token_ids[:prompt_len], *([token_id] for token_id in token_ids[prompt_len:])]
    with torch.no_grad():
        rows = [model(torch.tensor([step]), past_key_values=cache).logits[0, -1] for step in steps]
    return torch.stack(rows)


def random_ids(count: int, vocab_size: int) -> list[int]:
    """Token ids from a fixed seed."""
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(5)).tolist()


def all_logits(runner: ModelRunner, token_ids: list[int], prompt_len: int) -> tuple[Tensor, Tensor]:
    """Logits of the positions from prompt_len - 1 on, decoded one by one, and at once as the rows of a chain."""
    decoded = runner.open(token_ids[:prompt_len], prompt_len)
    steps = [runner.forward([Feed(decoded)]).logits]
    for token_id in token_ids[prompt_len:]:
        decoded.extend([token_id])
        steps.append(runner.forward([Feed(decoded)]).logits)
    chained = runner.open(token_ids[:prompt_len], prompt_len)
    at_once = runner.forward([Feed(chained, TokenTree.chain(token_ids[prompt_len:]))]).logits
    decoded.free()
    chained.free()
    return torch.cat(steps), at_once


def worst_difference(folder: Path, length: int = 40, prompt_len: int = 30, stepped: bool = False) -> float:
    """Largest difference of a logit between us and transformers, from the last row of the prompt on, in parts of how
    far rounding may carry it: not above 1 for the same distribution.
    """
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=1024)
    token_ids = random_ids(length, runner.config.vocab_size)
    model = reference(folder)
    expected, limit = logits_and_reach(model, token_ids, prompt_len - 1)
    if stepped:
        expected = stepped_logits(model, token_ids, prompt_len)
    ours = all_logits(runner, token_ids, prompt_len)
    assert all(logits.dtype == torch.float32 and logits.shape == expected.shape for logits in ours)
    return max((logits - expected).abs().max().item() for logits in ours) / limit
