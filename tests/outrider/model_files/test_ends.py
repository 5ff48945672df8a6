"""What ends an answer by the files of a model: every source, names of tokens, and what is no end."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.models.tiny_gguf import write_gguf
from support.models.tiny_models import write_tiny_model
from tokenizers import AddedToken, Tokenizer, models

from outrider.errors import ModelRefused
from outrider.model_files.ends import ITS_NAME, find_ends, told
from outrider.model_files.vocabulary import tokenizer_in


def tokenizer_of(names: Sequence[str], *, special: bool = True) -> Tokenizer:
    """A tokenizer of nothing but added tokens, whose ids are their places."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_tokens([AddedToken(name, special=special, normalized=False) for name in names])
    return tokenizer


def named(folder: Path, *names: str, special: bool = True) -> set[str]:
    """The ends of a folder without files."""
    found = find_ends(folder, tokenizer_of(names, special=special))
    assert all(places == (ITS_NAME,) for places in found.values())
    return {names[token_id] for token_id in found}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "<|end|>"),
        *("<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>", "[|endofturn|]", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>"),
        *("<|eot|>", "<|eom|>", "<|EOT|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<end_of_utterance>", "<turn|>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
    ],
)
def test_a_token_ends_an_answer_by_its_name(tmp_path: Path, name: str, special: bool) -> None:
    """Whether or not the tokenizer calls it special, as converters forget to."""
    assert named(tmp_path, "<s>", name, "text", special=special) == {name}


def test_an_end_may_be_an_ordinary_token_of_the_vocabulary(tmp_path: Path) -> None:
    """As in files whose converter lost the kinds of tokens."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "<|im_end|>": 1}, merges=[]))
    assert find_ends(tmp_path, tokenizer) == {1: (ITS_NAME,)}


def test_other_control_tokens_end_nothing(tmp_path: Path) -> None:
    """What begins, fills, calls, stands around gaps or heads a turn."""
    others = (
        *("<s>", "<pad>", "[PAD]", "<unk>", "<bos>", "<|begin_of_text|>", "<|im_start|>", "<start_of_turn>"),
        *("<|start_header_id|>", "<|end_header_id|>", "<|end_of_role|>", "<|im_sep|>", "<tool_call>"),
        *("<|python_tag|>", "<|fim_pad|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<think>", "</think>"),
        *("<|endofprompt|>", "<|vision_end|>", "<|user|>", "<|assistant|>", "[INST]", "<|start|>", "<|channel|>"),
    )
    assert named(tmp_path, *others) == set()


def test_what_ends_a_part_of_an_answer_does_not_end_it(tmp_path: Path) -> None:
    """gpt-oss and Solar end messages with what ends answers elsewhere."""
    assert named(tmp_path, "<|end|>", "<|return|>", "<|call|>") == {"<|return|>", "<|call|>"}
    assert named(tmp_path, "<|end|>", "<|calls|>", "<|flush|>") == {"<|calls|>", "<|flush|>"}


def test_a_tag_of_html_ends_nothing(tmp_path: Path) -> None:
    """Gemma has one that is written as Llama 2's end."""
    assert named(tmp_path, "<s>", "</s>", special=True) == {"</s>"}
    assert named(tmp_path, "<s>", "</s>", special=False) == set()


@pytest.mark.parametrize("token", ["e", {"content": "e", "special": True}])
def test_all_files_of_a_folder_are_believed(tmp_path: Path, token: object) -> None:
    """None overrules another, and each end knows where it comes from."""
    files = {
        "generation_config.json": {"eos_token_id": [0, 1]},
        "config.json": {"eos_token_id": 2},
        "tokenizer_config.json": {"eos_token": token},
        "special_tokens_map.json": {"eos_token": "d"},
    }
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    tokenizer = tokenizer_of(["a", "b", "<|im_end|>", "d", "e"])
    assert find_ends(tmp_path, tokenizer) == {
        0: ("generation_config.json",),
        1: ("generation_config.json",),
        2: ("config.json", ITS_NAME),
        3: ("special_tokens_map.json",),
        4: ("tokenizer_config.json",),
    }
    assert [told(token_id, tokenizer) for token_id in (2, 9)] == ["<|im_end|> (2)", "9"]
    assert find_ends(tmp_path, None).keys() == {0, 1, 2}


def test_files_that_name_nothing_have_no_end(tmp_path: Path) -> None:
    """Neither files that are missing, nor a null, nor a name that is no token."""
    tokenizer = tokenizer_of(["a"])
    assert find_ends(tmp_path, tokenizer) == {}
    for name in ("generation_config.json", "config.json"):
        (tmp_path / name).write_text('{"eos_token_id": null}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert find_ends(tmp_path, tokenizer) == {}


@pytest.mark.parametrize("text", ["[]", "{"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    """As everywhere where files of a model are read."""
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ModelRefused, match=r"tokenizer_config\.json"):
        find_ends(tmp_path, tokenizer_of(["a"]))


def test_keys_and_names_of_a_gguf_file_are_believed(tmp_path: Path) -> None:
    """-1 names none, and a control token speaks by its name."""
    model = write_tiny_model(tmp_path / "tiny", "llama", tie_word_embeddings=False)

    def edit(metadata: dict[str, object], _: object) -> None:
        tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        assert isinstance(tokens, list)
        assert isinstance(kinds, list)
        tokens[290], kinds[290] = "<|im_end|>", 3
        tokens[291], kinds[291] = "<|eot_id|>", 1
        metadata["tokenizer.ggml.eot_token_id"] = 7
        metadata["tokenizer.ggml.eom_token_id"] = -1

    file = write_gguf(model, tmp_path / "tiny.gguf", edit=edit)
    assert find_ends(file, tokenizer_in(file)) == {
        0: ("tokenizer.ggml.eos_token_id", ITS_NAME),
        7: ("tokenizer.ggml.eot_token_id",),
        290: (ITS_NAME,),
        291: (ITS_NAME,),
    }
