"""The gateway's side of a GGUF file: tokens and chat template, from a file, a folder or a hub id, without torch."""

import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from support.models.tiny_gguf import write_gguf
from support.models.tiny_models import TARGET

from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from outrider.errors import ModelRefused
from outrider.model_files.vocabulary import Vocabulary

TEXT, USER = "Once upon a time<|endoftext|>", [{"role": "user", "content": "Who?"}]
# Everything that a gateway reads of a model, and what that has loaded.
SCRIPT = """
import sys
import gateway.server
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
print(Tokenizer(sys.argv[1]).vocabulary().size, ChatTemplate.read(sys.argv[1]).is_default)
print(sorted({"torch", "transformers", "safetensors", "gguf"} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target, alone in a folder."""
    return write_gguf(TARGET, tmp_path_factory.mktemp("gguf") / "target.gguf")


async def test_a_file_and_its_folder_are_a_tokenizer_and_a_template(file: Path) -> None:
    """The same tokens as tokenizer.json, and the template that the file holds."""
    expected = await Tokenizer(str(TARGET)).encode(TEXT)
    for name in (str(file), str(file.parent)):
        tokenizer = Tokenizer(name)
        assert await tokenizer.encode(TEXT) == expected
        assert tokenizer.decode(list(expected)) == "Once upon a time"
        assert tokenizer.vocabulary() == Vocabulary.read(TARGET)
        assert ChatTemplate.read(name).render(USER).text == "<user>Who?<|endoftext|>"


@pytest.mark.slow
def test_a_gateway_reads_a_file_without_torch(file: Path) -> None:
    """A process of its own has loaded nothing heavy afterwards, and not the package that reads the tensors."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout == "4096 False\n[]\n"


def test_a_hub_id_with_a_file_is_read_from_the_cache(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the id alone, and with the file's name after it where there are two."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository, commit = tmp_path / "models--some-org--tiny", "d" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "a.gguf").write_bytes(file.read_bytes())
    for name in ("some-org/tiny", "some-org/tiny@main", "some-org/tiny:a.gguf"):
        assert Tokenizer(name).vocabulary() == Tokenizer(str(file)).vocabulary()
        assert not ChatTemplate.read(name).is_default
    (snapshot / "b.gguf").touch()
    for read in (Tokenizer, ChatTemplate.read):
        with pytest.raises(ModelRefused, match=r"has several GGUF files \(a\.gguf, b\.gguf\)"):
            read("some-org/tiny")
        with pytest.raises(ModelRefused):
            read("some-org/tiny:c.gguf")


def test_broken_files_are_refused(tmp_path: Path) -> None:
    """With the sentence of the services."""
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    for read in (Tokenizer, ChatTemplate.read):
        with pytest.raises(ModelRefused, match=r"broken\.gguf is truncated"):
            read(str(tmp_path / "broken.gguf"))
