"""The shape of a model, read from its config.json, or the one sentence that says why it cannot be served.

A model is refused here before anything of it is loaded. Keys have the names and the defaults that transformers gives
them.

Windows: a window of W lets the row at position t see the positions above t - W, itself included. Nothing is freed that
a window hides: a truncation may bring it back into sight.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Self

from outrider.engine.models.experts import ExpertRule, ExpertSizes, experts_of_gpt_oss, experts_of_qwen
from outrider.engine.models.json_keys import INT32_MAX, JsonKeys, read_json
from outrider.engine.models.mxfp4 import METHOD
from outrider.engine.models.rope import Rope
from outrider.engine.models.rope_keys import FULL, SLIDING, RopeRule, one_rope, partial_rope, rope_by_window

# Positions are float32 where angles are computed, which counts no further than this without gaps.
MAX_CONTEXT_LEN = 1 << 24
# Far above any model's: what is refused is a number that alone would fill the memory with the names of its layers.
MAX_LAYERS = 1 << 12
DEFAULT_WINDOW, NARROW_WINDOW, DEFAULT_MAX_WINDOW_LAYERS = 4096, 128, 28
# Of so many layers of Gemma 3 the last sees everything.
DEFAULT_PATTERN = 6
DEFAULT_CONTEXT_LEN = 32768
# What a model of pictures and text has beside the latter.
PICTURES = ("vision_tower", "multi_modal_projector")

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


def most_layers(keys: JsonKeys, num_layers: int) -> Windows:
    """Gemma 3's rule: the "layer_types", or all layers but each sixth, or what "sliding_window_pattern" says."""
    pattern = (
        1 if keys.values.get("layer_types") is not None else keys.integer("sliding_window_pattern", DEFAULT_PATTERN)
    )
    return _last_of_each(keys, num_layers, _window(keys), pattern)


def every_other_layer(keys: JsonKeys, num_layers: int) -> Windows:
    """The rule of gpt-oss: the "layer_types", or the first layer, the third and so on."""
    return _last_of_each(keys, num_layers, _window(keys, NARROW_WINDOW), 2)


def _last_of_each(keys: JsonKeys, num_layers: int, window: int | None, pattern: int) -> Windows:
    """The "layer_types", or a window in all layers but the last of each `pattern`."""
    types = keys.values.get("layer_types")
    if types is None:
        types = [FULL if (layer + 1) % pattern == 0 else SLIDING for layer in range(num_layers)]
    if window is None and SLIDING in types:
        raise keys.refuse("sliding_window", f"is null, but there are layers of {SLIDING}")
    return tuple(window if kind == SLIDING else None for kind in types)


def _window(keys: JsonKeys, default: int = DEFAULT_WINDOW) -> int | None:
    # An explicit null means no window; only an absent key has the default.
    if "sliding_window" in keys.values and keys.values["sliding_window"] is None:
        return None
    return keys.integer("sliding_window", default)


@dataclass(frozen=True, slots=True)
class Family:
    """Differences between architectures: biases, norms, gates, defaults of keys, and what a file calls its tensors."""

    qkv_bias: bool | None
    """None: the key "attention_bias" decides, for the output projection too."""
    qk_norm: bool = False
    mlp_bias_key: bool = False
    windows: WindowRule = no_windows
    ropes: RopeRule = one_rope
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of keys that a file leaves out, where they are not those of most families."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """The key that names the function of the gate, and its only value that is served."""
    scale_key: str | None = None
    """The number whose inverse root multiplies scores, where it is not the size of a head."""
    scales_embedding: bool = False
    """Whether embeddings are multiplied by the root of their width."""
    norms_outputs: bool = False
    """Whether what attention and MLP give has norms of its own, before it is added."""
    norms_from_zero: bool = False
    """Whether norms are stored less 1, in safetensors."""
    has_sinks: bool = False
    """Whether each head has a score for attention to nothing."""
    is_stacked: bool = False
    """Whether q, k and v are one matrix of the file, and gate and up another."""
    off: tuple[str, ...] = ()
    """Keys of what only the code of transformers computes: absent, null or false here."""
    experts: ExpertRule | None = None
    """How its keys say which layers have experts, and of what sizes."""
    method: str | None = None
    """The only "quant_method" of a "quantization_config" that is served."""
    part: str | None = None
    """The key under which a model of several has the one of text."""
    prefixes: tuple[tuple[str, str], ...] = ()
    """Beginnings of tensors' names in the file, with those that they have alone."""
    foreign_tensors: tuple[str, ...] = ()
    """Beginnings of the names of tensors that lie beside the model's own and are not its."""


