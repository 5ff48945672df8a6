"""The tokenizer of a folder, as transformers makes it: tokenizer.json, and what the files beside it change.

transformers takes tokenizer.json as it is for some classes of tokenizers, and for others only its vocabulary, its
merges and what it puts around a text; then it cuts texts into words in the way of that class. Which class it is follows
from tokenizer_config.json and config.json. To both it adds the tokens that the other files name, with the next free
ids where tokenizer.json has not given them any. Saved truncation and padding are for batches of a training, and off.

The tables are those of transformers 5; a test holds them, and the ids of changed folders, against it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.decoders import Decoder
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from outrider.errors import ModelRefused, shown

# All that a tokenizer is made of, to be fetched from a hub.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"),
    "config.json",
)
# What older repositories have instead.
OLDER = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt", "spiece.model")
# The class that takes tokenizer.json as it is.
AS_IT_IS = "TokenizersBackend"
# Classes by the "model_type" of config.json. One that is not here has that of tokenizer_config.json.
MODEL_TYPES: Mapping[str, Sequence[str]] = {
    "GPT2Tokenizer": (
        "codegen", "dbrx", "emu3", "gpt2", "gpt_neo", "gptj", "jais2", "opt", "phi", "starcoder2",
    ),
    "CohereTokenizer": (
        "cohere", "cohere2",
    ),
    "Qwen2Tokenizer": (
        "dots3_note", "moss_transcribe_diarize", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next",
    ),
    "GPTNeoXTokenizer": (
        "falcon_mamba", "gpt_neox", "mamba", "mamba2", "mpt", "olmo", "olmoe", "rwkv", "xlstm",
    ),
    "GemmaTokenizer": (
        "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "recurrent_gemma", "zaya",
    ),
    AS_IT_IS: (
        "beam", "bigbird_pegasus", "xlm-roberta-xl",
        "ernie4_5", "ernie4_5_moe", "flex_olmo", "fuyu", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "got_ocr2",
        "gpt_bigcode", "granite", "granitemoe", "granitemoehybrid", "granitemoeshared", "hyperclovax", "internlm3",
        "iquestcoder", "jamba", "kimi_linear", "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral", "ministral3",
        "mistral", "mixtral", "modernbert-decoder", "nemotron", "olmo2", "olmo3", "olmo_hybrid", "persimmon", "phi3",
        "phimoe", "stablelm",
    ),
}  # fmt: skip
REGISTERED = {each: name for name, types in MODEL_TYPES.items() for each in types}
# Model types whose files name a class that is not theirs, and that have their own.
MISNAMED = frozenset((
    "ernie4_5", "ernie4_5_moe", "fuyu", "hyperclovax", "internlm3", "iquestcoder", "jamba", "minicpm3", "minimax_m2",
    "modernbert-decoder", "nemotron", "phi3", "phimoe", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
    "qwen4_exp",
))  # fmt: skip
MISTRALS = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
# Of those that transformers asks for Mistral's own package first.
OF_MISTRAL = ("mistral", "mixtral", "ministral", "ministral3")
LARGE = 100_000  # tokens, from which on the words of a Mistral may be mended
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
MENDED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

Json = dict[str, Any]
Token = str | AddedToken
Steps = tuple[Normalizer | None, PreTokenizer, Decoder]


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Parts of a tokenizer that a class makes anew."""

    steps: Callable[[bool, bool], Steps]
    """Steps before the merges and after them; given whether a text begins with a space, and "legacy"."""
    named: Mapping[str, str | None]
    """Special tokens where the files do not name them."""
    has_prefix: bool = False
    """Whether a text begins with a space where the files do not say."""
    options: Mapping[str, bool] = field(default_factory=dict)
    knows_unknown: bool = False
    """Whether the merges fall back on unk_token."""
    marks: Callable[[Token], AddedToken] | None = None
    """What the class adds its special tokens as once more, which replaces their flags."""
    begins: bool | None = None
    """Whether a text begins with bos_token; None: tokenizer.json says."""


