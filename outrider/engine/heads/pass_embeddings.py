"""The embeddings of PaSS, in a format of our own: what stands for tokens that are not known yet.

Monea, Joulin and Grave, 2023, arXiv 2311.13581, train one row for each place ahead, and nothing else; no checkpoint of
theirs is public. A folder has config.json with {"drafter": "pass"}, and safetensors with `pass_embeddings` [L, H].
"""

from pathlib import Path

import torch
from torch import Tensor

from outrider.engine.heads.checkpoint import head_files
from outrider.engine.heads.head import TargetParts
from outrider.engine.models.json_keys import read_json
from outrider.engine.models.weights import check_tensors, read_tensors, stored_tensors
from outrider.errors import ModelRefused

NAME = "pass_embeddings"
# Far above any that was trained: a round has no more guesses than 32.
MAX_COUNT = 64


def is_pass(folder: Path) -> bool:
    """Whether config.json says that a folder holds such embeddings; raises ModelRefused where it cannot be read."""
    return read_json(folder / "config.json").get("drafter") == "pass"


def read_pass(folder: Path, target: TargetParts) -> Tensor:
    """The embeddings [L, H] float32 for this target. Raises ModelRefused with one sentence."""
    files = head_files(folder)
    stored = {tensor.name: tensor for tensor in stored_tensors(files)}
    found = stored.get(NAME)
    count = found.shape[0] if found is not None and found.shape else 1
    check_tensors(folder, stored, {NAME: (count, target.hidden_size)}, {}, "the target")
    if not 1 <= count <= MAX_COUNT:
        raise ModelRefused(f"{folder} has {count} rows of {NAME}, but must have 1 to {MAX_COUNT}", rows=count)
    tensors, _ = read_tensors(read_json(folder / "config.json"), files, stored, torch.device("cpu"), torch.float32)
    embeddings: Tensor = tensors[NAME]
    return embeddings
