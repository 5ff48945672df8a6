"""Runs models/train.py as a user does, in a process of its own, and reads what it wrote."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

TRAIN = Path(__file__).resolve().parents[1] / "models" / "train.py"
ROLES = ("target", "draft")
TINY = (
    "--preset", "tiny", "--threads", "1", "--checkpoint-every", "2",
    "--target-steps", "9", "--long-target-steps", "5", "--draft-steps", "7", "--long-draft-steps", "5",
)  # fmt: skip


def start_training(*options: str | Path) -> subprocess.Popen[str]:
    """The command in a process of its own, with stdout and stderr in one pipe."""
    environment = os.environ | {"COLUMNS": "160"}
    return subprocess.Popen(
        [sys.executable, TRAIN, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def train(*options: str | Path) -> tuple[int, str]:
    """Runs the command to its end; returns exit code and output."""
    with start_training(*options) as process:
        output, _ = process.communicate()
    return process.returncode, output


def weights(out: Path) -> dict[str, torch.Tensor]:
    """All tensors of both models of a pair."""
    files = {role: load_file(out / role / "model.safetensors") for role in ROLES}
    return {f"{role} {name}": tensor for role, each in files.items() for name, tensor in each.items()}
