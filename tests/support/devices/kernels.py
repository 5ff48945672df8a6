"""The kernels for CUDA in Triton's interpreter, which knows no card.

Two things it does otherwise than any card, and both are mended here. Its products are numpy's, whose order of additions
hangs on a matrix's shape: here a product adds one input after the other. And of bfloat16 it multiplies bit patterns and
cuts numbers off to it: here they are numbers, and rounded to the nearest. So the branches that a card takes run.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from support.devices.interpreted import REASON
from torch import Tensor
from triton import language
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle

from outrider.engine.ops.triton_ops import TritonOps

assert REASON is None
CPU = torch.device("cpu")
cast_impl = InterpreterBuilder.cast_impl
patch_lang = interpreter._patch_lang


class KernelOps(TritonOps):
    """The operations as a card does them: products of 16 bits are made of these."""

    def __init__(self, num_processors: int = 4, *, has_graphs: bool = False) -> None:
        super().__init__(CPU, has_graphs)
        self.num_processors = num_processors

    def is_wide(self, dtype: torch.dtype) -> bool:
        return dtype is torch.float32

    def room_for_chunks(self, num_row_chunks: int, num_heads: int, head_dim: int) -> Sequence[Tensor]:
        """NaN, so that what nobody writes is seen."""
        room = super().room_for_chunks(num_row_chunks, num_heads, head_dim)
        for each in room:
            each.fill_(torch.nan)
        return room


def widened(data: NDArray[Any], dtype: language.dtype) -> NDArray[np.float32]:
    """Numbers of any type as float32."""
    if dtype.scalar == language.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)


def dot(_: InterpreterBuilder, a: Any, b: Any, total: Any, *precision: Any) -> TensorHandle:
    """total + a b, one input after the other."""
    left, right, result = widened(a.data, a.dtype), widened(b.data, b.dtype), total.data.copy()
    for place in range(left.shape[1]):
        result += left[:, place, None] * right[place]
    return TensorHandle(result, total.dtype.scalar)


def cast(builder: InterpreterBuilder, source: Any, goal: language.dtype) -> TensorHandle:
    """The interpreter's own, but between float32 and bfloat16."""
    known = source.dtype.scalar, goal.scalar
    if known == (language.bfloat16, language.float32):
        return TensorHandle(widened(source.data, source.dtype), goal.scalar)
    if known == (language.float32, language.bfloat16):
        # Contiguous, so that its bits can be seen.
        bits = np.ascontiguousarray(source.data).view(np.uint32).reshape(source.data.shape)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return TensorHandle(np.where(np.isnan(source.data), 0x7FC0, rounded).astype(np.uint16), goal.scalar)
    result: TensorHandle = cast_impl(builder, source, goal)
    return result


def reduce(operation: ReduceOps, values: Sequence[Any]) -> list[Any]:
    """One number of each row, by halves as on a card: the interpreter's own would call the function for each number."""
    kinds = [each.dtype for each in values]
    rows = [each.handle.data for each in values]
    while half := len(rows[0]) // 2:
        parts = [
            operation.to_tensor(row[part], kind)
            for part in (slice(half), slice(half, None))
            for row, kind in zip(rows, kinds, strict=True)
        ]
        rows = [each.handle.data for each in operation.combine_fn.fn(*parts)]
    return [operation.to_tensor(row.item(), kind) for row, kind in zip(rows, kinds, strict=True)]


class LastingPatch:
    """What the interpreter has put into Triton's language, which stays there."""

    def restore(self) -> None:
        """Takes nothing out again: it would be put in once more at the next launch."""


@cache
def patch(function: Callable[..., object]) -> LastingPatch:
    """The interpreter's own, once for a function: before each call of one it would take most of a test's time."""
    patch_lang(function)
    return LastingPatch()


# For the whole process: nothing else in it uses the interpreter.
InterpreterBuilder.create_dot = dot
InterpreterBuilder.cast_impl = cast
ReduceOps.generic_reduce = reduce
interpreter._patch_lang = patch


def altered(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """A module of kernels with another piece of source, wherever the old one stands in it."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert old in source, f"{module.__name__} has no {old!r}"
    path = folder / f"{module.__name__.rpartition('.')[2]}.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    changed = module_from_spec(spec)
    spec.loader.exec_module(changed)
    return changed


def amid_nan(tensor: Tensor) -> Tensor:
    """The tensor in memory that holds NaN before and behind it, so that whoever reads too much finds out."""
    buffer = torch.full((tensor.numel() + 2 * 4096,), torch.nan, dtype=tensor.dtype)
    place = buffer[4096 : 4096 + tensor.numel()].view(tensor.shape)
    place.copy_(tensor)
    return place


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Bitwise, and nothing is NaN."""
    assert not bool(expected.isnan().any())
    assert torch.equal(found, expected)
