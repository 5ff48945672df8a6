"""The sizes that a pair can have, models of these sizes, and models as files.

The rotary base is that of the long context from the first step: a pair that turns slowly enough for 4,096 positions
loses nothing on 256, and one that was trained on 256 with the usual 10,000 cannot distinguish positions beyond them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.engine.models.config import ModelConfig
from outrider.errors import InvalidRequest, ModelRefused
from outrider.model_files.model_names import Shape
from training.data import END_OF_TEXT

ROLES = ("target", "draft")


@dataclass(frozen=True, slots=True)
class Preset:
    """Sizes of a pair, and of what it is trained on."""

    shapes: Mapping[str, Shape]
    vocab_size: int = 4096
    block_len: int = 256
    context_len: int = 4096
    rope_base: float = 200_000.0


PRESETS: Mapping[str, Preset] = {
    # The embedded pair.
    "story": Preset({"target": Shape(384, 1024, 6, 6, 2, 64), "draft": Shape(128, 352, 2, 2, 1, 64)}),
    # For an accelerator and a text of a hundred megabytes or more; not trained by us.
    "large": Preset({"target": Shape(768, 2048, 12, 12, 4, 64), "draft": Shape(256, 704, 3, 4, 2, 64)}),
    # To try the command: seconds on a CPU, and no story comes of it.
    "tiny": Preset({"target": Shape(32, 64, 2, 2, 1, 16), "draft": Shape(16, 32, 1, 1, 1, 16)}, 300, 32, 128),
}


def new_model(preset: Preset, role: str, seed: int) -> LlamaForCausalLM:
    """A model with random weights of the seed; leaves torch's own seed alone."""
    shape = preset.shapes[role]
    config = LlamaConfig(
        vocab_size=preset.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=preset.context_len,
        rope_parameters={"rope_type": "default", "rope_theta": preset.rope_base},
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def trained_model(option: str, folder: Path, extended_to: Preset | None = None) -> LlamaForCausalLM:
    """A trained model in float32, as it is. Raises InvalidRequest about the option that names its folder.

    Or extended to the context and rotary base of a preset, unless it has more of them.
    """
    # Another architecture would be read as Llama without a word.
    try:
        architecture = ModelConfig.read(folder).architecture
        config = LlamaConfig.from_pretrained(folder, local_files_only=True)
    except (ModelRefused, OSError, ValueError) as error:
        raise InvalidRequest(option, str(folder), f"a folder of a model: {error}") from error
    rope = dict(config.rope_parameters or {})
    if architecture != "LlamaForCausalLM" or rope.get("rope_type") != "default":
        raise InvalidRequest(option, str(folder), "a Llama model without rope scaling")
    if extended_to is not None:
        config.rope_parameters = {**rope, "rope_theta": max(extended_to.rope_base, rope["rope_theta"])}
        config.max_position_embeddings = max(extended_to.context_len, config.max_position_embeddings)
    try:
        return LlamaForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidRequest(option, str(folder), f"a model whose weights can be read: {error}") from error


def write_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes a checkpoint in bfloat16 as transformers has it, with its tokenizer; changes the model's dtype."""
    write_weights(model, folder)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)
    wrapped.save_pretrained(str(folder))


def write_weights(model: LlamaForCausalLM, folder: Path) -> None:
    """Writes the model's weights and configuration, without a tokenizer."""
    # Through the base class, because the library's own methods are untyped.
    nn.Module.to(model, device="cpu", dtype=torch.bfloat16)
    model.save_pretrained(str(folder))
    # The library makes it private, and services in containers run as another user.
    (folder / "model.safetensors").chmod(0o644)
