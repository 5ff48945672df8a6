"""CUDA graphs without a card: torch's functions for them record what is called, kernels in the interpreter among it.

As on a card, a replay reads and writes the memory of its recording, and host numbers are those of the recording.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.devices.interpreted import REASON
from support.devices.recorder import Call, Recorder
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode
from triton.runtime.interpreter import InterpretedFunction

assert REASON is None
run = InterpretedFunction.run


class PretendGraph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.num_replays = 0

    def pool(self) -> tuple[int, int]:
        return 0, 0

    def replay(self) -> None:
        self.num_replays += 1
        self.recorder.replay()


def launch(kernel: InterpretedFunction, grid: Sequence[int], args: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Runs a kernel; what the interpreter itself does with tensors is no call of the program's."""
    with _disable_current_modes():
        run(kernel, *args, grid=grid, warmup=False, **named)


def recorded_run(kernel: InterpretedFunction, *args: Any, grid: Sequence[int], warmup: bool, **named: Any) -> None:
    """Runs it, and keeps it among the calls where one records."""
    assert not warmup
    launch(kernel, grid, args, named)
    mode = _get_current_dispatch_mode()
    if isinstance(mode, Recorder):
        mode.calls.append(Call(launch, (kernel, grid, args, named), {}, None, kernel.__name__))


@contextmanager
def pretend_graphs(patch: pytest.MonkeyPatch) -> Iterator[list[PretendGraph]]:
    """Within it graphs are recorded; gives all that have been."""
    graphs: list[PretendGraph] = []
    stream = SimpleNamespace(wait_stream=lambda _: None)

    def made() -> PretendGraph:
        graphs.append(PretendGraph())
        return graphs[-1]

    with patch.context() as own:
        own.setattr(torch.cuda, "Stream", lambda *_: stream)
        own.setattr(torch.cuda, "current_stream", lambda *_: stream)
        own.setattr(torch.cuda, "stream", lambda _: nullcontext())
        own.setattr(torch.cuda, "CUDAGraph", made)
        own.setattr(torch.cuda, "graph", lambda graph, pool: graph.recorder)
        own.setattr(InterpretedFunction, "run", recorded_run)
        yield graphs
