"""Models that cannot be served, as operators meet them: one sentence on stderr and exit code 78, before any memory."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import transformers
from support.basics import PATIENCE_S
from support.models.tiny_models import TARGET, write_tiny_model


async def refused(model: str, **environment: str) -> str:
    """The last line of a target service that must not start."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "target_service", "--model", model, "--listen", "127.0.0.1:0")
    variables = {**os.environ, **environment}
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=variables)
    out, err = await asyncio.wait_for(process.communicate(), 3 * PATIENCE_S)
    assert (process.returncode, out) == (78, b""), err.decode()
    [line] = err.decode().splitlines()
    return line


def pickled(folder: Path) -> None:
    """Weights that could run code."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def with_code(folder: Path) -> None:
    """A model whose classes lie in its repository."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "code.Model"}}))
    (folder / "code.py").write_text("raise SystemExit('this code must never run')")


def truncated(folder: Path) -> None:
    """A download that broke off."""
    os.truncate(folder / "model.safetensors", 1_000_000)


def without_a_shard(folder: Path) -> None:
    """An index that names a file that is not there."""
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (pickled, "pickled weights are not loaded because they can run code"),
        (with_code, "asks for code from the model's repository, which is never run"),
        (truncated, "is not a sound safetensors file"),
        (without_a_shard, "has no model-00002-of-00002.safetensors"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_spoilt_model_is_one_sentence(tmp_path: Path, spoil: Callable[[Path], None], words: str) -> None:
    """Each with what is wrong and where."""
    folder = Path(shutil.copytree(TARGET, tmp_path / "spoilt"))
    spoil(folder)
    line = await refused(str(folder))
    assert words in line
    assert "spoilt" in line


@pytest.mark.slow
async def test_a_state_space_model_is_refused_by_name(tmp_path: Path) -> None:
    """Its state cannot be rolled back."""
    config = transformers.MambaConfig(architectures=["MambaForCausalLM"])
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert "MambaForCausalLM, whose running state cannot be rolled back" in await refused(str(tmp_path))


@pytest.mark.slow
async def test_a_model_that_transformers_computes_is_refused_in_one_sentence_too(tmp_path: Path) -> None:
    """Nothing of what the library says about it reaches stderr."""
    folder = write_tiny_model(tmp_path / "tiny", "gpt2")
    os.truncate(folder / "model.safetensors", 1000)
    assert "is not a sound safetensors file" in await refused(str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("is_offline", [True, False])
async def test_a_hub_that_cannot_be_reached_is_one_sentence(tmp_path: Path, is_offline: bool) -> None:
    """With the command that fetches the model elsewhere."""
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        endpoint = f"http://127.0.0.1:{server.server_port}"
    variables = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": str(int(is_offline)), "HF_ENDPOINT": endpoint}
    line = await refused("some-org/some-model", **variables)
    assert ("HF_HUB_OFFLINE forbids" in line) == is_offline
    assert "run `hf download some-org/some-model` on a machine with network" in line
