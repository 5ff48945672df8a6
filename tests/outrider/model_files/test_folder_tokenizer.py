"""The tokenizer of a folder is what transformers would make of it, whatever its files say."""

import asyncio
import json
import random
import shutil
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import (
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
    TOKENIZER_MAPPING_NAMES,
)

from gateway.text.tokenizer import Tokenizer as GatewayTokenizer
from outrider.errors import ModelRefused
from outrider.model_files.folder_tokenizer import AS_IT_IS, MENDED, MISNAMED, REBUILDS, REGISTERED, folder_tokenizer
from outrider.model_files.vocabulary import Vocabulary

TARGET = Path(__file__).resolve().parents[3] / "models" / "target"
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
CORPUS = [
    "The fox ran home, and the dog's bone was 1234 days old.  It isn't FUN!",
    "naïve café 日本 \n\n tabs\tend ",
] * 3
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "image_token")
TEXTS = (
    "",
    " ",
    "The fox",
    "the dog's 1234 bones,  isn't it?\n\n FUN",
    "e\u0301 café 日本 \x00 😀",
    "a<s> b </s>c<pad>x",
)
MADE_UP = ("<pad>", "<s>", "</s>", "<unk>", "<|tool|>", "<mid dle>", "<|image|>", "fox", "<0>")
CLASSES = (
    *REBUILDS,
    "LlamaTokenizerFast",
    "Qwen2TokenizerFast",
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
    "FooTokenizer",
)
MODEL_TYPES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "phi3",
    "cohere",
    "smollm3",
    "olmo2",
    "foo",
)


def byte_level() -> Tokenizer:
    """A small byte-level vocabulary with its merges, with an end of text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def pieces() -> Tokenizer:
    """SentencePiece's kind, as Llama 2's file has it: spaces are letters, and bytes are fallen back on."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    joins = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(joins)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    raw = json.loads(made.to_str())
    raw["added_tokens"] = raw["added_tokens"][:3]
    made = Tokenizer.from_str(json.dumps(raw))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


KINDS = (byte_level(), pieces())


class Folder:
    """A folder with one of the tokenizers, and files that people and their tools leave beside it."""

    def __init__(self, path: Path, seed: int) -> None:
        """Writes it."""
        self.chance = random.Random(seed)
        self.raw: dict[str, Any] = json.loads(self.chance.choice(KINDS).to_str())
        self.size = len(self.raw["model"]["vocab"])
        config: dict[str, Any] = {"model_type": self.chance.choice(MODEL_TYPES)}
        self._change_tokenizer()
        given = self._given()
        if self._one_in(2):
            where = config if self._one_in(4) else given
            where["tokenizer_class"] = self.chance.choice(CLASSES)
        files = {"tokenizer": self.raw, "config": config, **self._older()}
        if given or self._one_in(2):
            files["tokenizer_config"] = given
        for name, values in files.items():
            (path / f"{name}.json").write_text(json.dumps(values))

    def _one_in(self, count: int) -> bool:
        return self.chance.randrange(count) == 0

    def _token(self, text: str) -> dict[str, Any]:
        flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
        return {"content": text, **{flag: self._one_in(3) for flag in flags}}

    def _change_tokenizer(self) -> None:
        if self._one_in(2):
            self.raw["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
        if self._one_in(2):
            pad = self.chance.choice(["<pad>", "<|endoftext|>", "[PAD]"])
            kind = {"pad_id": 0, "pad_type_id": 0, "pad_token": pad, "pad_to_multiple_of": None}
            self.raw["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", **kind}
        if self._one_in(3):
            text = self.chance.choice(["<|new|>", "<extra>"])
            self.raw["added_tokens"].append({"id": self.size, **self._token(text)})
        if self._one_in(4):
            self.raw["post_processor"] = None
        self.raw["model"]["ignore_merges"] = self._one_in(4)

    def _given(self) -> dict[str, Any]:
        given: dict[str, Any] = {}
        for name in NAMES:
            if self._one_in(4):
                text = self.chance.choice(MADE_UP)
                given[name] = self.chance.choice([text, None, {"__type": "AddedToken", **self._token(text)}])
        keys = ("add_prefix_space", "legacy", "add_bos_token", "add_eos_token", "clean_up_tokenization_spaces")
        given |= {key: self._one_in(2) for key in keys if self._one_in(3)}
        if self._one_in(8):
            given["split_special_tokens"] = True
        if self._one_in(4):
            key = self.chance.choice(["extra_special_tokens", "additional_special_tokens"])
            given[key] = self.chance.sample(MADE_UP, 2)
        elif self._one_in(6):
            given["extra_special_tokens"] = {"audio_token": "<audio>", "eoi": "<eoi>"}
        if self._one_in(3):
            own = {str(each["id"]): {**each} for each in self.raw["added_tokens"]}
            gap = self.chance.choice([0, 0, 3])
            texts = self.chance.sample(MADE_UP, 3)
            own |= {str(self.size + gap + place): self._token(text) for place, text in enumerate(texts)}
            for each in own.values():
                each.pop("id", None)
            given["added_tokens_decoder"] = own
        return given

    def _older(self) -> dict[str, dict[str, Any]]:
        files: dict[str, dict[str, Any]] = {}
        if self._one_in(3):
            texts: dict[str, str] = {name: self.chance.choice(MADE_UP) for name in NAMES if self._one_in(3)}
            named: dict[str, Any] = {
                name: self.chance.choice([text, self._token(text)]) for name, text in texts.items()
            }
            if self._one_in(2):
                named["additional_special_tokens"] = self.chance.sample(MADE_UP, 2)
            files["special_tokens_map"] = named
        if self._one_in(3):
            added = self.chance.sample(MADE_UP, 3)
            files["added_tokens"] = {text: self.size + 1 + place for place, text in enumerate(added)}
        return files


def check_equal(folder: Path, texts: Sequence[str]) -> None:
    """Tokens and ids are AutoTokenizer's, wherever it has any."""
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), folder_tokenizer(folder)
    assert ours.get_vocab(with_added_tokens=True) == theirs.get_vocab()
    for text, special in product(texts, (True, False)):
        try:
            wanted = theirs(text, add_special_tokens=special)["input_ids"]
        except Exception:  # noqa: BLE001 - its unknown token is none, and the library raises nothing narrower
            continue
        assert ours.encode(text, add_special_tokens=special).ids == wanted, text


