"""The tokenizer of a GGUF file, built of the parts of the tokenizers library, and what else stands beside it.

Two kinds of vocabularies are read: byte-level BPE with its merges ("gpt2"), cut into words by a pre-tokenizer that the
file only names, and SentencePiece's BPE ("llama"), whose merges follow from the scores of its pieces: what two pieces
make together may be merged, and goes the earlier the higher it scores (Kudo and Richardson, 2018).
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from outrider.errors import ModelRefused, shown
from outrider.model_files.gguf.config import NO_TOKEN
from outrider.model_files.gguf.header import GgufFile

MODEL, PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
TOKENS, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
MERGES, SCORES = "tokenizer.ggml.merges", "tokenizer.ggml.scores"
TEMPLATE = "tokenizer.chat_template"
# Of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# The words of Llama 3's and Qwen's tokenizers, of Mistral's Tekken, of OpenAI's: https://github.com/meta-llama/llama3,
# https://github.com/QwenLM/Qwen2.5, https://github.com/mistralai/mistral-common and https://github.com/openai/tiktoken.
# They differ in digits and letters.
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{REST}"
QWEN_2 = LLAMA_3.replace("{1,3}", "")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|"
    rf"\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{REST}"
)
O200K = TEKKEN.replace("+|", f"+{ENDINGS}?|", 1).replace("*|", f"*{ENDINGS}?|", 1).replace(r"\p{N}|", r"\p{N}{1,3}|")


@dataclass(frozen=True, slots=True)
class Words:
    """Rules that cut a text before its bytes are merged."""

    pattern: str | None = None
    """Regular expression of one word; None for GPT-2's."""
    single_digits: bool = False
    composes: bool = False
    """Whether characters are composed first (NFC)."""
    whole_words_first: bool = False
    """Whether a word that is a token is never put together from merges."""
    begins: bool = False
    """Whether a text begins with the bos token where the file does not say."""


