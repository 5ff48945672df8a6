"""Interface of a model to the runner: our own transformer, transformers' code, a head, or a simulation."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.batching import RowPlan
from outrider.engine.cache import BLOCK_SIZE, KVCache
from outrider.engine.devices import free_bytes
from outrider.engine.models.config import DecoderFacts
from outrider.engine.ops import Ops, Weight
from outrider.errors import Field, InvalidRequest
from outrider.model_files.memory import CacheSize, available_bytes, fit_cache, gibibytes

# Of what an accelerator has free beside the weights; the rest is for one forward and the draws after it.
MEMORY_SHARE = 0.9


class Decoder(ABC):
    """A model on one device, that computes the rows of a plan."""

    config: DecoderFacts
    ops: Ops
    embedding: Weight
    """The embedding matrix; device and type of the weights are its own."""
    kv_dtype: torch.dtype | None = None
    """Type of keys and values, where that is asked for."""

    @property
    @abstractmethod
    def weights(self) -> Sequence[Weight]:
        """Weights of the model, a tied matrix once: as it makes logits."""

    @property
    def tiles(self) -> tuple[int, ...]:
        """Numbers of rows that may share an item of work (outrider.engine.batching); none for a model without any."""
        return ()

    @property
    def step_shapes(self) -> list[tuple[int, int]]:
        """Rows of all sessions and of the longest in the steps that cost more when they are made the first time."""
        return []

    @property
    def is_row_invariant(self) -> bool:
        """Whether a row's bits depend on nothing but the row; see outrider.engine.ops."""
        return self.embedding.device.type == "cpu"

    @property
    def device_name(self) -> str:
        """The device as reports name it: torch's name, or what it stands for where it is simulated."""
        return str(self.embedding.device)

    @property
    def cache_dtype(self) -> torch.dtype:
        """Type of keys and values: as exact as activations on the CPU, as small as weights on an accelerator."""
        if self.kv_dtype is not None:
            return self.kv_dtype
        return torch.float32 if self.embedding.device.type == "cpu" else self.embedding.dtype

    def fit_cache(
        self, kv_tokens: int | None = None, context_len: int | None = None, memory_share: float = MEMORY_SHARE
    ) -> CacheSize:
        """The size of the cache in tokens, and the most of a session: what is asked for, or what fits.

        On an accelerator keys and values fit into that share of its free memory, of one full context at least; on the
        CPU see outrider.model_files.memory.fit_cache. Raises InvalidRequest where there is no room.
        """
        config, device = self.config, self.embedding.device
        token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.cache_dtype.itemsize
        if device.type != "cuda":
            return fit_cache(token_bytes, config.context_len, available_bytes(), kv_tokens, context_len)
        context_len = context_len or config.context_len
        if kv_tokens is not None:
            return CacheSize(kv_tokens, context_len, f"{kv_tokens:,} tokens, as asked for")
        free = free_bytes(device)
        num_tokens = int(memory_share * free) // token_bytes // BLOCK_SIZE * BLOCK_SIZE
        if num_tokens < context_len:
            parts = (
                Field("kv_memory_share"),
                f" is {memory_share:g}, and of the {free / (1 << 30):.2f} GiB that {device} has free beside the weights"
                f" that is room for {num_tokens} tokens, but one context has {context_len}: give a larger share, a"
                " smaller ",
                *(Field("context_len"), ", or the tokens themselves as ", Field("kv_tokens")),
            )
            limit = f"at least {context_len * token_bytes / max(free, 1):.3g} here"
            raise InvalidRequest("kv_memory_share", memory_share, limit, parts)
        reason = f"{num_tokens:,} tokens in {memory_share:g} of the {gibibytes(free)} that {device} has free"
        return CacheSize(num_tokens, context_len, reason)

    @abstractmethod
    def forward(self, plan: RowPlan, cache: KVCache, wanted: Tensor) -> Tensor:
        """Computes the rows of the plan, stores their keys and values, returns logits [len(wanted), V] float32.

        Stores what the cache taps of every row, too.

        wanted [W] int64 names the rows whose logits are asked for, which may hold until the next forward only.
        """

    def finish(self, started_s: float) -> float:
        """Seconds of the last forward, which began then, and of the draws after it, which have been read.

        Waits where the device is simulated and would not be done yet.
        """
        return time.perf_counter() - started_s


class ChainDraws(NamedTuple):
    """What is drawn after each of several steps, one below the other, of W rows; see Ops.choose."""

    temperatures: Tensor
    """[W] float64 where rows are computed."""
    keys: Tensor
    """Keys [depth, W] int64 of the noise there."""
    num_tokens: int
    """Ids that there are, from 0 on."""


class ChainingDecoder(Decoder):
    """A decoder that makes several steps in one call."""

    @abstractmethod
    def chain(self, plan: RowPlan, cache: KVCache, wanted: Tensor, draws: ChainDraws) -> list[list[int]]:
        """Computes rows like `forward`, and below each wanted one a row of the token that is drawn after the row above.

        The W tokens that are drawn in each step: of as many steps as there are keys for, or fewer where a row has
        nothing to draw, or none where they are to be made one by one. The lists of wanted rows go on with the slots of
        the rows below; see Feed.num_below.
        """


class ProbedDecoder(Decoder):
    """A decoder whose embedding can have rows for ids that no text has."""

    @abstractmethod
    def embed_more(self, rows: Tensor) -> None:
        """Appends rows [L, H] to the embedding: ids from V on are these."""


class TappedDecoder(Decoder):
    """A decoder whose forwards store what the cache taps; see KVCache.taps."""

    head: Weight
    """The matrix that makes logits of what leaves the final norm, [V, H]."""


class LayeredDecoder(TappedDecoder):
    """A decoder that can be computed some layers at a time."""

    @abstractmethod
    def forward_layers(self, plan: RowPlan, cache: KVCache, wanted: Tensor, layers: range) -> Tensor:
        """Computes like `forward`, but these layers, which follow each other; what leaves the last makes the logits.

        After layer 0 rows begin with what the cache has tapped there in their slots; raises ValueError if it taps
        nothing there. What enters the layer after the last one is stored where that is a tap.
        """
