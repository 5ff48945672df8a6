"""Interface of a model to the runner, be it our own transformer or transformers' code."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from outrider.engine.batching import RowPlan
from outrider.engine.cache import KVCache
from outrider.engine.models.config import DecoderFacts
from outrider.engine.ops import Ops, Weight


class Decoder(Protocol):
    """A model on one device, that computes the rows of a plan."""

    @property
    def config(self) -> DecoderFacts: ...

    @property
    def ops(self) -> Ops: ...

    @property
    def embedding(self) -> Tensor:
        """The embedding matrix; device and type of the weights are its own."""

    @property
    def weights(self) -> Sequence[Weight]:
        """Weights of the model, a tied matrix once: as it makes logits."""

    def forward(self, plan: RowPlan, cache: KVCache, wanted: Tensor) -> Tensor:
        """Computes the rows of the plan, stores their keys and values, returns logits [len(wanted), V] float32.

        Stores what the cache taps of every row, too.

        wanted [W] int64 names the rows whose logits are asked for, which may hold until the next forward only.
        """


@runtime_checkable
class ProbedDecoder(Decoder, Protocol):
    """A decoder whose embedding can have rows for ids that no text has."""

    def embed_more(self, rows: Tensor) -> None:
        """Appends rows [L, H] to the embedding: ids from V on are these."""


@runtime_checkable
class TappedDecoder(Decoder, Protocol):
    """A decoder whose forwards store what the cache taps; see KVCache.taps."""

    @property
    def head(self) -> Weight:
        """The matrix that makes logits of what leaves the final norm, [V, H]."""


@runtime_checkable
class LayeredDecoder(TappedDecoder, Protocol):
    """A decoder that can be computed some layers at a time."""

    def forward_layers(self, plan: RowPlan, cache: KVCache, wanted: Tensor, layers: range) -> Tensor:
        """Computes like `forward`, but these layers, which follow each other; what leaves the last makes the logits.

        After layer 0 rows begin with what the cache has tapped there in their slots; raises ValueError if it taps
        nothing there. What enters the layer after the last one is stored where that is a tap.
        """