@pytest.mark.parametrize("seed", range(60))
def test_ids_of_changed_folders_are_those_of_transformers(tmp_path: Path, seed: int) -> None:
    """Truncation, padding, tokens of every file, classes, and keys that are for nothing here."""
    chance = Folder(tmp_path, seed).chance
    mixed = "".join(chance.choice([*MADE_UP, " ", "The", "fox", "9", "\n"]) for _ in range(12))
    check_equal(tmp_path, (*TEXTS, mixed))


def test_the_tables_are_those_of_transformers() -> None:
    """Of every model of text that it knows; other classes than these stand for nothing here."""
    chosen = {each: TOKENIZER_MAPPING_NAMES.get(each) for each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    named = {each: AS_IT_IS if name == "MistralCommonBackend" else name for each, name in chosen.items()}
    assert {each: name for each, name in named.items() if name in {AS_IT_IS, *REBUILDS}} == REGISTERED
    assert {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} & MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS == MISNAMED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "is_mended"),
    [
        ({"model_type": "mistral", "transformers_version": "4.57.1"}, True),
        ({"model_type": "mistral"}, True),
        ({"model_type": "mistral", "transformers_version": "5.1.0"}, False),
        ({"model_type": "llama", "transformers_version": "4.57.1"}, False),
    ],
)
def test_words_of_mistral_are_mended_where_its_files_ask_for_it(
    tmp_path: Path, keys: dict[str, str], is_mended: bool
) -> None:
    """As transformers does, for old files with large vocabularies alone."""
    raw = json.loads(KINDS[0].to_str())
    raw["model"]["vocab"] |= {
        f"{SPACE}{number}{SPACE}": number for number in range(len(raw["model"]["vocab"]), 100_002)
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    (tmp_path / "tokenizer_config.json").write_text('{"fix_mistral_regex": true, "tokenizer_class": "LlamaTokenizer"}')
    (tmp_path / "config.json").write_text(json.dumps(keys))
    cuts = json.loads(folder_tokenizer(tmp_path).to_str())["pre_tokenizer"].get("pretokenizers", [{}])
    assert (cuts[0].get("pattern") == {"Regex": MENDED}) is is_mended
    check_equal(tmp_path, TEXTS)


def test_a_saved_truncation_ends_no_prompt(tmp_path: Path) -> None:
    """Nor does a saved padding make one longer: in the gateway, whose prompts are of any length."""
    raw = json.loads((TARGET / "tokenizer.json").read_text())
    raw["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    kind = {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>", "pad_to_multiple_of": None}
    raw["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", **kind}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    plain = asyncio.run(GatewayTokenizer(str(TARGET)).encode("Once upon a time there was a fox."))
    assert asyncio.run(GatewayTokenizer(str(tmp_path)).encode("Once upon a time there was a fox.")) == plain


def test_gateway_and_services_see_the_same_tokens(tmp_path: Path) -> None:
    """Those that only tokenizer_config.json has are there for both, and a pair with them differs from one without."""
    shutil.copy(TARGET / "tokenizer.json", tmp_path)
    token = {"content": "<|im_start|>", "special": True}
    given = {"added_tokens_decoder": {"4096": token}, "pad_token": "<|pad|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
    vocabulary = Vocabulary.read(tmp_path)
    assert GatewayTokenizer(str(tmp_path)).vocabulary() == vocabulary
    assert vocabulary.size == 4098
    assert asyncio.run(GatewayTokenizer(str(tmp_path)).encode("<|im_start|><|pad|>")) == (4096, 4097)
    assert vocabulary.difference(Vocabulary.read(TARGET)) == "The vocabularies have 4098 and 4096 ids."


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "tekken.json"])
def test_a_folder_with_another_kind_of_tokenizer_says_how_to_convert_it(tmp_path: Path, name: str) -> None:
    """In the gateway and in the services."""
    (tmp_path / name).write_text("{}")
    for read in (Vocabulary.read, GatewayTokenizer):
        with pytest.raises(ModelRefused, match=rf"has no tokenizer\.json .* only {name}: .*save_pretrained"):
            read(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "text"), [("tokenizer_config.json", "{"), ("config.json", "[]"), ("added_tokens.json", "7")]
)
def test_a_broken_file_beside_the_tokenizer_is_named(tmp_path: Path, name: str, text: str) -> None:
    """In one sentence."""
    shutil.copy(TARGET / "tokenizer.json", tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelRefused, match=name.replace(".", r"\.")):
        folder_tokenizer(tmp_path)
