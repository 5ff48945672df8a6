"""The attention that transformers' models call instead of their own: it reads and writes our paged cache.

The running plan comes with every call, as a keyword that the models hand down to their attention; nothing is kept
between calls. No mask is built: each row has its list of slots. Which rows are new, a model cannot know and need not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from outrider.engine.fallback.padding import pad_rows
from outrider.engine.kv_cache import KVCache
from outrider.engine.ops import Ops
from outrider.engine.plan import RowPlan

# The implementation's name in transformers, and the keyword that carries the attender.
NAME = "outrider"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asks for; queries are [1, H, R, D], keys and values [1, G, R, D], rotated already."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    window: int | None
    others: Mapping[str, object]
    """Keywords that nothing here looks at."""


class Attender(Protocol):
    """Whoever answers the layers of one forward."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Returns [1, R, H, D]."""


@dataclass(frozen=True, slots=True)
class Pages:
    """The cache in one forward of R rows, to which a model may have added some for nobody."""

    plan: RowPlan
    cache: KVCache
    ops: Ops

    def attend(self, call: AttentionCall) -> Tensor:
        """Stores the rows' keys and values, and lets each row look at its own list, or the end of it in the window."""
        num_rows, num_padded = self.plan.num_rows, call.query.shape[2]
        keys, values = self.cache.keys[layer_of(call)], self.cache.values[layer_of(call)]
        for stored, heads in ((keys, call.key), (values, call.value)):
            stored.index_copy_(0, self.plan.slots, _rows(heads, num_rows).to(stored.dtype))
        query = _rows(call.query, num_rows).float().contiguous()
        output = self.ops.attention(query, self.plan.windowed(call.window), keys, values, call.scale)
        return pad_rows(output, num_padded).view(1, num_padded, *query.shape[1:])


def layer_of(call: AttentionCall) -> int:
    """Number of the layer that calls."""
    layer = call.module.layer_idx
    if not isinstance(layer, int):
        raise TypeError(f"its attention layers have the number {layer!r}")
    return layer


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    outrider: Attender | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """As transformers calls it; a scaling of None means one over the root of the heads' size."""
    if outrider is None:
        raise TypeError("it does not hand keywords down to its attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(module, query, key, value, attention_mask, scale, sliding_window, others)
    return outrider.attend(call), None


def _rows(heads: Tensor, num_rows: int) -> Tensor:
    return heads[0, :, :num_rows].transpose(0, 1)


# The registry is transformers' own and for the whole process; there is no other way to give it a function.
AttentionInterface.register(NAME, _attend)
