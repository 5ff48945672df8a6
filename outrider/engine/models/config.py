"""The shape of a model, read from its config.json, or the one sentence that says why it cannot be served.

A model is refused here before anything of it is loaded. Keys have the names and the defaults that transformers gives
them.

Windows: a window of W lets the row at position t see the positions above t - W, itself included. Nothing is freed that
a window hides: a truncation may bring it back into sight.

Rotary embeddings: either "rope_parameters" hold everything, or "rope_scaling" does and "rope_theta" stands beside it;
as in transformers, "rope_scaling" goes first where a file has both. What would give other angles than a sound file's is
refused, though transformers only warns.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from outrider.engine.models.rope import DynamicRope, LinearRope, Llama3Rope, Rope, YarnRope, yarn_amplitude
from outrider.errors import ModelRefused

MAX_JSON_BYTES = 64 << 20
INT32_MAX = 2**31 - 1
FLOAT32_MAX = 3.4028234663852886e38
# Positions are float32 where angles are computed, which counts no further than this without gaps.
MAX_CONTEXT_LEN = 1 << 24
# Far above any model's: what is refused is a number that alone would fill the memory with the names of its layers.
MAX_LAYERS = 1 << 12
# Values of "layer_types", and keys under which newer files nest a rotary embedding for each kind of layer.
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_WINDOW, DEFAULT_MAX_WINDOW_LAYERS = 4096, 28
DEFAULT_THETA = 10000.0
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
ORIGINAL_LEN = "original_max_position_embeddings"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises ModelRefused when there is none."""
    try:
        # A cap, because a folder may come from anywhere and is read before anything about it is known.
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelRefused(f"{path} is larger than {MAX_JSON_BYTES} bytes", file=path)
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelRefused(f"{path} cannot be read: {error.strerror}", file=path) from None
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{path} is not valid JSON: {error}", file=path) from None
    if not isinstance(values, dict):
        raise ModelRefused(f"{path} does not hold a JSON object", file=path)
    return values


@dataclass(frozen=True, slots=True)
class JsonKeys:
    """Typed access to one JSON object; `null` counts as absent, as it does for transformers."""

    path: Path
    values: dict[str, Any]
    prefix: str = ""
    """Place of this object in the file, for instance "rope_scaling."; errors name keys with it."""
    spelled: Mapping[str, str] = field(default_factory=dict)
    """Names in errors, for keys that have another name in the file."""

    def refuse(self, key: str, fault: str) -> ModelRefused:
        name = self.spelled.get(key, f"{self.prefix}{key}")
        return ModelRefused(f'{self.path}: "{name}" {fault}', file=self.path, key=name)

    def integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = INT32_MAX) -> int:
        """An integer from `minimum` to `maximum`; absent keys without a default are refused."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            # The largest integer is named only for a value above it.
            is_above = isinstance(value, int) and value > maximum
            limit = f"from {minimum} to {maximum}" if is_above or maximum < INT32_MAX else f"of at least {minimum}"
            raise self.refuse(key, f"is {value!r}, but must be an integer {limit}")
        return value

    def number(self, key: str, default: float | None = None, minimum: float | None = None) -> float:
        """A number of at least `minimum`, or a positive one, that float32 can hold; refused as an integer is."""
        value = self._get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_above = is_number and value > FLOAT32_MAX
        if not is_number or is_above or not (value > 0 if minimum is None else value >= minimum):
            limit = "positive number" if minimum is None else f"number of at least {minimum:g}"
            limit += " that float32 can hold" if is_above else ""
            raise self.refuse(key, f"is {value!r}, but must be a {limit}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, f"is {value!r}, but must be true or false")
        return value

    def _get(self, key: str, default: object) -> Any:  # noqa: ANN401 - what JSON can hold
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise self.refuse(key, "is missing")
        return value


Windows = tuple[int | None, ...]
"""Window of each layer, or None where it sees everything."""
WindowRule = Callable[[JsonKeys, int], Windows]


def read_windows(keys: JsonKeys, num_layers: int, context_len: int, rule: WindowRule) -> Windows:
    """The windows of a model's layers; one that hides nothing within the context is none. Raises ModelRefused."""
    named = keys.values.get("layer_types")
    if named is not None and (not isinstance(named, list) or len(named) != num_layers):
        raise keys.refuse("layer_types", f"must be a list with an entry for each of {num_layers} layers")
    unknown = next((kind for kind in named or () if kind not in (FULL, SLIDING)), None)
    if unknown is not None:
        raise keys.refuse("layer_types", f"names {unknown!r}, which is not served")
    windows = rule(keys, num_layers)
    types = [FULL if window is None else SLIDING for window in windows]
    if named not in (None, types):
        # transformers would pass over this key, and other engines would follow it: which is right is unknown.
        layer = next(index for index, kind in enumerate(types) if kind != named[index])
        raise keys.refuse("layer_types", f"does not say {types[layer]} of layer {layer}, as the other keys do")
    return tuple(None if window is None or window >= context_len else window for window in windows)


