"""What tests of a model's lower layers share: a model for them, and a count of the rows that each layer computes."""

from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.models.tiny_models import write_tiny_model
from support.services.stepped_target import VOCABULARY_SIZE
from torch import Tensor

from outrider.engine.batching import RowPlan
from outrider.engine.cache import KVCache
from outrider.engine.runner import ModelRunner

NUM_LAYERS = 4


def write_layered_model(folder: Path) -> Path:
    """Writes a model whose upper half changes little, so that the lower one guesses well; returns the folder."""
    sizes = {"context_len": 640, "num_hidden_layers": NUM_LAYERS}
    write_tiny_model(folder, "llama", VOCABULARY_SIZE, **sizes)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.startswith(("model.layers.2.", "model.layers.3.")) and "norm" not in name:
            tensors[name] = 0.4 * tensor
    save_file(tensors, folder / "model.safetensors")
    return folder


def count_rows(runner: ModelRunner, patch: pytest.MonkeyPatch) -> Counter[int]:
    """Rows of each layer from now on, of all who compute this model's layers."""
    model, counts = runner.model, Counter[int]()
    forward_layers = model.forward_layers  # type: ignore[attr-defined]

    def counted(plan: RowPlan, cache: KVCache, wanted: Tensor, layers: range) -> Tensor:
        counts.update(dict.fromkeys(layers, plan.num_rows))
        logits: Tensor = forward_layers(plan, cache, wanted, layers)
        return logits

    patch.setattr(model, "forward_layers", counted)
    return counts
