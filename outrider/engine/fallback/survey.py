"""Runs a model without numbers, on torch's meta device, and looks at everything that it asks for.

So a model that our cache, our attention or the independence of rows does not fit is refused before anything of it is
allocated, whatever its name; nothing here is about one family.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from outrider.engine.fallback.attention import AttentionCall, layer_of
from outrider.engine.fallback.configuration import first_line

NUM_ROWS = 3
# Keywords without a bearing on the result of an inference, and those that are none when they are None or false.
HARMLESS = ("dropout", "use_cache", "position_ids", "output_router_logits", "output_attentions")
PRODUCTS = (torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum, torch.tensordot,
            Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.baddbmm, Tensor.__matmul__, Tensor.__rmatmul__,
            functional.scaled_dot_product_attention)  # fmt: skip
ACROSS_ROWS = (torch.conv1d, torch.conv2d, functional.conv1d, functional.conv2d, torch.cumsum, Tensor.cumsum)


class Unfit(Exception):
    """A model does something that cannot be served; says what, without a subject."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model embeds, and what its layers store."""

    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int


def survey(model: PreTrainedModel) -> Shape:
    """The shape of a model on the meta device; raises Unfit."""
    vocab_size = _vocab_size(model)
    if any(getattr(module, "is_transposed", False) for module in model.modules()):
        raise Unfit("keeps its experts transposed, and multiplies them in sums that depend on the number of rows")
    calls = _Calls()
    rows = torch.zeros(1, NUM_ROWS, dtype=torch.int64, device="meta")
    wanted = torch.zeros(2, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), _Watch():
            model(input_ids=rows, position_ids=rows, use_cache=False, logits_to_keep=wanted, outrider=calls)
    except Unfit:
        raise
    except Exception as error:  # any code may run here
        raise Unfit(f"cannot be run with our attention: {first_line(error)}") from error
    return Shape(vocab_size, *calls.stored())


class _Calls:
    """Stands where the cache stands in a real forward."""

    def __init__(self) -> None:
        self._stored: list[tuple[int, int, int]] = []

    def attend(self, call: AttentionCall) -> Tensor:
        """Looks at a layer; returns no numbers."""
        _check_call(call)
        self._stored.append((layer_of(call), call.key.shape[1], call.key.shape[3]))
        return torch.empty_like(call.query.transpose(1, 2))

    def stored(self) -> tuple[int, int, int]:
        """Layers that have called, which must be alike, their key-value heads, and a head's size; raises Unfit."""
        if sorted(layer for layer, *_ in self._stored) != list(range(len(self._stored))) or not self._stored:
            raise Unfit("does not call our attention once in every layer")
        sizes = sorted({(heads, size) for _, heads, size in self._stored})
        if len(sizes) > 1:
            raise Unfit("stores keys of different shapes in its layers: " + " and ".join(map(str, sizes)))
        return len(self._stored), *sizes[0]


def _vocab_size(model: PreTrainedModel) -> int:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embedding is None or head.weight.shape[0] != embedding.weight.shape[0]:
        raise Unfit("does not embed the tokens that it predicts")
    size: int = head.weight.shape[0]
    return size


def _check_call(call: AttentionCall) -> None:
    if call.key.shape != call.value.shape or call.query.shape[3] != call.key.shape[3]:
        sizes = call.query.shape[3], call.key.shape[3], call.value.shape[3]
        raise Unfit(f"has heads of {sizes[0]}, {sizes[1]} and {sizes[2]} for queries, keys and values, not of one size")
    if call.key.shape[2] != NUM_ROWS or call.query.shape[0] != 1:
        raise Unfit("stores other rows than those of its tokens")
    if call.mask is not None:
        raise Unfit("makes an attention mask of its own")
    if not getattr(call.module, "is_causal", True) or call.others.get("is_causal") is False:
        raise Unfit("looks at tokens behind a token, and is no decoder")
    _check_window(call)
    if not isinstance(call.scale, int | float) or not 0 < call.scale < inf:
        raise Unfit(f"multiplies its attention scores by {call.scale!r}, which is no positive number")
    given = {name for name, value in call.others.items() if value is not None and value is not False}
    strange = sorted(given - {*HARMLESS, "is_causal"})
    if strange:
        names = {"softcap": "a cap on attention scores", "s_aux": "attention sinks"}
        raise Unfit(f"needs {names.get(strange[0], strange[0])} in its attention, which ours has not")


def _check_window(call: AttentionCall) -> None:
    types: Sequence[str] | None = getattr(getattr(call.module, "config", None), "layer_types", None)
    if types and (types[layer_of(call)] == "sliding_attention") and call.window is None:
        raise Unfit(f"does not say how wide the window of layer {layer_of(call)} is")
    if call.window is not None and call.window < 1:
        raise Unfit(f"has a window of {call.window} in layer {layer_of(call)}, but it must be at least 1")


class _Watch(TorchFunctionMode):
    """Refuses what would make a row depend on its neighbours or their number."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Torch's own result, unless it is one that no other operation here computes."""
        name = getattr(func, "__name__", str(func))
        if func in PRODUCTS and not _is_outer(args):
            raise Unfit(f"multiplies matrices with torch's {name}, whose sums depend on the number of rows")
        if func in ACROSS_ROWS:
            raise Unfit(f"mixes rows with torch's {name}")
        return func(*args, **(kwargs or {}))


def _is_outer(args: tuple[object, ...]) -> bool:
    """Whether a product has one term in each sum, as in rotary frequencies times positions."""
    first = next((arg for arg in args if isinstance(arg, Tensor)), None)
    return first is not None and first.dim() > 1 and first.shape[-1] == 1
