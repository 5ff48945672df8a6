"""Models as folders that vLLM reads: a GGUF file's weights in float32, and a draft with its target's tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider.engine.models.gguf import GgufCheckpoint
from outrider.engine.ops.reference import ReferenceOps
from outrider.model_files.gguf.config import json_config
from outrider.model_files.gguf.tokenizer import chat_templates, read_tokenizer, special_tokens


def write_folder(file: Path, folder: Path) -> None:
    """Writes a model of Llama's family in float32, with its tokenizer. Raises ModelRefused and OSError."""
    folder.mkdir()
    checkpoint = GgufCheckpoint.of(file.stem, file)
    config, template = json_config(checkpoint.file), chat_templates(checkpoint.file).get("default")
    read_tokenizer(checkpoint.file).save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    _write(folder / "tokenizer_config.json", told | special_tokens(checkpoint.file))
    _write(folder / "config.json", {"model_type": "llama", "dtype": "float32", "hidden_act": "silu", **config})
    # With a dtype they are plain tensors.
    tensors: dict[str, Any] = dict(checkpoint.load(torch.device("cpu"), torch.float32, ReferenceOps())[0])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def write_draft(source: Path, tokenizer_of: Path, folder: Path) -> None:
    """Copies a draft's folder, and the tokenizer of its target, which our service does without."""
    shutil.copytree(source, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_of / name, folder)


def _write(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=1), encoding="utf-8")