def _byte_level(*steps: PreTokenizer, composes: bool, use_regex: bool = True) -> Callable[[bool, bool], Steps]:
    def of(has_prefix: bool, _legacy: bool) -> Steps:
        last = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix, use_regex=use_regex)
        cut: PreTokenizer = pre_tokenizers.Sequence([*steps, last]) if steps else last
        return normalizers.NFC() if composes else None, cut, decoders.ByteLevel()

    return of


def _llama(has_prefix: bool, legacy: bool) -> Steps:
    scheme = "always" if legacy else "first"
    joins: list[Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        joins.append(decoders.Strip(content=" ", left=1))
    cut = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme if has_prefix else "never", split=False)
    return None, cut, decoders.Sequence(joins)


def _code_llama(has_prefix: bool, _legacy: bool) -> Steps:
    _, cut, _ = _llama(has_prefix, legacy=False)
    return None, cut, _llama(has_prefix=True, legacy=False)[2]


def _gemma(_prefix: bool, _legacy: bool) -> Steps:
    joins = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return normalizers.Replace(" ", SPACE), pre_tokenizers.Split(" ", "merged_with_previous"), joins


END = "<|endoftext|>"
GPT_2 = Rebuild(_byte_level(composes=False), {"bos_token": END, "eos_token": END, "unk_token": END, "pad_token": None})
FALLBACK = {"fuse_unk": True, "byte_fallback": True}
PIECES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
GAPS = {
    "prefix_token": f"{SPACE}<PRE>",
    "middle_token": f"{SPACE}<MID>",
    "suffix_token": f"{SPACE}<SUF>",
    "eot_token": f"{SPACE}<EOT>",
    "fill_token": "<FILL_ME>",
}
REBUILDS: Mapping[str, Rebuild] = {
    "GPT2Tokenizer": GPT_2,
    "CodeGenTokenizer": GPT_2,
    "Qwen2Tokenizer": Rebuild(
        _byte_level(pre_tokenizers.Split(Regex(QWEN_2), "isolated"), composes=True, use_regex=False),
        {"bos_token": None, "eos_token": END, "unk_token": END, "pad_token": END},
        marks=lambda token: AddedToken(_text(token), special=True),
    ),
    "GPTNeoXTokenizer": Rebuild(
        _byte_level(composes=True),
        {"bos_token": END, "eos_token": END, "unk_token": END, "pad_token": "<|padding|>"},
        begins=False,
    ),
    "CohereTokenizer": Rebuild(
        _byte_level(pre_tokenizers.Digits(individual_digits=True), composes=True),
        {
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "unk_token": "<UNK>",
            "sep_token": "<SEP>",
            "pad_token": "<PAD>",
            "cls_token": "<CLS>",
            "mask_token": "<MASK_TOKEN>",
        },
        marks=lambda token: token if isinstance(token, AddedToken) else AddedToken(token, special=True),
    ),
    "LlamaTokenizer": Rebuild(_llama, PIECES, has_prefix=True, options=FALLBACK),
    "CodeLlamaTokenizer": Rebuild(
        _code_llama, PIECES | GAPS, has_prefix=True, options=FALLBACK, knows_unknown=True, begins=True
    ),
    "GemmaTokenizer": Rebuild(
        _gemma,
        {
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
        options=FALLBACK,
        knows_unknown=True,
    ),
}


def folder_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer whose ids are those of transformers' AutoTokenizer. Raises ModelRefused."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        older = next((name for name in OLDER if (folder / name).is_file()), None)
        code = "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        advice = f", only {older}: make one with transformers, by `{code}`" if older else ""
        raise ModelRefused(f"{folder} has no tokenizer.json that can be read{advice}", file=path)
    given, config = _object(folder / "tokenizer_config.json"), _object(folder / "config.json")
    try:
        text = path.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(text)
        kind = REBUILDS.get(class_of(given, config, text))
        if kind is not None and not isinstance(tokenizer.model, models.BPE):
            kind = None
        tokens = _read_tokens(folder, given, tokenizer, {} if kind is None else kind.named)
        if kind is not None:
            tokenizer = _rebuilt(kind, json.loads(text)["model"], given, tokens, tokenizer.post_processor)
        tokenizer.add_tokens(tokens.missing(tokenizer))
        if kind is not None and kind.marks is not None:
            tokenizer.add_special_tokens([kind.marks(each) for each in tokens.special])
        if kind is not None and kind.begins is not None:
            bos = tokens.named.get("bos_token") if kind.begins else None
            ends = [] if bos is None else [_text(bos)]
            ids = [(each, tokenizer.token_to_id(each)) for each in ends]
            tokenizer.post_processor = processors.TemplateProcessing(single=[*ends, "$A"], special_tokens=ids)
        _mend(tokenizer, given, config)
    except ModelRefused:
        raise
    except Exception as error:  # the library raises bare Exceptions for every kind of fault
        raise ModelRefused(f"{path} cannot be read as a tokenizer: {error}", file=path) from error
    tokenizer.encode_special_tokens = given.get("split_special_tokens") is True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def class_of(given: Json, config: Json, tokenizer: str) -> str:
    """The class that transformers chooses by tokenizer_config.json, config.json and the text of tokenizer.json."""
    model_type, named = config.get("model_type"), given.get("tokenizer_class") or config.get("tokenizer_class")
    registered = REGISTERED.get(model_type) if isinstance(model_type, str) else None
    is_misnamed = bool(MISNAMED & {str(model_type), str(config.get("model_name"))})
    if not isinstance(named, str):
        return registered or AS_IT_IS
    named = named.removesuffix("Fast")
    remote = given.get("auto_map")
    if remote.get("AutoTokenizer") if isinstance(remote, dict) else remote:
        # A class of the repository's own is asked for, which is not run.
        return named
    is_llama = named == "LlamaTokenizer" and model_type not in OF_MISTRAL and not is_misnamed
    if is_llama and '"ByteLevel"' in tokenizer:
        return AS_IT_IS
    # Where they differ, what is registered counts only if it takes the file as it is, or the file is known to be wrong.
    return registered if registered is not None and (registered == AS_IT_IS or is_misnamed) else named


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Facts about tokens from the files beside tokenizer.json."""

    numbered: Mapping[int, AddedToken]
    """Added tokens by ids that count for their order alone."""
    named: Mapping[str, Token]
    """Special tokens by their names, in the order in which those without an id get one."""
    extra: Sequence[Token]
    """Special tokens without names, which come after them."""

    @property
    def special(self) -> list[Token]:
        return [*self.named.values(), *self.extra]

    def missing(self, tokenizer: Tokenizer) -> list[AddedToken]:
        """Tokens that a tokenizer has not added yet, in the order in which they get ids."""
        names = {_text(each) for each in self.named.values()}
        wanted: list[Token] = [self.numbered[index] for index in sorted(self.numbered)]
        known = {each.content for each in tokenizer.get_added_tokens_decoder().values()} | {*map(_text, wanted)}
        for each in self.special:
            # A text and a token with flags are two, even with one content; the flags of the last are those that hold.
            if _text(each) not in known and each not in wanted:
                wanted.append(each)
        found = [each if isinstance(each, AddedToken) else AddedToken(each, special=True) for each in wanted]
        for token in found:
            token.special = token.special or token.content in names
        return found


def _read_tokens(folder: Path, given: Json, tokenizer: Tokenizer, defaults: Mapping[str, str | None]) -> _Tokens:
    """Tokens of a folder with `given` in tokenizer_config.json; `tokenizer` is that of tokenizer.json alone.

    `defaults` are the special tokens of a class that makes its tokenizer anew.
    """
    extra: Any = given.get("extra_special_tokens") or given.get("additional_special_tokens")
    own = {key: value for key, value in given.items() if _is_own(key) and isinstance(value, str)}
    values = {key: value for key, value in given.items() if key not in own}
    if isinstance(extra, dict):
        own, extra = own | extra, None
    numbered: dict[int, AddedToken] = {}
    if "added_tokens_decoder" in given:
        numbered = {int(index): _added(each) for index, each in given["added_tokens_decoder"].items()}
    else:
        older = _object(folder / "special_tokens_map.json")
        values |= {key: _added(each, special=True) if isinstance(each, dict) else each for key, each in older.items()}
        more = older.get("extra_special_tokens")
        if isinstance(more, dict):
            own, extra = own | more, None
        elif more:
            extra = [*(extra or []), *more]
        # Those that are written with flags are not known to be special here.
        written = (*(values.get(key) for key in NAMED), *(extra or ()))
        special = {_text(each) for each in written if isinstance(each, str | AddedToken)}
        for text, index in _object(folder / "added_tokens.json").items():
            is_special = text in special
            numbered[int(index)] = AddedToken(text, normalized=not is_special, special=is_special)
        numbered |= tokenizer.get_added_tokens_decoder()
        extra = older.get("additional_special_tokens") if extra is None else extra
    by_text = {each.content: each for each in numbered.values()}
    # What batches are filled up with is a token too.
    padding = {"pad_token": tokenizer.padding["pad_token"]} if tokenizer.padding else {}
    found = {**padding, **defaults, **values}
    named = {key: by_text.get(_text(found[key]), _token(found[key])) for key in NAMED if found.get(key) is not None}
    auto = {key: found[key] for key in found if _is_own(key) and isinstance(found[key], str | dict | AddedToken)}
    named |= {key: _token(value) for key, value in {**auto, **own}.items()}
    if extra is None:
        extra = [value for key, value in defaults.items() if _is_own(key)]
    return _Tokens(numbered, named, [_token(each) for each in extra])


def _is_own(key: str) -> bool:
    """Whether a key names a special token that only some models have."""
    return key.endswith("_token") and key not in NAMED


def _rebuilt(
    kind: Rebuild, model: Json, given: Json, tokens: _Tokens, around: processors.PostProcessor | None
) -> Tokenizer:
    """The tokenizer of a class, with the vocabulary and merges of a file's model, and `around` around a text."""
    pairs = (each.split(" ") if isinstance(each, str) else each for each in model["merges"])
    merges: list[tuple[str, str]] = [(left, right) for left, right in pairs]
    unknown = tokens.named.get("unk_token") if kind.knows_unknown else None
    name = None if unknown is None else _text(unknown)
    made = Tokenizer(models.BPE(vocab=model["vocab"], merges=merges, unk_token=name, **kind.options))
    has_prefix = given.get("add_prefix_space")
    steps = kind.steps(kind.has_prefix if has_prefix is None else bool(has_prefix), bool(given.get("legacy")))
    normalizer, made.pre_tokenizer, made.decoder = steps
    if normalizer is not None:
        made.normalizer = normalizer
    if around is not None:
        made.post_processor = around
    return made


def _mend(tokenizer: Tokenizer, given: Json, config: Json) -> None:
    """Cuts words as later Mistrals do, where the files ask for it and are old enough."""
    cut = tokenizer.pre_tokenizer
    if given.get("fix_mistral_regex") is not True or cut is None or tokenizer.get_vocab_size() <= LARGE:
        return
    version = re.match(r"\d+", str(config.get("transformers_version") or "0"))
    is_other = config.get("model_type") is not None and config["model_type"] not in MISTRALS
    if not config or is_other or (version is not None and int(version[0]) >= 5):
        return
    words = pre_tokenizers.Split(Regex(MENDED), "isolated")
    if isinstance(cut, pre_tokenizers.Sequence):
        cut[0] = words
        tokenizer.pre_tokenizer = cut
        return
    if isinstance(cut, pre_tokenizers.Metaspace):
        cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, cut])


def _text(token: Token | Json) -> str:
    found = _token(token)
    return found if isinstance(found, str) else found.content


def _token(value: Token | Json) -> Token:
    return _added(value) if isinstance(value, dict) else value


def _added(value: Json, **flags: bool) -> AddedToken:
    return AddedToken(**{key: value[key] for key in ("content", *FLAGS) if key in value} | flags)


def _object(path: Path) -> Json:
    """The JSON object in a file, empty where there is no file. Raises ModelRefused."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelRefused(f"{path} is not valid JSON: {error}", file=path) from None
    if not isinstance(found, dict):
        raise ModelRefused(f"{path} does not hold a JSON object but {shown(found)}", file=path)
    return found
