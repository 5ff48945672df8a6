"""CUDA graphs without a card: torch's functions for them record what is called, kernels in the interpreter among it.

As on a card, a replay reads and writes the memory of its recording, and host numbers are those of the recording. A
kernel that has to be compiled ends a recording, and streams run side by side where none waits for the other.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.devices.interpreted import REASON
from support.devices.recorder import Call, Recorder
from support.devices.variants import Part, taken_apart
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode
from triton.runtime.interpreter import InterpretedFunction

assert REASON is None
run = InterpretedFunction.run


class PretendStream:
    """Stands for torch.cuda.Stream."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.awaited: dict[PretendStream, int] = {}

    def wait_stream(self, other: "PretendStream") -> None:
        """Waits for what the other one has begun so far."""
        self.awaited[other] = other.num_begun


class Card:
    """What a card would know: its streams, and what has been compiled."""

    def __init__(self) -> None:
        self.graphs: list[PretendGraph] = []
        self.compiled: set[tuple[Part, Part]] = set()
        self.stream = self._last = PretendStream()

    @contextmanager
    def within(self, stream: PretendStream) -> Iterator[None]:
        """Stands for torch.cuda.stream."""
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def begin(self) -> None:
        """Something runs on the current stream; raises RuntimeError where it may run before what came last."""
        last, now = self._last, self.stream
        if now is not last and now.awaited.get(last) != last.num_begun:
            raise RuntimeError("two streams run side by side")
        now.num_begun += 1
        self._last = now

    def run(self, kernel: InterpretedFunction, *args: Any, grid: Sequence[int], warmup: bool, **named: Any) -> None:
        """Runs a kernel, and keeps it among the calls where one records."""
        assert not warmup
        mode = _get_current_dispatch_mode()
        signature = taken_apart(kernel, args, named)
        if isinstance(mode, Recorder):
            if signature not in self.compiled:
                raise RuntimeError(f"{kernel.__name__} is compiled while a graph is recorded")
            mode.calls.append(Call(launch, (kernel, grid, args, named), {}, None, kernel.__name__))
        else:
            self.begin()
        self.compiled.add(signature)
        launch(kernel, grid, args, named)


class PretendGraph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self, card: Card) -> None:
        self.recorder = Recorder()
        self.num_replays = 0
        self._card = card

    def pool(self) -> tuple[int, int]:
        return 0, 0

    def replay(self) -> None:
        self.num_replays += 1
        self._card.begin()
        self.recorder.replay()


def launch(kernel: InterpretedFunction, grid: Sequence[int], args: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Runs a kernel; what the interpreter itself does with tensors is no call of the program's."""
    with _disable_current_modes():
        run(kernel, *args, grid=grid, warmup=False, **named)


@contextmanager
def pretend_card(patch: pytest.MonkeyPatch) -> Iterator[Card]:
    """Within it graphs are recorded; gives the card that knows them all."""
    card = Card()

    def made() -> PretendGraph:
        card.graphs.append(PretendGraph(card))
        return card.graphs[-1]

    def run_here(kernel: InterpretedFunction, *args: Any, **named: Any) -> None:
        card.run(kernel, *args, **named)

    with patch.context() as own:
        own.setattr(torch.cuda, "Stream", lambda *_: PretendStream())
        own.setattr(torch.cuda, "current_stream", lambda *_: card.stream)
        own.setattr(torch.cuda, "stream", card.within)
        own.setattr(torch.cuda, "CUDAGraph", made)
        own.setattr(torch.cuda, "graph", lambda graph, pool: graph.recorder)
        own.setattr(InterpretedFunction, "run", run_here)
        yield card