LLAMA_3_WORDS = Words(LLAMA_3, whole_words_first=True, begins=True)
QWEN_2_WORDS = Words(QWEN_2, composes=True)
WORDS = {
    "gpt-2": Words(),
    "default": Words(),
    "smollm": Words(single_digits=True),
    "llama-bpe": LLAMA_3_WORDS,
    "llama3": LLAMA_3_WORDS,
    "llama-v3": LLAMA_3_WORDS,
    "qwen2": QWEN_2_WORDS,
    "deepseek-r1-qwen": QWEN_2_WORDS,
    "tekken": Words(TEKKEN, whole_words_first=True, begins=True),
    # Of Phi 4, whose words are those of cl100k, and of Phi 4 mini.
    "dbrx": Words(LLAMA_3),
    "gpt-4o": Words(O200K),
}
# Where a file does not say how words are cut: tokens that stand under these ids in the vocabulary of one family alone.
SIGNATURES = {
    "llama-bpe": {128000: "<|begin_of_text|>", 128001: "<|end_of_text|>"},
    "qwen2": {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>"},
    "deepseek-r1-qwen": {151643: "<\uff5cend\u2581of\u2581sentence\uff5c>"},
    "tekken": {0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]"},
    "smollm": {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>", 3: "<repo_name>", 5: "<file_sep>"},
    "gpt-2": {220: "\u0120", 256: "\u0120t", 257: "\u0120a", 50256: "<|endoftext|>"},
}
# Special tokens of Phi 3 after which white space is text; after its others it is none, as in its tokenizer.json.
PHI_3, LEAVES_SPACE = "phi3", ("<unk>", "<s>", "<|endoftext|>")
# Names of special tokens in templates, and the file's; "seperator" is how the format spells it.
SPECIAL = {
    "bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "cls": "cls", "mask": "mask",
}  # fmt: skip


def read_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer, with the special tokens that it puts around a text. Raises ModelRefused."""
    kind = file.metadata.get(MODEL)
    tokens, types = _tokens(file)
    # Rows of the embedding that are only padding have names made up by converters, and no other format counts them.
    padding = {index for index, kind in enumerate(types) if kind == UNUSED and tokens[index] == f"[PAD{index}]"}
    vocabulary = {token: index for index, token in enumerate(tokens) if index not in padding}
    if len(vocabulary) + len(padding) < len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary.get(token, index) != index)
        raise file.refuse(TOKENS, f"has the token {shown(twice)} twice")
    try:
        if kind == "gpt2":
            tokenizer, begins = _byte_level(file, vocabulary)
        elif kind == "llama":
            tokenizer, begins = _sentence_piece(file, vocabulary, tokens, types), True
        else:
            raise file.refuse(MODEL, f'is {shown(kind)}, but must be "gpt2" or "llama"')
        takes_space = kind == "llama" and file.metadata.get("general.architecture") == PHI_3
        added = [
            AddedToken(
                tokens[index],
                normalized=False,
                special=of_type != USER_DEFINED,
                rstrip=takes_space and tokens[index] not in LEAVES_SPACE,
            )
            for index, of_type in enumerate(types)
            if of_type in (UNKNOWN, CONTROL, USER_DEFINED) and tokens[index]
        ]
        tokenizer.add_tokens(added)
        # A whole text has its bos and eos token where the file asks for them.
        sides: dict[str, list[str]] = {}
        used: dict[str, int] = {}
        for side, default in (("bos", begins), ("eos", False)):
            token_id = _special_id(file, f"tokenizer.ggml.{side}_token_id", tokens)
            is_wanted = _typed(file, f"tokenizer.ggml.add_{side}_token", bool, "true or false", default)
            if is_wanted and token_id is not None:
                sides[side] = [tokens[token_id]]
                used[tokens[token_id]] = token_id
        if used:
            single = [*sides.get("bos", []), "$A", *sides.get("eos", [])]
            tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(used.items()))
    except ModelRefused:
        raise
    except Exception as error:  # the library raises bare Exceptions for every kind of fault
        raise ModelRefused(f"{file.path} has a tokenizer that cannot be built: {error}", file=file.path) from error
    return tokenizer


def doubt(file: GgufFile) -> str | None:
    """Reason why texts may be cut into other tokens than in training, in one sentence; None of a file that
    says how they are cut, and of one whose vocabulary shows it.
    """
    if file.metadata.get(MODEL) != "gpt2" or _words_name(file) is not None:
        return None
    known = ", ".join(WORDS)
    return (
        f'{file.path} does not say in "{PRE}" how words are cut, and its vocabulary is of no family that is known, so '
        f"they are cut as GPT-2 does and answers may be worse: write one of {known} there with gguf_new_metadata"
    )


def _words_name(file: GgufFile) -> object:
    """Value of `tokenizer.ggml.pre` or, without that, the family of the vocabulary; None for an unknown one."""
    name = file.metadata.get(PRE, "default")
    if name != "default":
        return name
    tokens = _strings(file, TOKENS)
    return next(
        (name for name, known in SIGNATURES.items() if all(tokens[each : each + 1] == [known[each]] for each in known)),
        None,
    )


def special_tokens(file: GgufFile) -> dict[str, str]:
    """Texts of special tokens by the names that chat templates know, like bos_token. Raises ModelRefused."""
    tokens, _ = _tokens(file)
    found = {name: _special_id(file, f"tokenizer.ggml.{key}_token_id", tokens) for name, key in SPECIAL.items()}
    return {f"{name}_token": tokens[token_id] for name, token_id in found.items() if token_id is not None}


def chat_templates(file: GgufFile) -> dict[str, str]:
    """Sources of chat templates by name, "default" for the one without; may be empty. Raises ModelRefused."""
    found = {
        key.removeprefix(TEMPLATE).removeprefix(".") or "default": key
        for key in file.metadata
        if key == TEMPLATE or key.startswith(f"{TEMPLATE}.")
    }
    return {name: _typed(file, key, str, "text") for name, key in found.items()}


def _byte_level(file: GgufFile, vocabulary: Mapping[str, int]) -> tuple[Tokenizer, bool]:
    """Tokenizer of bytes, and whether a text begins with the bos token where the file does not say."""
    name = _words_name(file) or "default"
    if not isinstance(name, str) or name not in WORDS:
        raise file.refuse(PRE, f"is {shown(name)}, a pre-tokenizer that is not known; there are {', '.join(WORDS)}")
    words = WORDS[name]
    merges = [tuple(merge.split(" ")) for merge in _strings(file, MERGES)]
    wrong = next((merge for merge in merges if len(merge) != 2), None)
    if wrong is not None:
        raise file.refuse(MERGES, f"has {shown(' '.join(wrong))}, but a merge is two tokens with a space between them")
    made: list[tuple[str, str]] = [(merge[0], merge[1]) for merge in merges]
    stray = next((each for pair in made for each in (*pair, "".join(pair)) if each not in vocabulary), None)
    if stray is not None:
        raise file.refuse(MERGES, f"has {shown(stray)}, which is no token")
    tokenizer = Tokenizer(models.BPE(vocab=dict(vocabulary), merges=made, ignore_merges=words.whole_words_first))
    cuts: list[PreTokenizer] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words.pattern is None)]
    if words.pattern is not None:
        cuts = [pre_tokenizers.Split(Regex(words.pattern), "isolated"), *cuts]
    if words.single_digits:
        cuts = [pre_tokenizers.Digits(individual_digits=True), *cuts]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    if words.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, words.begins


def _sentence_piece(file: GgufFile, vocabulary: Mapping[str, int], tokens: list[str], types: "array[int]") -> Tokenizer:
    scores = file.metadata.get(SCORES)
    if not isinstance(scores, array) or len(scores) != len(tokens):
        raise file.refuse(SCORES, f"must be a list of {len(tokens)} numbers")
    unknown = _special_id(file, "tokenizer.ggml.unknown_token_id", tokens)
    # Two pieces of text that make a third.
    texts = {token: index for token, index in vocabulary.items() if types[index] == NORMAL}
    pairs = [
        (-scores[index], token[:cut], token[cut:])
        for token, index in texts.items()
        for cut in range(1, len(token))
        if token[:cut] in texts and token[cut:] in texts
    ]
    merges = [(one, two) for _, one, two in sorted(pairs, key=itemgetter(0))]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=dict(vocabulary),
            merges=merges,
            unk_token=tokens[0 if unknown is None else unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if has_prefix else spaces
    joins = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*joins, *([decoders.Strip(" ", 1, 0)] if has_prefix else [])])
    return tokenizer


def _tokens(file: GgufFile) -> tuple[list[str], "array[int]"]:
    """Tokens by id, and their types."""
    tokens = _strings(file, TOKENS)
    types = file.metadata.get(TYPES, array("i", [NORMAL]) * len(tokens))
    if not isinstance(types, array) or len(types) != len(tokens):
        raise file.refuse(TYPES, f"must be a list of {len(tokens)} numbers")
    return tokens, types


def _strings(file: GgufFile, key: str) -> list[str]:
    found = file.metadata.get(key)
    if not isinstance(found, list) or not found:
        raise file.refuse(key, "is missing, or no list of texts")
    return found


def _special_id(file: GgufFile, key: str, tokens: list[str]) -> int | None:
    found = file.metadata.get(key)
    if type(found) is int and found in NO_TOKEN:
        return None
    if found is not None and (type(found) is not int or not 0 <= found < len(tokens)):
        raise file.refuse(key, f"is {shown(found)}, but must be the id of one of {len(tokens)} tokens")
    return found


def _typed(file: GgufFile, key: str, kind: type, what: str, default: object = None) -> Any:  # noqa: ANN401 - of kind
    found = file.metadata.get(key, default)
    if not isinstance(found, kind):
        raise file.refuse(key, f"is {shown(found)}, but must be {what}")
    return found
