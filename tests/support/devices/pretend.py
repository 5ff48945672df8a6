"""A CUDA device that is not there: its tensors say that they are on it, and hold their numbers in the host's memory.

All that computes goes the device's way, with real numbers and torch's own operations. What a device refuses is an error
here too: host tensors among its own, and reading its memory as the host's. What makes the host wait for it is counted.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as trees

CUDA = torch.device("cuda", 0)
HOST = torch.device("cpu")
MARK = "_on_pretend_device"

# They give the host a number of the device's, or a tensor whose size depends on its numbers.
READS: tuple[Any, ...] = (
    *(Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
    *(Tensor.nonzero, torch.nonzero, torch.argwhere, Tensor.argwhere, torch.masked_select, Tensor.masked_select),
    *(torch.equal, Tensor.equal, torch.allclose, Tensor.allclose, Tensor.__contains__, Tensor.is_nonzero),
    *(torch.bincount, Tensor.bincount, torch.unique, Tensor.unique, torch.unique_consecutive),
    *(torch.repeat_interleave, Tensor.repeat_interleave, torch.histc),
)
# They read the host's memory at an address.
ADDRESSES: tuple[Any, ...] = (Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.untyped_storage)
INDEXING: tuple[Any, ...] = (Tensor.__getitem__, Tensor.__setitem__, Tensor.index_put_, Tensor.index_put)
COPIES: tuple[Any, ...] = (Tensor.copy_,)


def on_device(tensor: object) -> bool:
    """Whether a tensor says that it is on the device."""
    return isinstance(tensor, Tensor) and getattr(tensor, MARK, False)


def mark(value: object, *, is_on: bool = True) -> None:
    """Says of all tensors in a value whether they are on the device."""
    for tensor in _tensors(value):
        setattr(tensor, MARK, is_on)


class PretendDevice(TorchFunctionMode):
    """Within it `cuda:0` is a device, in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        """What the host has waited for the device with, in order."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        found = list(_tensors((args, named)))
        own = [tensor for tensor in found if on_device(tensor)]
        if func == Tensor.device.__get__:
            return CUDA if own else func(*args)
        if func in {Tensor.is_cpu.__get__, Tensor.is_cuda.__get__}:
            return (func == Tensor.is_cuda.__get__) if own else func(*args)
        if func == Tensor.data.__set__:
            func(*args)
            return mark(args[0], is_on=on_device(args[1]))
        if func in {Tensor.to, Tensor.cpu, Tensor.cuda}:
            return self._move(func, args, named)
        if own:
            self._look_at(func, args, found)
        elif _is_cuda(named.get("device")):
            named["device"], own = HOST, [torch.empty(0)]
            if func is torch.tensor:
                self.waits.append("tensor")
        result = func(*args, **named)
        if own:
            mark(result)
        return result

    def _look_at(self, func: Callable[..., Any], args: tuple[Any, ...], found: list[Tensor]) -> None:
        """Raises what the device would say, and counts a wait."""
        if func in ADDRESSES:
            raise TypeError(f"{func.__name__} of a tensor on {CUDA}: its memory is not the host's")
        # A device takes a single number of the host's, and copies whatever is to be copied.
        strangers = [tensor for tensor in found if not on_device(tensor) and tensor.ndim]
        if strangers and func not in COPIES:
            raise RuntimeError(f"{func.__name__}: tensors on {CUDA} and on the CPU, {list(strangers[0].shape)}")
        is_masked = func in INDEXING and any(each.dtype in {torch.bool, torch.uint8} for each in _tensors(args[1:2]))
        has_list = func in INDEXING and any(isinstance(each, list) for each in _parts(args[1]))
        is_sized = func is torch.where and len(args) == 1
        if func in READS or func in COPIES or is_masked or has_list or is_sized:
            self.waits.append(func.__name__.strip("_"))

    def _move(self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        tensor, others = args[0], list(args[1:])
        goal = HOST if func is Tensor.cpu else CUDA if func is Tensor.cuda else None
        for place, each in enumerate(others):
            if isinstance(each, str | torch.device):
                goal, others[place] = torch.device(each), HOST
            elif isinstance(each, Tensor):
                goal, others[place] = (CUDA if on_device(each) else each.device), each.dtype
        if named.get("device") is not None:
            goal, named["device"] = torch.device(named["device"]), HOST
        if tensor.is_meta or (goal is not None and goal.type == "meta"):
            # Models are made there before they are loaded; nothing of it is on any other device.
            return func(*args, **(named | ({"device": goal} if "device" in named else {})))  # type: ignore[no-any-return]
        is_on = on_device(tensor) if goal is None else _is_cuda(goal)
        if is_on != on_device(tensor):
            is_free = is_on and named.get("non_blocking", False)
            if not is_free:
                self.waits.append("to" if is_on else "cpu")
            named["copy"] = True
        named.pop("non_blocking", None)
        moved: Tensor = tensor.to(*others, **named) if others or named.keys() - {"copy"} else tensor
        if moved is tensor and named.get("copy"):
            moved = tensor.clone()
        mark(moved, is_on=is_on)
        return moved


@contextmanager
def pretend_device(patch: pytest.MonkeyPatch, free_bytes: int = 1 << 30) -> Iterator[PretendDevice]:
    """The device, as this process sees it: with so much free memory."""
    device = PretendDevice()
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    patch.setattr(torch.cuda, "synchronize", lambda *_: device.waits.append("synchronize"))
    patch.setattr(torch.cuda, "mem_get_info", lambda *_: (free_bytes, free_bytes))
    with device:
        yield device


def _tensors(value: object) -> Iterable[Tensor]:
    return (each for each in trees.tree_leaves(value) if isinstance(each, Tensor))


def _parts(index: object) -> tuple[object, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_cuda(device: object) -> bool:
    return device is not None and torch.device(device).type == "cuda"  # type: ignore[call-overload,no-any-return]
