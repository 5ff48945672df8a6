"""What tests of a model's lower layers share: a count of the rows that each layer computes."""

from collections import Counter

import pytest
from torch import Tensor

from outrider.engine.batching import RowPlan
from outrider.engine.cache import KVCache
from outrider.engine.runner import ModelRunner


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
