"""Drafts for exactness tests, written as real model folders: what they guess differs as widely as drafts can."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_model

MODELS = Path(__file__).resolve().parent.parent / "models"
TARGET = MODELS / "target"
TRAINED = MODELS / "draft"


def write_adversary(folder: Path) -> Path:
    """Writes the target with its output matrix negated: its most probable token is the target's least probable one."""
    shutil.copytree(TARGET, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": -tensors["model.embed_tokens.weight"]}, folder / "model.safetensors")
    return folder


def write_drafts(folder: Path) -> dict[str, Path]:
    """Returns the folders of four drafts: trained, random weights, the target itself, always wrong."""
    return {
        "trained": TRAINED,
        "random": write_tiny_model(folder / "random", "llama", vocab_size=4096, seed=7),
        "itself": TARGET,
        "adversary": write_adversary(folder / "adversary"),
    }
