"""The shape of a model, read from its config.json, or the one sentence that says why it cannot be served.

Knows no tensors: a model is refused here before anything of it is loaded. Keys have the names and the defaults that
transformers gives them; both spellings of the rotary keys are read (`rope_parameters`, and `rope_theta` with
`rope_scaling` of older files).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from outrider.engine.json_keys import JsonKeys, read_json


@dataclass(frozen=True, slots=True)
class Family:
    """Where the architectures differ: biases, norms of query and key heads, defaults of keys."""

    qkv_bias: bool | None
    """None: the key "attention_bias" decides, for the output projection too."""
    qk_norm: bool = False
    mlp_bias_key: bool = False
    default_head_dim: int | None = None
    windowed: bool = False
    """Whether the key "sliding_window" holds without being switched on."""
    default_context_len: int = 32768


FAMILIES = {
    "LlamaForCausalLM": Family(qkv_bias=None, mlp_bias_key=True, default_context_len=2048),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qkv_bias=None, qk_norm=True, default_head_dim=128),
    "MistralForCausalLM": Family(qkv_bias=False, windowed=True, default_context_len=131072),
}
# Beginnings of architectures whose layers carry a running state, which cannot be truncated to an earlier length.
STATE_SPACE = (
    "Mamba", "FalconMamba", "Rwkv", "RWKV", "Jamba", "Zamba", "Bamba", "FalconH1", "NemotronH", "GraniteMoeHybrid",
    "RecurrentGemma", "Griffin", "Lfm2", "Qwen3Next", "Qwen3_5", "MiniMax", "KimiLinear", "xLSTM", "RetNet", "Plamo2",
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
    rope_theta: float
    context_len: int
    """Longest sequence in tokens: the trained positions, or the sliding window where that is shorter."""
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
        hidden_size = keys.integer("hidden_size")
        attention_bias = keys.flag("attention_bias") if family.qkv_bias is None else False
        config = cls(
            architecture=architecture,
            vocab_size=keys.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=keys.integer("intermediate_size"),
            num_layers=keys.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=keys.integer("num_key_value_heads", num_heads),
            head_dim=keys.integer("head_dim", family.default_head_dim or hidden_size // num_heads),
            norm_epsilon=keys.positive("rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(keys),
            context_len=_context_len(keys, family),
            tied_embeddings=keys.flag("tie_word_embeddings"),
            qkv_bias=bool(family.qkv_bias) or attention_bias,
            output_bias=attention_bias,
            mlp_bias=keys.flag("mlp_bias") if family.mlp_bias_key else False,
            qk_norm=family.qk_norm,
            eos_token_ids=_eos_token_ids(folder, keys),
        )
        return config._checked(keys)

    def _checked(self, keys: JsonKeys) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise keys.refuse("num_key_value_heads", f"is {self.num_kv_heads}, which does not divide {self.num_heads}")
        if self.head_dim % 2:
            raise keys.refuse("head_dim", f"is {self.head_dim}, but rotary embeddings need an even number")
        return self


def _architecture(keys: JsonKeys) -> str:
    names = keys.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise keys.refuse("architectures", f"is {names!r}, but must name one architecture")
    name = names[0]
    if name in FAMILIES:
        return name
    if name.startswith(STATE_SPACE):
        raise keys.refuse("architectures", f"is {name}, whose running state cannot be rolled back to an earlier token")
    raise keys.refuse("architectures", f"is {name}, but must be one of {', '.join(FAMILIES)}")


def _refuse_unsupported(keys: JsonKeys) -> None:
    if keys.values.get("auto_map"):
        raise keys.refuse("auto_map", "asks for code from the model's repository, which is never run")
    if keys.values.get("quantization_config"):
        raise keys.refuse("quantization_config", "is set, but only unquantized weights are served")
    activation = keys.values.get("hidden_act", "silu")
    if activation != "silu":
        raise keys.refuse("hidden_act", f'is {activation!r}, but must be "silu"')
    unknown = set(_layer_types(keys)) - {"full_attention", "sliding_attention"}
    if unknown:
        raise keys.refuse("layer_types", f"names {sorted(map(str, unknown))[0]}, which is not served")


def _layer_types(keys: JsonKeys) -> list[object]:
    types = keys.values.get("layer_types") or []
    if not isinstance(types, list):
        raise keys.refuse("layer_types", f"is {types!r}, but must be a list")
    return types


def _rope_theta(keys: JsonKeys) -> float:
    parameters = keys.values.get("rope_parameters")
    name = "rope_scaling" if parameters is None else "rope_parameters"
    rope = keys.values.get(name) or {}
    if not isinstance(rope, dict):
        raise keys.refuse(name, f"is {rope!r}, but must be an object")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise keys.refuse(name, f'asks for the rotary embedding {rope_type!r}, but only "default" is served')
    for values in (keys.values, rope):
        if values.get("partial_rotary_factor", 1) not in (None, 1):
            raise keys.refuse("partial_rotary_factor", "is not 1, but only whole heads are rotated")
    source = JsonKeys(keys.path, rope) if rope.get("rope_theta") is not None else keys
    return source.positive("rope_theta", 10000.0)


def _context_len(keys: JsonKeys, family: Family) -> int:
    """Within the window a sliding mask hides nothing, so a shorter context keeps every result exact."""
    context_len = keys.integer("max_position_embeddings", family.default_context_len)
    windowed = family.windowed or keys.flag("use_sliding_window") or "sliding_attention" in _layer_types(keys)
    # An explicit null means no window; only an absent key has a default.
    if not windowed or keys.values.get("sliding_window", 0) is None:
        return context_len
    return min(context_len, keys.integer("sliding_window", 4096))


def _eos_token_ids(folder: Path, config: JsonKeys) -> frozenset[int]:
    path = folder / "generation_config.json"
    sources = [JsonKeys(path, read_json(path))] if path.exists() else []
    for keys in (*sources, config):
        value = keys.values.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if value is None:
            continue
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0 for token_id in ids):
            raise keys.refuse("eos_token_id", f"is {value!r}, but must be a token id or a list of them")
        return frozenset(ids)
    return frozenset()
