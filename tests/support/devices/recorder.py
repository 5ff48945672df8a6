"""Calls of torch kept with their tensors, and made again on the same memory: what a CUDA graph does, without one.

As in a graph, what comes through memory is followed, and what the host put in is frozen: numbers, shapes, addresses.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as trees
from torch.utils._python_dispatch import TorchDispatchMode

from outrider import engine

ROOT = Path(engine.__file__).parent
# A graph cannot hold them: the host would wait for what is only being recorded.
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "bincount", "equal", "is_nonzero"}

ALLOCATIONS = {"empty", "new_empty", "empty_like"}


@dataclass(frozen=True, slots=True)
class Call:
    """One operation with its very tensors."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    named: Mapping[str, Any]
    result: Any
    place: str
    """Innermost function of the engine that it was called in."""

    @property
    def name(self) -> str:
        return self.func.__name__.partition(".")[0]

    @property
    def law(self) -> tuple[object, ...]:
        """What of it is frozen: the operation, shapes and types, and the numbers of the host."""
        leaves = trees.tree_leaves((self.args, self.named))
        return (self.func, *((*each.shape, each.dtype) if isinstance(each, Tensor) else each for each in leaves))


class Recorder(TorchDispatchMode):
    """Records all operations within it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append(Call(func, args, kwargs or {}, result, _place()))
        return result

    @property
    def waits(self) -> list[str]:
        """Places that wait for a number."""
        return [f"{call.place}: {call.name}" for call in self.calls if call.name in WAITS]

    def replay(self) -> None:
        """Makes all calls again: they read and write the tensors of the recording; what is not written holds NaN."""
        for call in self.calls:
            if call.name in ALLOCATIONS and call.result.is_floating_point():
                call.result.fill_(torch.nan)
                continue
            before = trees.tree_leaves(call.result)
            for old, new in zip(before, trees.tree_leaves(call.func(*call.args, **call.named)), strict=True):
                # Views and results in place lie where they did.
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def frozen(self, other: "Recorder") -> set[str]:
        """Places whose calls are not those of another recording, up to the numbers in tensors."""
        laws = [[(call.place, call.law) for call in each.calls] for each in (self, other)]
        # Aligned, because a call that one of them has more would move all that follow.
        changes = SequenceMatcher(None, *laws, autojunk=False).get_opcodes()
        return {
            place
            for kind, *ends in changes
            if kind != "equal"
            for own, start, end in zip(laws, ends[::2], ends[1::2], strict=True)
            for place, _ in own[start:end]
        }


def record(compute: Callable[[], Tensor]) -> tuple[Recorder, Tensor]:
    """The recording of a computation, and its result, which a replay writes again."""
    with Recorder() as recorder, torch.no_grad():
        result = compute()
    return recorder, result


def _place() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and not Path(frame.f_code.co_filename).is_relative_to(ROOT):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"
