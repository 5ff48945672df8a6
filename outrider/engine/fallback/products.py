"""While a model runs: its matrix products go to our operations, and its embeddings come out as float32.

Weights are bfloat16 or float32 and stay so; everything else is float32, as in our own transformer. Looks at each
function of torch that the model calls, so it finds products that are no modules, of routers and experts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from outrider.engine.fallback.padding import pad_rows
from outrider.engine.ops import Ops


class Products(TorchFunctionMode):
    """One forward of num_rows rows, computed as num_padded, of which num_wanted go through the head."""

    def __init__(self, ops: Ops, head: Tensor, num_rows: int, num_padded: int, num_wanted: int) -> None:
        super().__init__()
        self._ops, self._head = ops, head
        self._num_rows, self._num_padded, self._num_wanted = num_rows, num_padded, num_wanted
        self._ours: Mapping[object, Callable[..., object]] = {
            functional.linear: self._linear,
            functional.embedding: _embedding,
        }

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Ours instead of torch's where we have one."""
        function = self._ours.get(func, func)
        return function(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - torch's name
        rows = input.reshape(-1, input.shape[-1]).float()
        bias = None if bias is None else bias.float()
        if weight is self._head:
            output = self._of_head(rows[: self._num_wanted], weight, bias, rows.shape[0])
        elif rows.shape[0] == self._num_padded:
            output = pad_rows(self._product(rows[: self._num_rows], weight, bias), self._num_padded)
        else:
            output = self._product(rows, weight, bias)
        return output.view(*input.shape[:-1], weight.shape[0])

    def _of_head(self, rows: Tensor, weight: Tensor, bias: Tensor | None, num_padded: int) -> Tensor:
        if rows.shape[0] == num_padded:
            return self._product(rows, weight, bias)
        # Zeros would be written for nobody, and a row of a large vocabulary is a megabyte.
        output = rows.new_empty(num_padded, weight.shape[0])
        output[: rows.shape[0]] = self._product(rows, weight, bias)
        return output

    def _product(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not rows.shape[0]:
            return rows.new_empty(0, weight.shape[0])
        return self._ops.linear(rows.contiguous(), weight.detach(), bias)


def _embedding(*args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 - torch's own, whatever they are
    return functional.embedding(*args, **kwargs).float()


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes with the calling thread alone, so that it cuts no tensor into parts of its own choice."""
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
