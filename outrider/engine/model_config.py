"""The shape of a model, read from its config.json, or the one sentence that says why it cannot be served.

Knows no tensors: a model is refused here before anything of it is loaded. Keys have the names and the defaults that
transformers gives them; rotary keys are read in rope_config, windows in windows.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from outrider.engine.json_keys import INT32_MAX, JsonKeys, read_json
from outrider.engine.rope import Rope
from outrider.engine.rope_config import read_rope
from outrider.engine.windows import (
    WindowRule,
    Windows,
    no_windows,
    read_windows,
    same_in_every_layer,
    switched_by_layer,
)

# Positions are float32 where angles are computed, which counts no further than this without gaps.
MAX_CONTEXT_LEN = 1 << 24
# Far above any model's: what is refused is a number that alone would fill the memory with the names of its layers.
MAX_LAYERS = 1 << 12


@dataclass(frozen=True, slots=True)
class Family:
    """Where the architectures differ: biases, norms of query and key heads, defaults of keys."""

    qkv_bias: bool | None
    """None: the key "attention_bias" decides, for the output projection too."""
    qk_norm: bool = False
    mlp_bias_key: bool = False
    default_head_dim: int | None = None
    windows: WindowRule = no_windows
    default_context_len: int = 32768


FAMILIES = {
    "LlamaForCausalLM": Family(qkv_bias=None, mlp_bias_key=True, default_context_len=2048),
    "Qwen2ForCausalLM": Family(qkv_bias=True, windows=switched_by_layer),
    "Qwen3ForCausalLM": Family(qkv_bias=None, qk_norm=True, default_head_dim=128, windows=switched_by_layer),
    "MistralForCausalLM": Family(qkv_bias=False, windows=same_in_every_layer, default_context_len=131072),
}
# Beginnings of architectures whose layers carry a running state, which cannot be truncated to an earlier length.
STATE_SPACE = (
    "Mamba", "FalconMamba", "Rwkv", "RWKV", "Jamba", "Zamba", "Bamba", "FalconH1", "NemotronH", "GraniteMoeHybrid",
    "RecurrentGemma", "Griffin", "Lfm2", "Qwen3Next", "Qwen3_5", "MiniMaxForCausalLM", "MiniMaxText01", "KimiLinear",
    "xLSTM", "RetNet", "Plamo2",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one decoder-only transformer."""

    architecture: str
    vocab_size: int
    """Rows of the embedding, width of the logits; may exceed the tokenizer's vocabulary by padding."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope: Rope
    context_len: int
    """Longest sequence in tokens: the trained positions, scaled where the rotary embedding is."""
    windows: Windows
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: frozenset[int]
    """From generation_config.json where it names them, else from config.json; may be empty."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads config.json and generation_config.json; raises ModelRefused with one sentence."""
        keys = JsonKeys(folder / "config.json", read_json(folder / "config.json"))
        architecture = _architecture(keys)
        family = FAMILIES[architecture]
        _refuse_unsupported(keys)
        num_heads = keys.integer("num_attention_heads")
        num_layers = keys.integer("num_hidden_layers", maximum=MAX_LAYERS)
        hidden_size = keys.integer("hidden_size")
        head_dim = keys.integer("head_dim", family.default_head_dim or hidden_size // num_heads)
        rope, context_len = _positions(keys, family, head_dim)
        attention_bias = keys.flag("attention_bias") if family.qkv_bias is None else False
        config = cls(
            architecture=architecture,
            vocab_size=keys.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=keys.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=keys.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            norm_epsilon=keys.positive("rms_norm_eps", 1e-6),
            rope=rope,
            context_len=context_len,
            windows=read_windows(keys, num_layers, context_len, family.windows),
            tied_embeddings=keys.flag("tie_word_embeddings"),
            qkv_bias=bool(family.qkv_bias) or attention_bias,
            output_bias=attention_bias,
            mlp_bias=keys.flag("mlp_bias") if family.mlp_bias_key else False,
            qk_norm=family.qk_norm,
            eos_token_ids=read_eos_token_ids(folder, keys),
        )
        return config._checked(keys)

    def _checked(self, keys: JsonKeys) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise keys.refuse("num_key_value_heads", f"is {self.num_kv_heads}, which does not divide {self.num_heads}")
        if self.head_dim % 2:
            raise keys.refuse("head_dim", f"is {self.head_dim}, but rotary embeddings need an even number")
        return self


def read_architecture(keys: JsonKeys) -> str:
    """The architecture that config.json names; raises ModelRefused for those that nobody here can serve."""
    names = keys.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise keys.refuse("architectures", f"is {names!r}, but must name one architecture")
    if names[0].startswith(STATE_SPACE):
        fault = f"is {names[0]}, whose running state cannot be rolled back to an earlier token"
        raise keys.refuse("architectures", fault)
    if keys.values.get("auto_map"):
        raise keys.refuse("auto_map", "asks for code from the model's repository, which is never run")
    if keys.values.get("quantization_config") is not None:
        raise keys.refuse("quantization_config", "is set, but only unquantized weights are served")
    return names[0]


def _architecture(keys: JsonKeys) -> str:
    name = read_architecture(keys)
    if name not in FAMILIES:
        raise keys.refuse("architectures", f"is {name}, but must be one of {', '.join(FAMILIES)}")
    return name


def _refuse_unsupported(keys: JsonKeys) -> None:
    activation = keys.values.get("hidden_act", "silu")
    if activation != "silu":
        raise keys.refuse("hidden_act", f'is {activation!r}, but must be "silu"')


def _positions(keys: JsonKeys, family: Family, head_dim: int) -> tuple[Rope, int]:
    """The rotary embedding, and the longest sequence that it serves."""
    max_positions = keys.integer("max_position_embeddings", family.default_context_len)
    rope = read_rope(keys, max_positions, head_dim)
    context_len = rope.context_len(max_positions)
    if context_len > MAX_CONTEXT_LEN:
        fault = f"and its scaling make {context_len} positions, but at most {MAX_CONTEXT_LEN} are served"
        raise keys.refuse("max_position_embeddings", fault)
    return rope, context_len


def read_eos_token_ids(folder: Path, config: JsonKeys) -> frozenset[int]:
    """Tokens that end a sequence; generation_config.json wins where it names any. Raises ModelRefused."""
    path = folder / "generation_config.json"
    sources = [JsonKeys(path, read_json(path))] if path.exists() else []
    for keys in (*sources, config):
        value = keys.values.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if value is None:
            continue
        if not all(map(_is_token_id, ids)):
            raise keys.refuse("eos_token_id", f"is {value!r}, but must be a token id or a list of them")
        return frozenset(ids)
    return frozenset()


def _is_token_id(value: object) -> bool:
    # What does not fit into a message would fail at every request instead of here.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INT32_MAX