def no_windows(keys: JsonKeys, num_layers: int) -> Windows:
    """Llama's rule: "sliding_window" means nothing."""
    return (None,) * num_layers


def same_in_every_layer(keys: JsonKeys, num_layers: int) -> Windows:
    """Mistral's rule: "sliding_window" holds everywhere; absent it has a default, and null switches it off."""
    return (_window(keys),) * num_layers


def switched_by_layer(keys: JsonKeys, num_layers: int) -> Windows:
    """The rule of Qwen 2 and 3: "use_sliding_window" switches it on, for the "layer_types" or from a layer onwards."""
    window = _window(keys) if keys.flag("use_sliding_window") else None
    types = keys.values.get("layer_types")
    if types is None:
        first = keys.integer("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, minimum=0)
        types = [FULL if layer < first or window is None else SLIDING for layer in range(num_layers)]
    if window is None and SLIDING in types:
        raise keys.refuse("layer_types", f"names {SLIDING}, but no window is switched on")
    return tuple(window if kind == SLIDING else None for kind in types)


def _window(keys: JsonKeys) -> int | None:
    # An explicit null means no window; only an absent key has the default.
    if "sliding_window" in keys.values and keys.values["sliding_window"] is None:
        return None
    return keys.integer("sliding_window", DEFAULT_WINDOW)


def read_rope(keys: JsonKeys, max_positions: int, head_dim: int) -> Rope:
    """The embedding of a model with "max_position_embeddings" max_positions. Raises ModelRefused."""
    name = "rope_scaling" if keys.values.get("rope_scaling") else "rope_parameters"
    values = keys.values.get(name) or {}
    if not isinstance(values, dict):
        raise keys.refuse(name, f"is {values!r}, but must be an object")
    nested = next((kind for kind in (FULL, SLIDING) if kind in values), None)
    if nested is not None:
        raise keys.refuse(name, f"has an entry for {nested}, but only one rotary embedding for all layers is served")
    inside = JsonKeys(keys.path, values, f"{name}.", keys.spelled)
    for source in (keys, inside):
        if source.values.get("partial_rotary_factor", 1) not in (None, 1):
            raise source.refuse("partial_rotary_factor", "is not 1, but only whole heads are rotated")
    theta = (inside if inside.values.get("rope_theta") is not None else keys).number("rope_theta", DEFAULT_THETA)
    kind = inside.values.get("rope_type") or inside.values.get("type") or "default"
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return LinearRope(theta=theta, factor=inside.number("factor", minimum=1.0))
    if kind == "dynamic":
        # transformers counts from "max_position_embeddings" here, whatever else the file says.
        if head_dim < 4:
            raise keys.refuse("head_dim", f"is {head_dim}, but a dynamic rotary embedding needs at least 4")
        return DynamicRope(theta=theta, factor=inside.number("factor", minimum=1.0), original_len=max_positions)
    if kind == "llama3":
        original_len = _original_len(keys, inside)
        low, high = inside.number("low_freq_factor"), inside.number("high_freq_factor")
        if high <= low:
            raise inside.refuse("high_freq_factor", f"is {high:g}, but must be above the low_freq_factor {low:g}")
        factor = inside.number("factor", minimum=1.0)
        return Llama3Rope(
            theta=theta, factor=factor, low_freq_factor=low, high_freq_factor=high, original_len=original_len
        )
    if kind == "yarn":
        return _yarn(theta, inside, _original_len(keys, inside))
    raise inside.refuse("rope_type", f"is {kind!r}, but must be one of {', '.join(ROPE_KINDS)}")


def _original_len(keys: JsonKeys, inside: JsonKeys) -> int:
    # Beside the other keys it wins, as in transformers; without it the frequencies would be anyone's guess.
    return (keys if keys.values.get(ORIGINAL_LEN) is not None else inside).integer(ORIGINAL_LEN)


def _yarn(theta: float, inside: JsonKeys, original_len: int) -> YarnRope:
    factor = inside.number("factor", minimum=1.0)
    fast, slow = inside.number("beta_fast", 32.0), inside.number("beta_slow", 1.0)
    if fast < slow:
        raise inside.refuse("beta_fast", f"is {fast:g}, but must be at least the beta_slow {slow:g}")
    if theta <= 1:
        raise inside.refuse("rope_theta", f"is {theta:g}, but yarn needs more than 1")
    scales = (inside.number(name, 0.0, minimum=0.0) for name in ("mscale", "mscale_all_dim"))
    return YarnRope(
        theta=theta,
        amplitude=inside.number("attention_factor", yarn_amplitude(factor, *scales)),
        factor=factor,
        original_len=original_len,
        beta_fast=fast,
        beta_slow=slow,
        truncate=inside.flag("truncate", True),
    )


@dataclass(frozen=True, slots=True)
class Family:
    """Differences between architectures: biases, norms of query and key heads, defaults of keys."""

    qkv_bias: bool | None
    """None: the key "attention_bias" decides, for the output projection too."""
    qk_norm: bool = False
    mlp_bias_key: bool = False
    default_head_dim: int | None = None
    windows: WindowRule = no_windows
    default_context_len: int = 32768
    foreign_tensors: tuple[str, ...] = ()
    """Beginnings of the names of tensors that lie beside the model's own and are not its."""


FAMILIES = {
    "LlamaForCausalLM": Family(qkv_bias=None, mlp_bias_key=True, default_context_len=2048),
    "Qwen2ForCausalLM": Family(qkv_bias=True, windows=switched_by_layer),
    "Qwen3ForCausalLM": Family(qkv_bias=None, qk_norm=True, default_head_dim=128, windows=switched_by_layer),
    "MistralForCausalLM": Family(qkv_bias=False, windows=same_in_every_layer, default_context_len=131072),
    # Qwen 2 with a layer for multi-token prediction beside it.
    "MiMoForCausalLM": Family(qkv_bias=True, windows=switched_by_layer, foreign_tensors=("model.mtp_layers.",)),
}
# Architectures whose files bring code of their own, which is not run: what it computes is known here.
KNOWN_CODE = ("MiMoForCausalLM",)
# Beginnings of architectures whose layers carry a running state, which cannot be truncated to an earlier length.
STATE_SPACE = (
    "Mamba", "FalconMamba", "Rwkv", "RWKV", "Jamba", "Zamba", "Bamba", "FalconH1", "NemotronH", "GraniteMoeHybrid",
    "RecurrentGemma", "Griffin", "Lfm2", "Qwen3Next", "Qwen3_5", "MiniMaxForCausalLM", "MiniMaxText01", "KimiLinear",
    "xLSTM", "RetNet", "Plamo2",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecoderFacts:
    """Sizes and limits of any model."""

    vocab_size: int
    """Rows of the embedding and width of the logits; may exceed the tokenizer's vocabulary by padding."""
    num_layers: int
    """Layers that store keys and values."""
    num_kv_heads: int
    head_dim: int
    """Size of a head's keys and of its values."""
    context_len: int
    """Longest sequence in tokens: the trained positions, scaled where the rotary embedding is."""
    eos_token_ids: frozenset[int]
    """Tokens that end a sequence by the model's configuration; may be empty. outrider.model_files.ends knows all."""


@dataclass(frozen=True, slots=True)
class ModelConfig(DecoderFacts):
    """Sizes and switches of one decoder-only transformer of a family that is known here."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    norm_epsilon: float
    rope: Rope
    windows: Windows
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads config.json and generation_config.json; raises ModelRefused with one sentence."""
        keys = JsonKeys(folder / "config.json", read_json(folder / "config.json"))
        return cls.of(keys, read_eos_token_ids(folder, keys))

    @classmethod
    def of(cls, keys: JsonKeys, eos_token_ids: frozenset[int]) -> Self:
        """Configuration from keys that were read; raises ModelRefused."""
        architecture = read_architecture(keys)
        if architecture not in FAMILIES:
            raise keys.refuse("architectures", f"is {architecture}, but must be one of {', '.join(FAMILIES)}")
        family = FAMILIES[architecture]
        activation = keys.values.get("hidden_act", "silu")
        if activation != "silu":
            raise keys.refuse("hidden_act", f'is {activation!r}, but must be "silu"')
        num_heads = keys.integer("num_attention_heads")
        num_layers = keys.integer("num_hidden_layers", maximum=MAX_LAYERS)
        hidden_size = keys.integer("hidden_size")
        head_dim = keys.integer("head_dim", family.default_head_dim or hidden_size // num_heads)
        max_positions = keys.integer("max_position_embeddings", family.default_context_len)
        rope = read_rope(keys, max_positions, head_dim)
        context_len = rope.context_len(max_positions)
        if context_len > MAX_CONTEXT_LEN:
            fault = f"and its scaling make {context_len} positions, but at most {MAX_CONTEXT_LEN} are served"
            raise keys.refuse("max_position_embeddings", fault)
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
            norm_epsilon=keys.number("rms_norm_eps", 1e-6),
            rope=rope,
            context_len=context_len,
            windows=read_windows(keys, num_layers, context_len, family.windows),
            tied_embeddings=keys.flag("tie_word_embeddings"),
            qkv_bias=bool(family.qkv_bias) or attention_bias,
            output_bias=attention_bias,
            mlp_bias=keys.flag("mlp_bias") if family.mlp_bias_key else False,
            qk_norm=family.qk_norm,
            eos_token_ids=eos_token_ids,
        )
        if num_heads % config.num_kv_heads:
            raise keys.refuse("num_key_value_heads", f"is {config.num_kv_heads}, which does not divide {num_heads}")
        if head_dim % 2:
            raise keys.refuse("head_dim", f"is {head_dim}, but rotary embeddings need an even number")
        return config


def read_architecture(keys: JsonKeys) -> str:
    """The architecture that config.json names; raises ModelRefused for those that cannot be served here."""
    names = keys.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise keys.refuse("architectures", f"is {names!r}, but must name one architecture")
    if names[0].startswith(STATE_SPACE):
        fault = f"is {names[0]}, whose running state cannot be rolled back to an earlier token"
        raise keys.refuse("architectures", fault)
    if keys.values.get("auto_map") and names[0] not in KNOWN_CODE:
        raise keys.refuse("auto_map", "asks for code from the model's repository, which is never run")
    if keys.values.get("quantization_config") is not None:
        raise keys.refuse("quantization_config", "is set, but only unquantized weights are served")
    return names[0]


def read_eos_token_ids(folder: Path, config: JsonKeys) -> frozenset[int]:
    """Tokens that end a sequence by config.json or generation_config.json. Raises ModelRefused."""
    path = folder / "generation_config.json"
    sources = [JsonKeys(path, read_json(path))] if path.exists() else []
    return frozenset().union(*(eos_token_ids_in(keys) or () for keys in (*sources, config)))


def eos_token_ids_in(keys: JsonKeys) -> frozenset[int] | None:
    """Ids of the ends that one object names, if it does; -1 is none, as in GGUF. Raises ModelRefused."""
    value = keys.values.get("eos_token_id")
    if value is None:
        return None
    ids = [each for each in (value if isinstance(value, list) else [value]) if each != -1]
    # What does not fit into a message would fail at every request instead of here.
    if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each <= INT32_MAX for each in ids):
        raise keys.refuse("eos_token_id", f"is {value!r}, but must be a token id or a list of them")
    return frozenset(ids)
