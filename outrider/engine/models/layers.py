"""A model some layers at a time: the lower ones as a model that guesses, and a forward that goes on from them.

Elhoushi et al., 2024, "LayerSkip", arXiv 2404.16710. The lower layers of a row are computed once: where it was guessed.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from outrider.engine.batching import RowPlan
from outrider.engine.cache import KVCache
from outrider.engine.models.config import DecoderFacts
from outrider.engine.models.decoder import LayeredDecoder
from outrider.engine.ops import Ops, Weight


class LowerLayers:
    """The first layers of a model over its cache, then its own final norm and matrix, or no logits."""

    def __init__(self, model: LayeredDecoder, num_layers: int, *, has_logits: bool) -> None:
        self.config: DecoderFacts = model.config
        self.ops: Ops = model.ops
        self.embedding = model.embedding
        self.weights: Sequence[Weight] = ()
        self._model = model
        self._layers = range(num_layers)
        self._has_logits = has_logits

    def forward(self, plan: RowPlan, cache: KVCache, wanted: Tensor) -> Tensor:
        return self._model.forward_layers(plan, cache, wanted if self._has_logits else wanted[:0], self._layers)


def resume(model: LayeredDecoder, plan: RowPlan, cache: KVCache, wanted: Tensor, starts: Sequence[int]) -> Tensor:
    """A whole forward of rows of which row r has been computed up to boundary starts[r]; logits as of forward.

    The cache taps each of these boundaries but 0, and holds what is tapped there in the slots of those rows.
    """
    edges = sorted(set(starts))
    for first, last in pairwise(edges):
        rows = torch.tensor([row for row, start in enumerate(starts) if start <= first])
        model.forward_layers(plan.select(rows), cache, wanted[:0], range(first, last))
    return model.forward_layers(plan, cache, wanted, range(edges[-1], model.config.num_layers))
