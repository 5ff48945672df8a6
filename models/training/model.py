"""The sizes that a pair can have, models of these sizes, and models as files.

The rotary base is that of the long context from the first step: a pair that turns slowly enough for 4,096 positions
loses nothing on 256, and one that was trained on 256 with the usual 10,000 cannot distinguish positions beyond them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from outrider.engine.models.config import ModelConfig
from outrider.engine.models.gguf import load_gguf, read_config
from outrider.engine.models.rope import Rope
from outrider.engine.ops.eager import EagerOps
from outrider.errors import InvalidRequest, ModelRefused
from outrider.model_files.gguf.config import json_config
from outrider.model_files.gguf.files import gguf_in
from outrider.model_files.gguf.header import GgufFile
from outrider.model_files.gguf.tokenizer import chat_templates, special_tokens
from outrider.model_files.model_names import Shape
from outrider.model_files.tokenizer_files import load_tokenizer
from outrider.model_files.vocabulary import Vocabulary
from training.data import END_OF_TEXT

ROLES = ("target", "draft")
CausalModel: TypeAlias = LlamaForCausalLM | Qwen3ForCausalLM
CLASSES: Mapping[str, tuple[Any, Any]] = {
    "LlamaForCausalLM": (LlamaConfig, LlamaForCausalLM),
    "Qwen3ForCausalLM": (Qwen3Config, Qwen3ForCausalLM),
}


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


def trained_model(option: str, place: Path, extended_to: Preset | None = None) -> CausalModel:
    """A trained model in float32, as it is: a folder, a GGUF file or a folder with one. Raises InvalidRequest about the
    option that names its place.

    Or extended to the context and rotary base of a preset, unless it has more of them.
    """
    # Another architecture would be read as one of these without a word.
    try:
        path = gguf_in(place)
        file = None if path is None else GgufFile.read(path)
        facts = read_config(file) if file else ModelConfig.read(place)
        configured, built = CLASSES.get(facts.architecture, (None, None))
        if configured is None or built is None or type(facts.ropes[0]) is not Rope:
            raise InvalidRequest(option, str(place), "a model of Llama's or Qwen 3's shape without rope scaling")
        if facts.qkv_bias or facts.output_bias or facts.mlp_bias or set(facts.windows) != {None}:
            raise InvalidRequest(option, str(place), "a model without biases, whose attention has no window")
        config = (
            gguf_config(configured, file, facts) if file else configured.from_pretrained(place, local_files_only=True)
        )
    except (ModelRefused, OSError, ValueError) as error:
        raise InvalidRequest(option, str(place), f"a folder of a model, or a GGUF file: {error}") from error
    if extended_to is not None:
        rope = dict(config.rope_parameters)
        config.rope_parameters = {**rope, "rope_theta": max(extended_to.rope_base, rope["rope_theta"])}
        config.max_position_embeddings = max(extended_to.context_len, config.max_position_embeddings)
    try:
        if file is None:
            return built.from_pretrained(place, config=config, dtype=torch.float32, local_files_only=True)
        model = built(config)
        tensors, _ = load_gguf(file, facts, torch.device("cpu"), torch.float32, EagerOps())
        model.load_state_dict(tensors, strict=False)
        return model
    except (ModelRefused, OSError, ValueError, RuntimeError) as error:
        raise InvalidRequest(option, str(place), f"a model whose weights can be read: {error}") from error


def gguf_config(configured: type[LlamaConfig | Qwen3Config], file: GgufFile, facts: ModelConfig) -> Any:  # noqa: ANN401
    """The configuration of a file, whose tensors are those that it asks for, as transformers has it."""
    return configured(
        **(json_config(file) | {"num_key_value_heads": facts.num_kv_heads, "rms_norm_eps": facts.norm_epsilon}),
        rope_parameters={"rope_type": "default", "rope_theta": facts.ropes[0].theta},
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
    )


def target_tokenizer(option: str, place: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a target with its chat template. Raises InvalidRequest about the option that names its place."""
    try:
        Vocabulary.read(place)
        if (path := gguf_in(place)) is None:
            return PreTrainedTokenizerFast.from_pretrained(place)
        file = GgufFile.read(path)
        made = PreTrainedTokenizerFast(tokenizer_object=load_tokenizer(str(path)), **special_tokens(file))
        made.chat_template, made.name_or_path = chat_templates(file).get("default"), str(place)
    except (ModelRefused, OSError, ValueError) as error:
        raise InvalidRequest(option, str(place), f"a model whose tokenizer can be read: {error}") from error
    return made


def end_ids(model: CausalModel) -> list[int]:
    """Ids that end what a target says, by its config; none where it names none."""
    ends = model.config.eos_token_id
    return [each for each in (ends if isinstance(ends, list) else [ends]) if each is not None]


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