GEMMA_3 = Family(
    qkv_bias=None,
    qk_norm=True,
    windows=most_layers,
    ropes=rope_by_window,
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    scale_key="query_pre_attn_scalar",
    scales_embedding=True,
    norms_outputs=True,
    norms_from_zero=True,
    off=("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
)
FAMILIES = {
    "LlamaForCausalLM": Family(qkv_bias=None, mlp_bias_key=True, defaults={"max_position_embeddings": 2048}),
    "Qwen2ForCausalLM": Family(qkv_bias=True, windows=switched_by_layer),
    "Qwen3ForCausalLM": Family(qkv_bias=None, qk_norm=True, windows=switched_by_layer, defaults={"head_dim": 128}),
    "Qwen3MoeForCausalLM": Family(
        qkv_bias=None,
        qk_norm=True,
        windows=switched_by_layer,
        experts=experts_of_qwen,
        defaults={"num_key_value_heads": 4, "intermediate_size": 6144},
    ),
    "GptOssForCausalLM": Family(
        qkv_bias=None,
        windows=every_other_layer,
        has_sinks=True,
        experts=experts_of_gpt_oss,
        method=METHOD,
        defaults={
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "attention_bias": True,
        },
    ),
    "MistralForCausalLM": Family(
        qkv_bias=False, windows=same_in_every_layer, defaults={"max_position_embeddings": 131072}
    ),
    # Qwen 2 with a layer for multi-token prediction beside it.
    "MiMoForCausalLM": Family(qkv_bias=True, windows=switched_by_layer, foreign_tensors=("model.mtp_layers.",)),
    "Gemma3ForCausalLM": GEMMA_3,
    # The same with a tower for pictures, which is left out.
    "Gemma3ForConditionalGeneration": replace(
        GEMMA_3,
        part="text_config",
        prefixes=(("language_model.", ""), ("model.language_model.", "model.")),
        foreign_tensors=tuple(f"{top}{name}." for top in ("", "model.") for name in PICTURES),
    ),
    "Phi3ForCausalLM": Family(
        qkv_bias=False,
        windows=same_in_every_layer,
        ropes=partial_rope,
        defaults={
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
        is_stacked=True,
    ),
}
# Architectures whose files bring code of their own, which is not run: what it computes is known here.
KNOWN_CODE = ("MiMoForCausalLM", "Phi3ForCausalLM")
# Beginnings of architectures whose layers carry a running state, which cannot be truncated to an earlier length.
STATE_SPACE = (
    "Mamba", "FalconMamba", "Rwkv", "RWKV", "Jamba", "Zamba", "Bamba", "FalconH1", "NemotronH", "GraniteMoeHybrid",
    "RecurrentGemma", "Griffin", "Lfm2", "Qwen3Next", "Qwen3_5", "MiniMaxForCausalLM", "MiniMaxText01", "KimiLinear",
    "xLSTM", "RetNet", "Plamo2",
)  # fmt: skip


class Masks(NamedTuple):
    """Tokens that stand for what is not known yet, after which a draft guesses several tokens in one forward."""

    token_id: int
    block_size: int | None = None
    """Rows of a block, which are always computed: the last token and masks. None for one mask less than guesses."""
    first_row: int = 0
    """The row that the first guess is drawn after: 0 for the last token, 1 where a mask guesses its own place."""

    @property
    def most_guesses(self) -> int | None:
        """Guesses of a whole block; None where there may be any number."""
        return None if self.block_size is None else self.block_size - self.first_row

    def count(self, num_guesses: int) -> int:
        """Number of masks for so many guesses."""
        return (self.block_size or num_guesses) - 1


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
    masks: Masks | None = field(default=None, kw_only=True)
    """Masks of a draft that was trained with them; else None."""


@dataclass(frozen=True, slots=True)
class ModelConfig(DecoderFacts):
    """Sizes and switches of one decoder-only transformer of a family that is known here."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    norm_epsilon: float
    ropes: tuple[Rope, ...]
    """The rotary embedding of each layer."""
    windows: Windows
    score_scale: float
    """Factor of a query's products with keys."""
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    experts: tuple[ExpertSizes | None, ...]
    """Experts of each layer, None where it has an MLP of its own; empty where none has any."""

    def experts_of(self, layer: int) -> ExpertSizes | None:
        """Sizes of the experts of a layer, None where it has an MLP of its own."""
        return self.experts[layer] if self.experts else None

    @property
    def family(self) -> Family:
        return FAMILIES[self.architecture]

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
        keys = _of_text(keys, family)
        is_on = next((key for key in family.off if keys.values.get(key)), None)
        if is_on is not None:
            raise keys.refuse(is_on, f"is {keys.values[is_on]!r}, but only null is served")
        name, served = family.activation
        activation = keys.values.get(name, served)
        if activation != served:
            raise keys.refuse(name, f'is {activation!r}, but must be "{served}"')
        num_heads = keys.integer("num_attention_heads")
        num_layers = keys.integer("num_hidden_layers", maximum=MAX_LAYERS)
        hidden_size = keys.integer("hidden_size")
        head_dim = keys.integer("head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise keys.refuse("head_dim", f"is {head_dim}, but rotary embeddings need an even number")
        max_positions = keys.integer("max_position_embeddings", DEFAULT_CONTEXT_LEN)
        ropes = family.ropes(keys, max_positions, head_dim)
        if ropes.context_len > MAX_CONTEXT_LEN:
            fault = f"and its scaling make {ropes.context_len} positions, but at most {MAX_CONTEXT_LEN} are served"
            raise keys.refuse("max_position_embeddings", fault)
        windows = read_windows(keys, num_layers, ropes.context_len, family.windows)
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
            # By the file: a layer whose window hides nothing within the context is one of those with windows here.
            ropes=tuple(
                ropes.unlimited if window is None else ropes.windowed for window in family.windows(keys, num_layers)
            ),
            context_len=ropes.context_len,
            windows=windows,
            score_scale=(head_dim if family.scale_key is None else keys.number(family.scale_key)) ** -0.5,
            tied_embeddings=keys.flag("tie_word_embeddings"),
            qkv_bias=bool(family.qkv_bias) or attention_bias,
            output_bias=attention_bias,
            mlp_bias=keys.flag("mlp_bias") if family.mlp_bias_key else False,
            qk_norm=family.qk_norm,
            experts=() if family.experts is None else family.experts(keys, num_layers),
            eos_token_ids=eos_token_ids,
            masks=read_masks(keys, keys.integer("vocab_size")),
        )
        if num_heads % config.num_kv_heads:
            raise keys.refuse("num_key_value_heads", f"is {config.num_kv_heads}, which does not divide {num_heads}")
        return config


def is_ours(keys: JsonKeys) -> bool:
    """Whether our own transformer computes a model; of some families it leaves a few to the code of transformers."""
    family = FAMILIES.get(read_architecture(keys))
    return family is not None and not any(_of_text(keys, family).values.get(key) for key in family.off)


def _of_text(keys: JsonKeys, family: Family) -> JsonKeys:
    """The keys of the model of text, with the family's defaults. Raises ModelRefused."""
    if family.part is not None:
        inner = keys.values.get(family.part)
        if not isinstance(inner, dict):
            raise keys.refuse(family.part, f"is {inner!r}, but must be an object")
        tied = {key: keys.values[key] for key in ("tie_word_embeddings",) if key in keys.values}
        keys = JsonKeys(keys.path, {**inner, **tied}, f"{family.part}.", keys.spelled)
    absent = {key: value for key, value in family.defaults.items() if keys.values.get(key) is None}
    return replace(keys, values={**keys.values, **absent}) if absent else keys


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
    quantised = keys.values.get("quantization_config")
    family = FAMILIES.get(names[0])
    if quantised is not None and not (
        family is not None
        and family.method is not None
        and isinstance(quantised, dict)
        and quantised.get("quant_method") == family.method
    ):
        served = "unquantized weights" + ("" if family is None or family.method is None else f" and {family.method}")
        raise keys.refuse("quantization_config", f"is set, but only {served} are served")
    return names[0]


def read_eos_token_ids(folder: Path, config: JsonKeys) -> frozenset[int]:
    """Tokens that end a sequence by config.json or generation_config.json. Raises ModelRefused."""
    path = folder / "generation_config.json"
    sources = [JsonKeys(path, read_json(path))] if path.exists() else []
    return frozenset().union(*(eos_token_ids_in(keys) or () for keys in (*sources, config)))


def read_masks(keys: JsonKeys, vocab_size: int) -> Masks | None:
    """The masks of a PARD draft, as its publisher writes them, None for any other model. Raises ModelRefused."""
    if keys.values.get("pard_token") is None and keys.values.get("spd_type") != "pard":
        return None
    return Masks(keys.integer("pard_token", minimum=0, maximum=vocab_size - 1))


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
