"""Where chat templates lie: every place that transformers looks into, in its order of precedence."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from gateway.text.chat_template import ChatTemplate, TemplateFiles, find_templates
from outrider.errors import ModelRefused

USER = [{"role": "user", "content": "Who?"}]
NAMED = [{"name": "default", "template": "D{{ bos_token }}"}, {"name": "tool_use", "template": "T{{ tools | length }}"}]


def write(folder: Path, config: dict[str, Any] | None = None, **files: str) -> Path:
    """A folder with a tokenizer; underscores in names of files stand for slashes where there are two of them."""
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | (config or {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.jinja"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"chat_template": "C{{ bos_token }}{{ eos_token }}"}, {}),
        ({"chat_template": NAMED, "bos_token": "<s>"}, {}),
        ({"chat_template": "C"}, {"chat_template": "F{{ tools }}"}),
        ({"chat_template": NAMED}, {"chat_template": "F"}),
        ({}, {"chat_template": "F", "additional_chat_templates__tool_use": "A"}),
        (
            {"bos_token": {"content": "<b>", "__type": "AddedToken"}, "pad_token": None},
            {"chat_template": "{{ bos_token }}{{ pad_token }}"},
        ),
    ],
)
def test_a_folder_is_read_as_transformers_reads_it(
    tmp_path: Path, config: dict[str, Any], files: dict[str, str]
) -> None:
    """With and without tools."""
    folder = str(write(tmp_path, config, **files))
    reference, template = AutoTokenizer.from_pretrained(folder), ChatTemplate.read(folder)
    for tools in (None, [{"name": "t"}]):
        if tools is None or template.renders_tools:
            expected = reference.apply_chat_template(USER, tools, tokenize=False)
            assert template.render(USER, tools, add_generation_prompt=False).text == expected


def test_older_tokenizers_keep_special_tokens_apart(tmp_path: Path) -> None:
    """In a file that counts only where the configuration does not list its tokens itself."""
    write(tmp_path, {"bos_token": "<new>"})
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<old>"}, "other": ["x"]}')
    assert find_templates(str(tmp_path)).special_tokens == {"bos_token": "<old>"}
    write(tmp_path, {"bos_token": "<new>", "added_tokens_decoder": {}})
    assert find_templates(str(tmp_path)).special_tokens == {"bos_token": "<new>"}


def test_the_embedded_model_has_none() -> None:
    """Nor has a sized one, which has the embedded model's; its special tokens are known all the same."""
    found = find_templates("sized:200m")
    assert found == TemplateFiles({}, {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"})
    assert ChatTemplate.read("sized:draft-1b").is_default


def test_a_folder_without_any_of_the_files_is_a_base_model_s(tmp_path: Path) -> None:
    """A tokenizer.json is enough to serve text."""
    assert find_templates(str(tmp_path)) == TemplateFiles()


@pytest.mark.parametrize("config", ["[]", "{", '{"chat_template": 3}', '{"chat_template": [3]}'])
def test_files_that_say_nothing_are_refused(tmp_path: Path, config: str) -> None:
    """In one sentence that names the model."""
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ModelRefused, match=r"^the chat template of .* cannot be read: ") as caught:
        find_templates(str(tmp_path))
    assert "\n" not in caught.value.message


def test_a_hub_id_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no listener where the hub is; a revision that is not there is a refusal."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        closed = huggingface_hub.HfApi(endpoint=f"http://127.0.0.1:{server.server_port}", token=False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", closed.snapshot_download)
    repository, commit = tmp_path / "models--some-org--chatty", "c" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "v2").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    write(repository / "snapshots" / commit, {"bos_token": "<s>"}, chat_template="{{ bos_token }}hub")
    assert ChatTemplate.read("some-org/chatty@v2").render(USER).text == "<s>hub"
    with pytest.raises(ModelRefused, match=r"^the chat template of some-org/chatty@v3 cannot be read"):
        find_templates("some-org/chatty@v3")
