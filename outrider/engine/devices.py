"""The device that a name means, and what this process sees of accelerators."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import InvalidRequest


def send(values: NDArray[Any], device: torch.device) -> Tensor:
    """The values on a device, and on the CPU themselves; without waiting for what the device is doing.

    They are read before it returns: of memory that is not pinned a copy is queued. Pinned memory was tried on an H100,
    and is no faster: a step of 8B took 6.23 ms from either.
    """
    tensor = torch.from_numpy(values)
    # Asking for the device that it is on already would cost as much as making it.
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def bind(device: torch.device) -> None:
    """Makes a card the calling thread's: kernels are launched there, and by default on the first card."""
    if device.type == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(device)


def free_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that no process holds, after this one has given back what it does not use."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def checked_device(name: str, field: str = "device") -> torch.device:
    """The device "cpu" or "cuda:N". Raises InvalidRequest about the field where this process does not see it."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidRequest(field, name, '"cpu" or "cuda:N"') from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise InvalidRequest(field, name, '"cpu" or "cuda:N"')
    if (device.index or 0) >= torch.cuda.device_count():
        raise InvalidRequest(field, name, f'"cpu", or a CUDA device that this process sees. {seen_devices()}')
    return torch.device("cuda", device.index or 0)


def seen_devices() -> str:
    """Sentence without its full stop: which CUDA devices this process sees, and what to do for others."""
    count = torch.cuda.device_count()
    seen = f"It sees {'cuda:0 alone' if count == 1 else f'cuda:0 to cuda:{count - 1}' if count else 'no CUDA device'}"
    lists, given, variables = "nvidia-smi", "--gpus all", ["CUDA_VISIBLE_DEVICES"]
    if torch.version.hip is not None:
        # A torch for ROCm has AMD's cards as such devices, and heeds both variables.
        lists, given = "rocm-smi", "--device /dev/kfd --device /dev/dri"
        variables.insert(0, "HIP_VISIBLE_DEVICES")
    elif torch.version.cuda is None:
        return f"{seen}, because torch {torch.__version__} is built without CUDA: install a build that has it"
    for name in variables:
        if (hidden := os.environ.get(name)) is not None:
            return f"{seen}, and {name} is {hidden!r}: unset it, or name devices there that {lists} lists"
    return f"{seen}: {lists} has to list it here, and a container has to be given it ({given})"


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
