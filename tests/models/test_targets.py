"""Targets of other makes: Qwen 3 and GGUF files are read, write texts and teach drafts as a Llama's folder does."""

import os
import signal
from pathlib import Path

import pytest
import torch
from support.models.tiny_gguf import write_gguf
from support.models.tiny_models import write_tiny_model
from support.runs import TINY_HEAD, start_training, train

from outrider.errors import InvalidRequest
from training.decoding import BatchDecoder
from training.model import target_tokenizer, trained_model

TINY_DRAFT = (
    "--tokens", "100", "--texts", "4", "--text-len", "64", "--draft-vocab", "200",
    "--head-steps", "3", "--head-overlap-steps", "2", "--draft-steps", "3", "--draft-overlap-steps", "2",
    "--draft-size", "32", "--draft-layers", "1", "--threads", "1",
)  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose heads are wider than its hidden size asks for; Qwen 3 has norms of queries and keys."""
    return write_tiny_model(tmp_path_factory.mktemp("targets") / family, family)


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    """The same model as a GGUF file."""
    return write_gguf(folder, folder.parent / f"{folder.name}.gguf")


def test_a_target_writes_what_its_own_forward_says(folder: Path) -> None:
    """Token by token with a cache, as near as bfloat16 is; the norms of queries and keys are no ones."""
    model = trained_model("--target", folder)
    token_ids = torch.arange(1, 25).view(2, 12)
    decoder = BatchDecoder(model, (0, 1))
    decoder.rewind(2, 12)
    written = torch.stack([decoder.logits(decoder.step(column).normed) for column in token_ids.T], 1).float()
    with torch.inference_mode():
        wanted = model(token_ids, use_cache=False).logits
    assert (written - wanted).norm() < 0.03 * wanted.norm()


def test_a_gguf_file_is_the_model_of_its_folder(folder: Path, file: Path) -> None:
    """The same weights, sizes and tokens, by its own path or that of a folder that has only it."""
    wanted, tokenizer = trained_model("--target", folder), target_tokenizer("--target", file)
    alone = folder.parent / f"{folder.name}-alone"
    alone.mkdir()
    (alone / "model.gguf").write_bytes(file.read_bytes())
    for place in (file, alone):
        found = trained_model("--target", place)
        assert type(found) is type(wanted)
        assert found.state_dict().keys() == wanted.state_dict().keys()
        assert all(torch.equal(each, found.state_dict()[name]) for name, each in wanted.state_dict().items())
        token_ids = torch.arange(24).view(2, 12)
        with torch.inference_mode():
            assert torch.allclose(found(token_ids).logits, wanted(token_ids).logits, atol=1e-5)
    assert tokenizer.encode("tale") == target_tokenizer("--target", folder).encode("tale")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "<user>Hi<|endoftext|>"


@pytest.mark.parametrize(
    ("family", "overrides", "limit"),
    [
        ("qwen2", {}, "a model of Llama's or Qwen 3's shape without rope scaling"),
        ("llama", {"attention_bias": True}, "a model without biases"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "without rope scaling",
        ),
    ],
)
def test_what_would_be_read_wrongly_is_refused(
    tmp_path: Path, family: str, overrides: dict[str, object], limit: str
) -> None:
    """By name, instead of drafts for another model."""
    with pytest.raises(InvalidRequest, match=f"^--target is .* but must be .*{limit}"):
        trained_model("--target", write_tiny_model(tmp_path / "target", family, **overrides))


@pytest.mark.grid
def test_both_commands_take_qwen_3_as_a_gguf_file(corpus: Path, tmp_path: Path) -> None:
    """Drafts and a head come of it; a run that is killed within its samples goes on with those that it has."""
    file = write_gguf(write_tiny_model(tmp_path / "qwen3", "qwen3"), tmp_path / "qwen3.gguf")
    code, output = train("--target", file, "--out", tmp_path / "drafts", *TINY_DRAFT, command="make_draft.py")
    assert code == 0, output
    assert {"head", "draft", "report.md"} < {each.name for each in (tmp_path / "drafts").iterdir()}
    options = ("--corpus", corpus, "--target", file, "--out", tmp_path / "head", *TINY_HEAD, "--own-samples", "9000")
    with start_training(*options, command="train_head.py") as process:
        assert process.stdout is not None
        assert any(line.startswith("samples: ") for line in process.stdout)
        os.kill(process.pid, signal.SIGKILL)
    code, output = train(*options, command="train_head.py")
    assert code == 0, output
    code, unbroken = train(*options[:5], tmp_path / "unbroken", *options[6:], command="train_head.py")
    assert code == 0, unbroken
    assert unbroken.count("samples: ") > output.count("samples: ")
    files = [tmp_path / name / "head" / "model.safetensors" for name in ("head", "unbroken")]
    assert files[0].read_bytes() == files[1].read_bytes()
